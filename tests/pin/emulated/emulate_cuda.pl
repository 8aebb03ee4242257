#!/usr/bin/env perl
# Copies the CUDA headers of the library in a form that a host compiler takes: launches become kvevict_emulated::Launch,
# shared memory becomes the block's. Usage: emulate_cuda.pl INCLUDE OUT
use strict;
use warnings;
use File::Basename qw(basename dirname);
use File::Find;
use File::Path qw(make_path);

my ($include, $out) = @ARGV;
die "usage: emulate_cuda.pl INCLUDE OUT\n" unless defined $out;
my $stand_in = dirname(__FILE__) . '/cta.cuh';

my @headers;
find(sub { push @headers, $File::Find::name if /\.cuh$/ }, "$include/kvevict");
for my $header (@headers) {
  my $name = basename($header);
  next if $name =~ /sort/;    # sorts with CUB, which comes with the toolkit alone
  open(my $in, '<', $name eq 'cta.cuh' ? $stand_in : $header) or die "$header: $!\n";
  local $/;
  my $text = <$in>;
  close $in;
  my $balanced = qr/(?<round>\((?:[^()]++|(?&round))*+\))/;
  # kernel<types><<<where>>>(arguments)
  $text =~ s/([\w:]+(?:<[^<>;(){}]*>)?)\s*<<<(.*?)>>>\s*$balanced/::kvevict_emulated::Launch($2) = [&] { $1$3; }/gs;
  $text =~ s/extern\s+__shared__[^;]*?(\w+)\[\];/auto* $1 = static_cast<unsigned char*>(::kvevict_emulated::dynamic_shared);/g;
  $text =~ s/__shared__ /static /g;
  $text =~ s/^#pragma nv_.*$//gm;
  die "$header: a launch was not understood\n" if $text =~ /<<</;
  (my $to = $header) =~ s/^\Q$include\E/$out/;
  make_path(dirname($to));
  open(my $file, '>', $to) or die "$to: $!\n";
  print $file $text;
  close $file;
}

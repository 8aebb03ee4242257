#!/usr/bin/env bash
# Compiles every header of include/kvevict/cuda alone and every kernel for three architectures, with all warnings as
# errors and no flags beyond the language standard, and holds what ptxas says of each kernel against resources.tsv.
#
#   compile_check.sh NVCC BUILD_DIR [--update]
#
# A register spill fails. Under the compiler that the table names, registers, shared memory and stack have to be those
# of the table, and every kernel has to be in it; --update writes the table anew. No device is needed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
nvcc=${1:?path of nvcc}
build=${2:?folder for build products}
mode=${3:-}
table=$here/resources.tsv
jobs=${KVEVICT_CUDA_JOBS:-$(nproc)}
mkdir -p "$build" && cd "$build" || exit 1
rm -f ./*.log ./*.failed ./*.one.cu

flags=(-std=c++20 -Werror all-warnings -I"$root/include" -I"${KVEVICT_EIGEN:-/usr/include/eigen3}")
architectures=(-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90
               -gencode arch=compute_100,code=sm_100)

# Headers that a file of compile/ includes first are compiled alone there; the others here, for one architecture.
for header in "$root"/include/kvevict/cuda/*.cuh; do
  name=$(basename "$header" .cuh)
  [ -f "$here/compile/$name.cu" ] || echo "#include \"kvevict/cuda/$name.cuh\"" > "$name.one.cu"
done

compile() {  # source, log name, flags...
  local source=$1 log=$2
  shift 2
  "$nvcc" "$@" -Xptxas -v -c "$source" -o "$log.o" > "$log.log" 2>&1 || { touch "$log.failed"; cat "$log.log" >&2; }
  rm -f "$log.o"
}
started=$SECONDS
# The heavy ones first.
for source in select_sort window_attention token_network policy key_scorers row_scorers select cache; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
  compile "$here/compile/$source.cu" "$source" "${flags[@]}" "${architectures[@]}" &
done
for source in *.one.cu; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
  compile "$source" "${source%.cu}" "${flags[@]}" -arch=sm_90 &
done
wait
if compgen -G '*.failed' > /dev/null; then
  echo "compile_check: failed: $(ls ./*.failed)" >&2
  exit 1
fi

# kernel, architecture, registers, static shared memory, stack, spilled bytes; only our own kernels.
read_logs() {
  cat ./*.log | c++filt | awk '
    /Compiling entry function/ { split($0, q, "\x27"); kernel = q[2]; arch = q[4]; stack = spill = 0; next }
    /bytes stack frame/ { if ($1 > stack) stack = $1; spill += $5 + $9; next }
    /Used [0-9]+ registers/ {
      match($0, /Used [0-9]+/); registers = substr($0, RSTART + 5, RLENGTH - 5)
      shared = 0
      if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART, RLENGTH - 11)
      if (kernel ~ /kvevict/) {
        gsub(/kvevict::(v[0-9]+_[0-9a-z_]+::)?(cuda::(kernels::)?)?/, "", kernel)
        sub(/^void /, "", kernel); sub(/\(.*/, "", kernel)
        print kernel "\t" arch "\t" registers "\t" shared "\t" stack "\t" spill
      }
    }' | LC_ALL=C sort -u
}
compiler=$("$nvcc" --version | sed -n 's/.*release [^V]*V/V/p')
{ printf '# nvcc %s\nkernel\tarch\tregisters\tshared\tstack\tspill\n' "$compiler"; read_logs; } > resources.tsv
echo "compile_check: $(grep -c sm_ resources.tsv) kernels in $((SECONDS - started)) s"

if awk -F'\t' '/^#/ || $1 == "kernel" { next } $6 > 0 { print "spills " $6 " bytes: " $1 " (" $2 ")"; bad = 1 } END { exit !bad }' resources.tsv; then
  exit 1
fi
if [ "$mode" = --update ]; then
  cp resources.tsv "$table" && echo "compile_check: wrote $table"
  exit
fi
if [ "$(head -1 "$table")" != "$(head -1 resources.tsv)" ]; then
  echo "compile_check: the table is of $(head -1 "$table"), this is nvcc $compiler: only spills were checked"
  exit 0
fi
diff "$table" resources.tsv && exit 0
echo "compile_check: resources differ from $table; where that is wanted, run with --update" >&2
exit 1

# Sourced by demo.sh and run.sh: installs Debian or Ubuntu packages that are missing, as root or with sudo.
# Prints one line when it installs something, nothing otherwise.

build_packages="g++ cmake ninja-build libeigen3-dev libxtensor-dev nlohmann-json3-dev libcli11-dev libhwy-dev"
test_packages="doctest-dev libbenchmark-dev python3"
check_packages="clang clang-format libomp-dev"

need_packages() {
  command -v dpkg-query >/dev/null || return 0 # not a Debian family: CMake says what it misses
  local missing="" package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
  done
  [ -z "$missing" ] && return 0
  local as_root=""
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "missing packages:$missing; install them as root" >&2; return 1; }
    as_root=sudo
  fi
  echo "installing:$missing"
  local log
  log=$(mktemp)
  if ! { $as_root apt-get update -qq && $as_root env DEBIAN_FRONTEND=noninteractive \
         apt-get install -y -qq --no-install-recommends $missing; } >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}

# Runs a command with its output kept back, and shows it only where it fails.
quietly() {
  local log
  log=$(mktemp)
  if ! "$@" >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}

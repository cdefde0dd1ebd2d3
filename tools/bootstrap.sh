#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Creates the virtual environment and checks for system packages, with "test", "fuzz" and "lint" also
# for those of the tests, of libFuzzer and of the check of locks.
# Usage: tools/bootstrap.sh PYTHON VENV train|test|fuzz|lint
# As root with apt-get, it installs missing system packages; otherwise it only names them.
set -euo pipefail
python=$1 venv=$2 purpose=$3

say() { echo "bootstrap: $*" >&2; }
die() {
  say "$*"
  exit 1
}
have() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ]; }

have "$python" || die "$python not found: install Python 3.10 or newer, or give one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  die "$("$python" --version) is too old, give 3.10 or newer: make PYTHON=/path/to/python3"

packages=()
# need TEST PACKAGE WHY: adds PACKAGE to the missing ones unless the command TEST succeeds.
need() {
  eval "$1" >/dev/null 2>&1 && return
  say "missing: $2 ($3)"
  packages+=("$2")
}

version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
header='import sys, sysconfig; open(sysconfig.get_path("include") + "/Python.h")'
need '"$python" -c "import ensurepip, venv"' "$version-venv" "creates $venv"
need '"$python" -c "$header"' "$version-dev" "Python.h, to build the extension"
need 'have "${CXX:-c++}" || have g++' g++ "a C++20 compiler"
if [ "$purpose" = test ]; then
  need 'have ccache' ccache "optional: later builds, also of other clones, compile only what has changed"
  need 'echo "#include <gtest/gtest.h>" | "${CXX:-c++}" -x c++ -fsyntax-only -' libgtest-dev "C++ tests"
  need 'have chromium || have chromium-browser || have google-chrome' chromium \
    "optional: a test that opens the pages of usbyte report"
  need 'have ip' iproute2 "optional: tests in network namespaces"
  # On a machine with systemd, the package would start a daemon that the user did not ask for.
  [ -d /run/systemd/system ] || need 'have sshd' openssh-server "optional: tests of usbyterun over ssh"
fi

if [ "$purpose" = fuzz ]; then
  need 'have clang++-16 || have clang++-19' clang-16 "has libFuzzer; older releases cannot compile the ranges of libstdc++ 12"
  need 'ls /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a' libclang-rt-16-dev "libFuzzer"
fi

if [ "$purpose" = lint ]; then
  need 'have clang++-16 || have clang++-19 || have clang++' clang-16 "optional: checks which lock guards what"
fi

if [ ${#packages[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && have apt-get; then
    say "installing ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt=(apt-get -qq -o DPkg::Lock::Timeout=300)
    { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${packages[@]}"; } \
      </dev/null >&2 || say "apt-get could not install all of them; continuing without"
  else
    say "continuing without; on Debian or Ubuntu, install them with: apt-get install ${packages[*]}"
  fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" ||
  die "cannot create $venv; install the package that the message of $python -m venv names"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the source distribution, and from it a wheel for each interpreter that runs on glibc 2.28 and
# newer. Needs g++, and no container.
# Usage: tools/wheels.sh PYTHON OUT [INTERPRETER...]
# PYTHON runs the tools. INTERPRETERs default to those of python3.10 to python3.14 that are on PATH.
set -euo pipefail
python=$1 out=$(realpath -m "$2")
shift 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$root/build/wheels
limit=6000000

interpreters=("$@")
if [ ${#interpreters[@]} = 0 ]; then
  for minor in 10 11 12 13 14; do
    # A shim of pyenv exists for versions that are not selected, too, and fails.
    if "python3.$minor" -c '' 2>/dev/null; then interpreters+=("python3.$minor"); fi
  done
fi
[ ${#interpreters[@]} -gt 0 ] || { echo "wheels: no python3.10 to python3.14 on PATH; name some" >&2; exit 1; }

mkdir -p "$work" "$out"
[ -x "$work/tools/bin/python" ] || "$python" -m venv "$work/tools"
tools=$work/tools/bin
# shellcheck disable=SC2046
"$tools/python" -m pip install -q --disable-pip-version-check \
  $("$tools/python" "$root/tools/requirements.py" build wheels)
export PATH=$tools:$PATH USBYTE_PRESET=wheel USBYTE_ZIG_PYTHON=$tools/python
# All interpreters build with the packages of one, so that they share what does not depend on Python.
PYTHONPATH=$("$tools/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PYTHONPATH

rm -rf "$work/sdist" "$work/source" "$work/linux" "$work/checked" "$root"/python/*.egg-info
mkdir -p "$work/source"
cd "$root"
"$tools/python" -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' \
  "$work/sdist" >"$work/sdist.log" 2>&1 || { cat "$work/sdist.log" >&2; exit 1; }
tar -xzf "$work"/sdist/usbyte-*.tar.gz -C "$work/source" --strip-components=1
cd "$work/source"
for interpreter in "${interpreters[@]}"; do
  echo "wheels: $("$interpreter" --version)"
  rm -rf build/lib* build/bdist*
  "$interpreter" -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$work/linux" .
done
for wheel in "$work"/linux/*.whl; do
  "$tools/auditwheel" repair --plat "manylinux_2_28_$(uname -m)" -w "$work/checked" "$wheel" \
    2>"$work/auditwheel.log" || { cat "$work/auditwheel.log" >&2; exit 1; }
done
cp "$work"/sdist/*.tar.gz "$work"/checked/*.whl "$out"
for file in "$work"/sdist/*.tar.gz "$work"/checked/*.whl; do
  size=$(stat -c %s "$file")
  printf '%10d bytes  %s\n' "$size" "$out/$(basename "$file")"
  [ "$size" -le $limit ] || { echo "wheels: more than $limit bytes" >&2; exit 1; }
done

# SPDX-License-Identifier: Apache-2.0
"""Finds NCCL libraries, in the order of preference of usbyte."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from usbyte import cluster_env
from usbyte.cli.doctor.findings import Finding

SONAME = "libnccl.so.2"

# Runs in a separate process: a library that is broken, or built for another CUDA version, may crash
# the process that opens it. ncclGetVersion does not initialize CUDA.
_ASK = """
import ctypes, sys
version = ctypes.c_int()
library = ctypes.CDLL(sys.argv[1])
assert library.ncclGetVersion(ctypes.byref(version)) == 0
with open("/proc/self/maps") as maps:
    paths = [line.split(maxsplit=5)[5].strip() for line in maps if "libnccl" in line]
print(version.value, (paths or [sys.argv[1]])[0])
"""


def libraries(torch: ModuleType | None) -> Iterator[Finding]:
    """Yields version and path of each copy of NCCL.

    Args:
        torch: The module; None if it cannot be imported.
    """
    chosen = cluster_env.usbyte_variables().get("USBYTE_NCCL_LIB", "")
    found = False
    if chosen:
        found = True
        remedy = "Set it to the path of a libnccl.so.2 that can be loaded, or unset it."
        yield _ask(chosen, "by USBYTE_NCCL_LIB", remedy)
    if torch is not None and torch.version.cuda is not None:
        found = True
        yield Finding("NCCL", "torch's", _torchs(torch))
    wheel = _wheel()
    if wheel is not None:
        found = True
        yield _ask(str(wheel), "nvidia-nccl wheel", "Reinstall the nvidia-nccl wheel.")
    system = _ask(SONAME, "system's", "")
    if system.status == "ok":
        found = True
        yield system
    if not found:
        yield Finding("NCCL", "library", f"no {SONAME} found; needed only for CUDA tensors")


def _torchs(torch: ModuleType) -> str:
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        maps = ""
    paths = re.findall(r"/\S*libnccl\S*", maps)
    return f"{version}, {paths[0] if paths else 'linked into torch'}"


def _wheel() -> Path | None:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    candidates = [Path(folder) / "lib" / SONAME for folder in folders]
    return next((path for path in candidates if path.exists()), None)


def _ask(library: str, name: str, remedy: str) -> Finding:
    command = [sys.executable, "-c", _ASK, library]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return Finding("NCCL", name, f"{library} cannot be opened: no answer", "broken", remedy)
    if run.returncode != 0:
        reason = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
        return Finding("NCCL", name, f"{library} cannot be opened: {reason}", "broken", remedy)
    code, path = run.stdout.strip().split(maxsplit=1)
    return Finding("NCCL", name, f"{_version(int(code))}, {path}")


def _version(code: int) -> str:
    """Decodes NCCL's version number: 22703 is 2.27.3; before 2.9 it was 2708 for 2.7.8."""
    base = 10000 if code >= 10000 else 1000
    return f"{code // base}.{code % base // 100}.{code % 100}"

# SPDX-License-Identifier: Apache-2.0
"""Collects facts about this machine, in a separate process, as a broken driver may hang it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

_LIMIT_S = 120.0  # The first import of torch on a fresh machine reads gigabytes.

_ASK = """
import json, sys
try:
    import torch
except ImportError as error:
    sys.exit(f"{sys.executable} has no torch ({error})")
if torch.version.cuda is None:
    sys.exit(f"torch {torch.__version__} of {sys.executable} is built without CUDA")
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} of {sys.executable} sees no GPU")
gpu = torch.cuda.get_device_properties(0)
torch.ones(8, device="cuda").sum().item()
with open("/proc/self/maps") as maps:
    nccl = sorted({line.split(maxsplit=5)[5].strip() for line in maps if "libnccl" in line})
version = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps({
    "GPU": gpu.name,
    "GPUs": torch.cuda.device_count(),
    "GPU memory": f"{gpu.total_memory / 2**30:.1f} GiB",
    "multiprocessors": gpu.multi_processor_count,
    "compute capability": f"{gpu.major}.{gpu.minor}",
    "torch": torch.__version__,
    "CUDA of torch": torch.version.cuda,
    "NCCL of torch": version,
    "NCCL library": nccl[0] if nccl else "",
}))
"""
_REMEDY = (
    "name a Python whose torch sees a GPU: make gpu-test PYTHON=/path/to/python3; "
    "`nvidia-smi` shows whether there is one"
)


class NoGpuError(Exception):
    """This machine has no GPU that torch can use."""


def ask(revision: str = "") -> dict[str, object]:
    """Returns facts about this machine by name, in the order in which the report shows them.

    Args:
        revision: Revision of the sources; "" to ask git.

    Raises:
        NoGpuError: torch or a GPU is missing; the message has a remedy.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_LIMIT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoGpuError(f"no answer from the GPU within {_LIMIT_S:.0f} s; {_REMEDY}") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise NoGpuError(f"{reason}; {_REMEDY}")
    facts: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts | {
        "driver": _driver(),
        "nvcc": _last_line("nvcc", "--version"),
        "CPU": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "revision": _revision(revision),
    }


def slug(gpu: str) -> str:
    """Returns the report's file name: "h100-80gb-hbm3" for "NVIDIA H100 80GB HBM3"."""
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return "-".join(words[1:] if words[:1] == ["nvidia"] and words[1:] else words) or "gpu"


def _driver() -> str:
    version = _last_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if re.fullmatch(r"[0-9.]+", version):
        return version
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    match = re.search(r"\b[0-9]{3}\.[0-9.]+", text)
    return match[0] if match else "unknown"


def _cpu() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def _revision(given: str) -> str:
    if given:
        return given
    return _last_line("git", "describe", "--always", "--dirty", "--abbrev=12") or "unknown (no git)"


def _last_line(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[-1].strip() if done.returncode == 0 and lines else ""

# SPDX-License-Identifier: Apache-2.0
"""Energy that the machines of a job use, read from counters of CPUs and GPUs.

CPUs: Linux RAPL, packages and memory, which only root may read on most systems. GPUs: NVML, if
pynvml is installed (`pip install nvidia-ml-py`). Counters are those of whole machines: what else
runs there, and idling, is in them.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

import usbyte.torch as ub

_RAPL = Path("/sys/class/powercap")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Counter(Protocol):
    """Energy since some moment in the past."""

    def joules(self) -> float:
        """Grows; OSError if it cannot be read."""


class RaplCounter:
    """One domain of Linux RAPL, whose counter begins anew at its range (some minutes to hours).

    Read it more often than that.

    Args:
        folder: Of the domain, with energy_uj and max_energy_range_uj.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj, self._wrapped_uj = int(self._path.read_text()), 0

    def joules(self) -> float:
        """Counted since the machine started, as far as it was not missed."""
        now_uj = int(self._path.read_text())
        if now_uj < self._last_uj:
            self._wrapped_uj += self._range_uj
        self._last_uj = now_uj
        return (self._wrapped_uj + now_uj) * 1e-6


class NvmlCounter:
    """One GPU.

    Args:
        nvml: The module pynvml, initialised.
        index: Of the GPU.
    """

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByIndex(index)
        self.joules()

    def joules(self) -> float:
        """Counted since the driver was loaded."""
        millijoules: int = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        return millijoules * 1e-3


def rapl_counters(root: Path = _RAPL) -> list[Counter]:
    """Packages, and memory, which is not in them; empty where they are missing or unreadable."""
    found: list[Counter] = []
    for folder in sorted(root.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
            # Other domains are parts of a package, or hold packages: they would count twice.
            if name.startswith("package") or name == "dram":
                found.append(RaplCounter(folder))
        except (OSError, ValueError):
            return []
    return found


def nvml_counters() -> list[Counter]:
    """Every GPU; empty without pynvml, or where one of them has no counter (before Volta)."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
        return [NvmlCounter(nvml, i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


class Meter:
    """The energy of all machines of the job.

    One rank of each machine reads its counters. Collective, like its methods.

    Args:
        rapl: Of this machine; found here if None.
        nvml: Likewise.

    Attributes:
        what: Is counted, in words; empty where a machine has no counter, since a sum over the
            others would mislead.
    """

    def __init__(
        self, rapl: Sequence[Counter] | None = None, nvml: Sequence[Counter] | None = None
    ) -> None:
        machines = ub.allgather(torch.tensor([_machine()]), name="energy.machines").tolist()
        self._counters: list[Counter] = []
        found = [0.0, 0.0, 0.0]  # CPU counters, GPU counters, machines without any
        if machines.index(machines[ub.rank()]) == ub.rank():
            rapl = rapl_counters() if rapl is None else rapl
            nvml = nvml_counters() if nvml is None else nvml
            self._counters = [*rapl, *nvml]
            found = [float(len(rapl)), float(len(nvml)), float(not self._counters)]
        cpus, gpus, blind = (int(count) for count in _sum("energy.counters", found))
        self.what = "" if blind else f"{cpus} counters of CPUs and memory, {gpus} of GPUs"

    def joules(self) -> float | None:
        """Counted so far; differences count. None where a machine has no counter."""
        if not self.what:
            return None
        return _sum("energy.joules", [sum(counter.joules() for counter in self._counters)])[0]


def _sum(name: str, values: list[float]) -> list[float]:
    """Over all ranks."""
    total: list[float] = ub.allreduce(
        torch.tensor(values, dtype=torch.float64), name=name, op=ub.Sum
    ).tolist()
    return total


def _machine() -> int:
    """The same number on all ranks of a machine, network namespaces included."""
    digest = hashlib.sha256(_BOOT_ID.read_bytes()).digest()
    return int.from_bytes(digest[:7], "big")

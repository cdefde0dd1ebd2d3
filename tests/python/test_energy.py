# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/_energy.py` on a made-up sysfs and a made-up NVML."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from usbyte.planning import profiles

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def energy(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("_energy")


def domain(root, number, name, used_uj, range_uj=1_000_000):
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{used_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return folder / "energy_uj"


def test_packages_and_memory_are_counted_once(energy, tmp_path):
    domain(tmp_path, "0", "package-0", 100_000)
    domain(tmp_path, "0:0", "core", 90_000)
    domain(tmp_path, "0:1", "dram", 20_000)
    domain(tmp_path, "1", "package-1", 3_000)
    domain(tmp_path, "2", "psys", 500_000)
    (tmp_path / "intel-rapl").mkdir()
    counters = energy.rapl_counters(tmp_path)
    assert len(counters) == 3
    assert sum(counter.joules() for counter in counters) == pytest.approx(0.123)


def test_a_counter_begins_anew_at_its_range(energy, tmp_path):
    used = domain(tmp_path, "0", "package-0", 900_000)
    [counter] = energy.rapl_counters(tmp_path)
    first = counter.joules()
    for now, since_first in ((950_000, 0.05), (50_000, 0.15), (40_000, 1.14), (60_000, 1.16)):
        used.write_text(str(now))
        assert counter.joules() - first == pytest.approx(since_first)


def test_what_cannot_be_read_is_left_out(energy, tmp_path):
    assert energy.rapl_counters(tmp_path) == []
    domain(tmp_path, "0", "package-0", 1)
    domain(tmp_path, "1", "package-1", 1).unlink()  # a sum over half of the machine would mislead
    assert energy.rapl_counters(tmp_path) == []


@pytest.fixture
def nvml(monkeypatch):
    module = types.ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.used_mj = [1_500, 2_000]
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetCount = lambda: len(module.used_mj)
    module.nvmlDeviceGetHandleByIndex = lambda i: i
    module.nvmlDeviceGetTotalEnergyConsumption = lambda handle: module.used_mj[handle]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_gpus(energy, nvml):
    counters = energy.nvml_counters()
    assert [counter.joules() for counter in counters] == [1.5, 2.0]
    nvml.used_mj[1] = 2_250
    assert counters[1].joules() == 2.25


def test_without_a_driver_or_pynvml(energy, nvml, monkeypatch):
    def broken():
        raise nvml.NVMLError

    nvml.nvmlInit = broken
    assert energy.nvml_counters() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy.nvml_counters() == []


def test_a_meter_adds_up(energy, nvml, tmp_path, single):
    used = domain(tmp_path, "0", "package-0", 100_000)
    meter = energy.Meter(energy.rapl_counters(tmp_path), energy.nvml_counters())
    assert meter.what == "1 counters of CPUs and memory, 2 of GPUs"
    before = meter.joules()
    used.write_text("400000")
    nvml.used_mj[0] += 700
    assert meter.joules() - before == pytest.approx(1.0)
    comparison = importlib.import_module("_comparison")
    results = {"alone": comparison.Result([1.0, 1.2], None, [40.0, 43.0, 50.0])}
    job = profiles.vgg16_half()
    table = comparison.Comparison(job, results, {}, energy=meter.what).to_markdown()
    assert "energy by 1 counters of CPUs and memory, 2 of GPUs" in table
    assert "| against DDP | J for a step |" in table
    assert "| alone | 1.100 | 1.000 | 1.200 |  |  | 43.0 |" in table
    assert "J for a step" not in comparison.Comparison(job, results, {}).to_markdown()
    blind = energy.Meter([], [])
    assert blind.what == ""
    assert blind.joules() is None

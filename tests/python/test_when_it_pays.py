# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/when_it_pays.py` and the published inputs that it reads."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from usbyte import _core
from usbyte.planning.layout import tensor_specs

pytestmark = pytest.mark.evidence

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEGA = 1_000_000


@pytest.fixture
def pays(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("when_it_pays")


@pytest.fixture
def inputs(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("_inputs")


def job():
    """Two tensors of 4 MB; forward takes 10 ms for each, backward 10 ms for each."""
    specs = tensor_specs((name, MEGA, "float32") for name in ("a", "b"))
    return _core.Profile(specs, [0.0, 0.01], [0.04, 0.03])


def test_a_case_by_hand(pays):
    # An all_reduce of 4 MB takes 1 + 20 ms. DDP, an op for each tensor: b is sent from 30 to 51 ms,
    # a until 72 ms. One op for both starts at 40 ms and ends at 81 ms. Under auto, b may arrive
    # 10 ms later than a: a is sent first when it is ready, or both halves of b wait.
    network = _core.NetworkModel(4, [_core.AlphaBeta(1e-3, 5e-9)], concurrent=1)
    case = pays.case_of("job", job(), network, "words")
    assert case.communication == pytest.approx(1.0)
    assert case.startup == pytest.approx(0.025)
    assert case.compute_s == pytest.approx(0.04)
    assert case.ddp_s == pytest.approx(0.072)
    assert case.usual_s == pytest.approx(0.072)  # the first bucket of DDP is closed at 1 MiB
    assert case.bound_s <= case.auto_s < case.ddp_s
    assert case.gain == case.ddp_s / case.auto_s


def test_communication_is_that_of_a_ring(pays):
    # 8 MB on 8 ranks: 14 messages of 1 MB at 125 MB/s, and as many startups of 1 ms.
    network = _core.NetworkModel.ring(8, 1e-3, 125e6, 1)
    case = pays.case_of("job", job(), network, "words")
    assert case.communication == pytest.approx(2 * 7 / 8 * 8e6 / 125e6 / 0.04)
    assert case.startup == pytest.approx(14e-3 / 0.04)


def test_the_page(pays, tmp_path):
    jobs = {"job": job()}
    found = list(pays.cases(jobs))
    assert len(found) == 24
    page = pays.document(jobs, found, ["-o", "page.md"])
    rows = [line for line in page.splitlines() if line.startswith("| job |")]
    assert len(rows) == 2 + 1 + 24  # two headers, the job, its cases
    counts = [
        int(cell.rpartition(", ")[2])
        for line in page.partition("## By communication")[2]
        .partition("## The jobs")[0]
        .splitlines()
        if line.startswith("| ") and not line.startswith("| communication")
        for cell in line.strip("|").split(" | ")[1:]
        if cell.strip(" |")
    ]
    assert sum(counts) == 24
    pays.draw(found, tmp_path / "gains.svg")
    assert "<svg" in (tmp_path / "gains.svg").read_text()


def test_published_inputs_are_as_their_models_say(inputs):
    numel = {
        "zju_vgg16": 138_357_544, "zju_resnet50": 25_557_032, "zju_densenet201": 20_013_928,
        "espresso_lstm": 85_974_278,
        "espresso_resnet101": 44_549_160, "espresso_ugatit": 670_761_088,
    }  # fmt: skip
    assert set(inputs.NAMES) == set(numel)
    for name, profile in inputs.load_all().items():
        assert sum(t.numel for t in profile.tensors) == numel[name]
    dense = inputs.load("zju_densenet201")
    assert len(dense.tensors) == 604
    # Until the first gradient is ready, backward works on the last tensor.
    forward_s, backward_s = min(dense.ready_s), dense.backward_end_s - min(dense.ready_s)
    assert forward_s == pytest.approx(0.4915 + 1962.5e-6, rel=1e-3)
    assert backward_s == pytest.approx(0.2202 - 1962.5e-6, rel=1e-3)
    # A trace without forward times: forward takes half of backward.
    residual = inputs.load("espresso_resnet101")
    assert residual.backward_end_s == pytest.approx(1.5 * 0.120391)


def test_auto_is_never_worse_on_published_jobs(inputs):
    for name, profile in inputs.load_all().items():
        for ranks, gbit, overlap in (
            (8, 10, "forward"),
            (64, 25, "backward"),
            (32, 100, "forward"),
        ):
            network = _core.NetworkModel.ring(ranks, 25e-6, gbit * 1e9 / 8, 1)

            def step_s(policy, sizes, job=profile, network=network, overlap=overlap):
                plan = _core.make_plan(policy, job, network, sizes, overlap)
                return _core.simulate(plan, job, network, overlap).step_s

            ours_s = step_s("auto", {})
            assert ours_s >= _core.bound_s(profile, network, overlap) * (1 - 1e-9)
            for policy in {*_core.policies()} - {"auto", "p3", "themis"}:
                assert ours_s <= step_s(policy, {}) * (1 + 1e-9), (name, ranks, policy)
            for mib in (1, 5, 25, 100):
                assert ours_s <= step_s("ddp", {"bucket_bytes": mib << 20}) * (1 + 1e-9)

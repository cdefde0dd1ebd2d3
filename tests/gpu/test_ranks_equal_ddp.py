# SPDX-License-Identifier: Apache-2.0
"""Several ranks: the numbers of DDP on the same backend."""

from __future__ import annotations

import importlib
import os

import pytest

import usbyte.torch as ub
from _training import SHARDED, prepare, train, wrong
from _transport import everywhere, for_ranks
from usbyte import _core


def test_how_ranks_can_talk_here(transports, record_property):
    found, reasons = transports
    record_property("works", ", ".join(t.name for t in found))
    for name, reason in reasons.items():
        record_property(name, reason)
    assert found, reasons


def equal(transport, rank, size, tolerance, cases):
    ub.init()
    prepare()
    for optimizer, modes, variant in cases:
        expected = train("ddp", transport, optimizer, rank, **variant)
        for mode, policy in modes:
            state = train(
                mode, transport, optimizer, rank, policy=policy, partition_bytes=2048, **variant
            )
            bad = wrong(state, expected, tolerance)
            assert not bad, (optimizer, mode, policy, variant, bad)


@pytest.fixture
def compare(transports, record_property):
    def run(n, cases, tolerance=0.0):
        usable = for_ranks(transports, n)
        record_property("over", ", ".join(t.name for t in usable))
        everywhere(usable, n, equal, tolerance, cases, timeout=100)

    return run


PLANNED = [("backward", None), ("forward", None), ("forward", "bytescheduler")]
BOTH = PLANNED[:2]


def test_two_ranks_bit_for_bit(compare):
    compare(2, [(name, PLANNED, {}) for name in ("sgd", "adamw")])


def test_two_ranks_with_accumulation_and_mixed_dtypes(compare):
    variants = ({"accumulate": 3}, {"mixed": True})
    compare(2, [("adamw", BOTH, variant) for variant in variants])


def test_two_ranks_with_half_precision(compare):
    of_params = [{"dtype": dtype} for dtype in ("bfloat16", "float16")]
    variants = [*of_params, {"autocast": "bfloat16"}]
    compare(2, [("sgd", BOTH, variant) for variant in variants])


@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_two_ranks_with_a_grad_scaler(mode, compare, device):
    # A scale that overflows at first: all ranks must leave out the same steps.
    half, scale = ("float16", 2.0**22) if device == "cuda" else ("bfloat16", 2.0**127)
    variant = {"autocast": half, "scale": scale}
    compare(2, [("sgd", [(mode, None)], variant)])


def test_two_ranks_with_a_sharded_optimizer(compare):
    compare(2, [(name, [(SHARDED, None)], {}) for name in ("sgd", "adamw")])


# Four that share a GPU take turns on it, and each of them waits for the others inside NCCL.
FEW = {"steps": 9}


def test_four_ranks_closely(compare):
    # They sum in another order.
    compare(4, [("sgd", [*BOTH, (SHARDED, None)], {**FEW, "tune_steps": 2})], tolerance=1e-6)


def routed(transport, rank, size, topology):
    os.environ["USBYTE_TOPOLOGY"] = topology
    moves, plans = (
        importlib.import_module("usbyte.torch.optimizer.gradients.plan_executor").PlanExecutor,
        [],
    )
    adopt = moves.switch_plan
    moves.switch_plan = lambda self, plan, profiler: (
        plans.append(plan),
        adopt(self, plan, profiler),
    )[1]
    modes = [("backward", "themis"), ("forward", "themis")]
    equal(transport, rank, size, 1e-6, [("sgd", modes, FEW)])
    assert any(op.route is not None for plan in plans for op in plan.ops)


def test_four_ranks_on_routes_closely(transports, record_property, tmp_path):
    usable = for_ranks(transports, 4)
    record_property("over", ", ".join(t.name for t in usable))
    # So fast that routes are used, and speeds that are given are not measured.
    lines = [_core.Dimension("inside", 2, 1e12), _core.Dimension("between", 2, 1e12)]
    topology = tmp_path / "topology.json"
    topology.write_text(_core.Topology(lines).to_json())
    everywhere(usable, 4, routed, str(topology), timeout=100)

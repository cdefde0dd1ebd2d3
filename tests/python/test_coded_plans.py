# SPDX-License-Identifier: Apache-2.0
"""Which codecs are chosen, and what they are predicted to take."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _emulated import emulate
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.compression.codecs import Choices, choices_of
from usbyte.torch.plan import planner


def chooses(rank, size):
    ub.init()
    told = []
    logger = logging.getLogger("usbyte")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    chosen = {}
    for bytes_per_s in (1e5, 1e13):
        network = _core.NetworkModel.ring(size, 1e-6, bytes_per_s)
        planner.fit = lambda _size, _measured, network=network: network
        told.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        opt = ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
            compression="auto",
        )  # fmt: skip
        for _ in range(5):
            opt.zero_grad()
            model(torch.ones(4, 64)).sum().backward()
            opt.step()
        chosen[bytes_per_s] = {op.codec for op in opt.plan.ops}
        assert opt.decision.predicted_s > 0
        said = [line for line in told if "compression:" in line]
        assert len(said) == (1 if rank == 0 else 0), told
        if rank == 0:
            assert ("it does not pay" in said[0]) == (bytes_per_s > 1e6), said
        opt.close()
    assert "int8" in chosen[1e5]
    assert chosen[1e13] == {"none"}


def tried(rank, size, tune_steps):
    ub.init()
    planner.fit = lambda _size, _measured: _core.NetworkModel.ring(size, 1e-6, 1e5)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
        compression=["bf16", "topk:0.1"], tune_steps=tune_steps,
    )  # fmt: skip
    seen = []
    data = torch.Generator().manual_seed(rank)
    for _ in range(60):
        opt.zero_grad()
        model(torch.randn(4, 64, generator=data)).square().mean().backward()
        opt.step()
        plan = "/".join(sorted({op.codec for op in opt.plan.ops} - {"none"}))
        if opt.decision is not None and seen[-1:] != [plan]:
            seen.append(plan)
    assert opt.settled
    opt.synchronize()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min))
    opt.close()
    return seen


def test_codecs_to_choose_from_are_tried_in_the_job():
    seen = run_ranks(2, tried, 2, env={"USBYTE_LEARNING_STEPS": "2"})
    assert seen[0] == seen[1]
    # The best by prediction first; all are measured, and which is the fastest is the job's matter.
    assert seen[0][0] == "topk:0.1"
    assert {"topk:0.1", "bf16", ""} <= set(seen[0])


def test_without_trials_the_prediction_decides():
    assert run_ranks(2, tried, 0, env={"USBYTE_LEARNING_STEPS": "2"}) == [["topk:0.1"]] * 2


def leaves_alone(rank, size):
    ub.init()
    planner.fit = lambda _size, _measured: _core.NetworkModel.ring(size, 0.0, 1e13)
    model = nn.Linear(64, 64)
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
        policy="bytecomp", compression="int8",
    )  # fmt: skip
    for _ in range(5):
        opt.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        opt.step()
    assert {op.codec for op in opt.plan.ops} == {"none"}
    opt.close()


def test_what_a_policy_leaves_alone_stays_so():
    run_ranks(2, leaves_alone, env={"USBYTE_LEARNING_STEPS": "2"})


def on_a_device(rank, size):
    device = emulate()
    ub.init()
    planner.fit = lambda _size, _measured: _core.NetworkModel.ring(size, 1e-6, 1e5)
    measure, measured = _core.measure_codec, []

    def recorded(spec, _budget_s, place):
        measured.append((spec, place))
        return measure(spec, 0.002, place)

    _core.measure_codec = recorded
    model = nn.Linear(64, 64)
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
        compression="auto", tune_steps=0,
    )  # fmt: skip
    for _ in range(5):
        opt.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        opt.step()
    assert "int8" in {op.codec for op in opt.plan.ops}
    opt.close()
    assert sorted(measured, key=str) == [("bf16", device.core), ("int8", device.core)]


def test_codecs_are_measured_where_gradients_are():
    run_ranks(2, on_a_device, env={"USBYTE_LEARNING_STEPS": "2"})


def test_auto_compresses_where_it_pays():
    run_ranks(2, chooses, env={"USBYTE_LEARNING_STEPS": "2"})


def test_choices_are_read():
    params = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    assert choices_of("auto", ["a", "b"], params) == Choices(
        [["bf16", "bf16"], ["int8", "none"]], optional=True
    )
    assert choices_of("fp16", ["a", "b"], params) == Choices([["fp16", "fp16"]])
    some = choices_of(["fp16", {"a": "topk:0.5"}], ["a", "b"], params)
    assert some.lists[1] == ["topk:0.5", "none"]
    assert some.specs == {"fp16", "topk:0.5", "none"}
    with pytest.raises(UsageError, match="the list of codecs is empty"):
        choices_of([], ["a", "b"], params)

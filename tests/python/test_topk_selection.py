# SPDX-License-Identifier: Apache-2.0
"""Compressed gradients whose picked elements are added up by a scheme, and not gathered."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _emulated import emulate
from _ranks import run_ranks
from usbyte import _core
from usbyte.torch import testing
from usbyte.torch.plan import planner
from usbyte.torch.world.world import current


def with_scheme(plan, scheme):
    """The same plan, everything that can be added up by the scheme."""
    ops = [
        _core.Op(
            op.kind, op.blocks, op.window_bytes, op.fence, op.codec,
            scheme=scheme if op.codec.startswith(("topk", "dgc", "dct")) else "",
        )
        for op in plan.ops
    ]  # fmt: skip
    return _core.Plan(plan.policy, plan.tensors, ops)


def trained(rank, spec, scheme, overlap, steps=10):
    """Parameters, what is remembered, and what was produced and applied, over all ranks."""

    def policy(profile, network):
        plan = _core.make_plan("ddp", profile, network, {"bucket_bytes": 3000})
        codecs = [spec if t.name.endswith("weight") else "none" for t in profile.tensors]
        return with_scheme(_core.with_codecs(plan, codecs), scheme)

    current()._labels = 0  # what codecs draw by chance depends on the optimizer's name
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 40), nn.Linear(40, 5))
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(),
        compression=spec, policy=policy, overlap=overlap,
    )  # fmt: skip
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    produced = {n: torch.zeros_like(p) for n, p in before.items()}
    data = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        opt.zero_grad()
        grads = {n: torch.randn(p.shape, generator=data) for n, p in before.items()}
        x = sum(model.get_parameter(n).mul(g).sum() for n, g in grads.items())
        x.backward()
        opt.step()
        for n, g in grads.items():
            produced[n] += g
    opt.synchronize()
    left = {n: part[0].view_as(before[n]).clone() for n, part in testing.codec_state(opt).items()}
    schemes = {op.scheme for op in opt.plan.ops} - {""}
    assert schemes == ({scheme} if scheme else set())
    applied = {n: before[n] - p.detach() for n, p in model.named_parameters()}
    opt.close()
    return applied, left, produced


def equal(rank, size, spec):
    ub.init()
    planner.fit = lambda _size, _measured: _core.NetworkModel.ring(size, 1.0, 1e9)
    for overlap in ("backward", "forward"):
        want, want_left, _ = trained(rank, spec, "", overlap)
        got, left, produced = trained(rank, spec, "zen", overlap)
        for name in want:
            assert torch.equal(got[name], want[name]), (spec, overlap, name)
            assert torch.equal(left[name], want_left[name]), (spec, overlap, name)
            if "momentum" in spec or spec.startswith("topk"):
                # What was applied and what is remembered are all that there was.
                total = got[name] + ub.allreduce(left[name], op=ub.Sum)
                assert torch.allclose(total, ub.allreduce(produced[name]), atol=1e-4), name


@pytest.mark.parametrize("spec", ["topk:0.1", "dgc:0.1", "dgc:0.1,momentum=0,warmup=9"])
def test_sums_by_a_scheme_are_those_of_gathered_messages(spec):
    run_ranks(3, equal, spec, env={"USBYTE_LEARNING_STEPS": "2"})


def on_a_device(rank, size):
    emulate(most_delay_s=5e-3)  # so that codec state which nothing waits for comes too late
    equal(rank, size, "topk:0.1")


def test_on_a_device_too():
    run_ranks(2, on_a_device, env={"USBYTE_LEARNING_STEPS": "2"})


def chooses(rank, size, factor):
    ub.init()
    told = []
    logger = logging.getLogger("usbyte")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    planner.fit = lambda _size, _measured: _core.NetworkModel.ring(size, factor, 1e5)
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
        compression=ub.Compression.topk(0.5), policy="ddp",
    )  # fmt: skip
    for _ in range(5):
        opt.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        opt.step()
    schemes = {op.scheme for op in opt.plan.ops if op.codec != "none"}
    assert opt.decision.predicted_s > 0
    opt.close()
    said = [line for line in told if "are summed by scheme" in line]
    assert len(said) == (rank == 0 and schemes != {""}), told
    return sorted(schemes)


def test_a_scheme_is_chosen_where_it_is_clearly_faster():
    env = {"USBYTE_LEARNING_STEPS": "2"}
    assert run_ranks(4, chooses, 0.0, env=env) == [["zen"]] * 4
    assert run_ranks(2, chooses, 10.0, env=env) == [[""]] * 2

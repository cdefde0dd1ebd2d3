# SPDX-License-Identifier: Apache-2.0
"""Updates in one launch, by the device's kernels on the host, against torch's own."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _emulated import EmulatedDevice, emulate
from _models import difference, train
from _ranks import run_ranks
from usbyte.errors import UsageError
from usbyte.torch.optimizer.fused import FusedUpdate

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW

OPTIMIZERS = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 1e-3}),
    (ADAM, {"lr": 1e-2}),
    (ADAM, {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 1e-2, "maximize": True}),
    (ADAMW, {"lr": 1e-2, "weight_decay": 0.1}),
    (ADAMW, {"lr": 3e-3, "eps": 1e-6}),
]


@pytest.fixture
def device(monkeypatch):
    """The kernels of the device, run on the host."""
    device = EmulatedDevice()
    monkeypatch.setattr(
        importlib.import_module("usbyte.torch.runtime.device"), "device_at", lambda _: device
    )


def params(dtype):
    shapes = [(3, 5), (7,), (), (1,), (4, 3, 2, 2), (1000,), (0,)]
    generator = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    made.append(
        nn.Parameter(made[4].detach().clone().contiguous(memory_format=torch.channels_last))
    )
    return made


def ulps(got, want):
    """Largest difference, in units of the last place of the larger value around it."""
    eps = torch.finfo(want.dtype).eps
    scale = torch.maximum(want.abs(), want.abs().mean()).double() * eps
    off = (got.double() - want.double()).abs() / scale.clamp_min(torch.finfo(want.dtype).tiny)
    return off.max().item() if off.numel() else 0.0


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_equals_torch(kind, options, dtype):
    most = 2 if dtype == torch.float32 else 3  # torch's CPU kernels round in other places
    ours, theirs = params(dtype), params(dtype)
    mine, reference = kind(ours, **options), kind(theirs, **options, foreach=True)
    fused = FusedUpdate(mine, [str(i) for i in range(len(ours))], ours)
    generator = torch.Generator().manual_seed(2)
    for step in range(5):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if (step + i) % 4 == 0:
                a.grad = b.grad = None
                continue
            grad = torch.randn(a.shape, generator=generator).to(dtype)
            a.grad, b.grad = grad.clone(), grad.clone()
        fused.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            with torch.no_grad():
                assert ulps(a, b) <= most, (step, a.shape)
                b.copy_(a)  # so that the next step starts alike
                for key, value in mine.state[a].items():
                    other = reference.state[b][key]
                    if key == "step":
                        assert value == other
                    elif value is not None:
                        assert ulps(value, other) <= most, (step, key, a.shape)
                        other.copy_(value)


@pytest.mark.usefixtures("device")
def test_state_goes_to_torch_and_back():
    ours, theirs = params(torch.float32), params(torch.float32)
    mine, reference = ADAM(ours, lr=0.01), ADAM(theirs, lr=0.01)
    fused = FusedUpdate(mine, [str(i) for i in range(len(ours))], ours)
    for p, q in zip(ours, theirs, strict=True):
        p.grad = q.grad = torch.ones_like(p)
    reference.step()
    mine.load_state_dict(copy.deepcopy(reference.state_dict()))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    fused.step()
    reference.step()
    for p, q in zip(ours, theirs, strict=True):
        assert ulps(p.detach(), q.detach()) <= 1
    state = mine.state_dict()
    reference.load_state_dict(state)
    assert reference.state[theirs[0]]["step"] == 2


@pytest.mark.usefixtures("device")
def test_a_checkpoint_may_have_another_order_of_memory():
    plain = nn.Parameter(torch.randn(4, 3, 2, 2))
    ours = nn.Parameter(plain.detach().clone().contiguous(memory_format=torch.channels_last))
    reference, mine = ADAM([plain], lr=0.01), ADAM([ours], lr=0.01)
    plain.grad = torch.randn(4, 3, 2, 2)
    reference.step()
    mine.load_state_dict(copy.deepcopy(reference.state_dict()))
    with torch.no_grad():
        ours.copy_(plain)
    ours.grad = plain.grad.clone()
    FusedUpdate(mine, ["p"], [ours]).step()
    reference.step()
    assert ulps(ours.detach(), plain.detach()) <= 2


@pytest.mark.usefixtures("device")
def test_autograd_sees_the_write():
    [p] = [nn.Parameter(torch.ones(3))]
    fused = FusedUpdate(SGD([p], lr=0.1), ["p"], [p])
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    fused.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.RMSprop(p), "not RMSprop"),
        (lambda p: type("Mine", (SGD,), {})(p, lr=0.1), "not Mine"),
        (lambda p: ADAM(p, amsgrad=True), "amsgrad=True"),
        (lambda p: ADAM(p, capturable=False, fused=True), "fused=True"),
        (lambda p: SGD(p, lr=0.1, differentiable=True), "differentiable=True"),
    ],
)
def test_refuses_what_it_does_not_serve(make, reason):
    p = [nn.Parameter(torch.ones(2))]
    with pytest.raises(UsageError, match=reason):
        FusedUpdate(make(p), ["p"], p)


def test_refuses_the_host():
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(UsageError, match="CUDA devices"):
        FusedUpdate(SGD([p], lr=0.1), ["p"], [p])


@pytest.mark.usefixtures("device")
def test_refuses_gaps_and_hooks():
    p = nn.Parameter(torch.ones(4, 4)[:, :2])
    with pytest.raises(UsageError, match=r"without gaps, and 'p'"):
        FusedUpdate(SGD([p], lr=0.1), ["p"], [p])
    q = nn.Parameter(torch.ones(4, 2))
    optimizer = SGD([q], lr=0.1)
    fused = FusedUpdate(optimizer, ["q"], [q])
    around = torch.ones(4, 4)
    q.data, q.grad = around[:, :2], torch.ones(4, 2)
    with pytest.raises(UsageError, match=r"without gaps, and 'q'"):
        fused.step()
    assert torch.equal(around, torch.ones(4, 4))
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UsageError, match="step hooks"):
        fused.step()


def trains(rank, size):
    ub.init()
    expected = train("backward", "nesterov", rank, size, 10)
    emulate()
    for mode in ("backward", "forward"):
        assert (
            difference(train(mode, "nesterov", rank, size, 10, fused_update=True), expected) < 1e-5
        )


def test_trains_under_the_wrapper():
    run_ranks(2, trains, timeout=120)


def refuses_steps(rank, size):
    ub.init()
    emulate()
    for overlap in ("backward", "forward"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        opt = ub.DistributedOptimizer(
            ADAM(model.parameters()), model.named_parameters(), overlap=overlap, fused_update=True
        )
        weight = model[0].weight
        for k in range(6):
            opt.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            if k == 4:
                opt.param_groups[0]["amsgrad"] = True
                with pytest.raises(UsageError, match="amsgrad=True"):
                    opt.step()
                opt.param_groups[0]["amsgrad"] = False
                dense, weight.data = weight.data, torch.ones(8, 8)[:, :4]
                with pytest.raises(UsageError, match=r"without gaps, and '0\.weight'"):
                    opt.step()
                weight.data = dense
            opt.step()
        assert all(state["step"] == 6 for state in opt.state_dict()["state"].values())
        opt.close()


def test_a_step_that_is_refused_changes_nothing():
    run_ranks(2, refuses_steps, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})

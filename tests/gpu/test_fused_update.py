# SPDX-License-Identifier: Apache-2.0
"""`fused_update=True`: torch's own updates, to the last bit or the one before it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import usbyte.torch as ub
from _training import Deep, prepare
from _transport import for_ranks

SETTINGS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}),
    "dampening": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 1e-2}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "maximize": (torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
}
STEPS = 6


def ulps(got, want, before):
    """The largest difference, in units of the last place of the larger of old and new value.

    Where an update almost cancels a value, the result's own last place would count rounding errors
    of the update.
    """
    size = torch.maximum(before.abs(), want.abs())
    place = torch.nextafter(size, torch.full_like(size, torch.inf)) - size
    return ((got.double() - want.double()).abs() / place.double()).max().item()


def fused(transport, rank, size, overlap):
    """By setting and kind of torch's update, the largest difference over all steps."""
    ub.init()
    prepare()
    return {name: furthest(transport, rank, overlap, *SETTINGS[name]) for name in SETTINGS}


def furthest(transport, rank, overlap, kind, hyper):
    torch.manual_seed(11)
    model, twin = Deep().to(transport.device), Deep().to(transport.device)
    opt = ub.DistributedOptimizer(
        kind(model.parameters(), **hyper), model.named_parameters(), overlap=overlap,
        tune_steps=0, fused_update=True,
    )  # fmt: skip
    data = torch.Generator().manual_seed(rank)
    worst = {"foreach": 0.0, "fused": 0.0}
    for _ in range(STEPS):
        # Both kinds of torch's start each step from what usbyte has made of the last one.
        opt.synchronize()
        before = [p.detach().clone() for p in model.parameters()]
        state = copy.deepcopy(opt.state_dict())
        x = torch.randn(32, 96, generator=data).to(transport.device)
        opt.zero_grad()
        model(x).square().sum().backward()
        opt.step()
        opt.synchronize()
        grads = averaged(twin, before, x)
        for way in worst:
            after = stepped(kind, hyper, way, before, grads, state)
            for got, want, old in zip(model.parameters(), after, before, strict=True):
                worst[way] = max(worst[way], ulps(got.detach(), want, old))
    opt.close()
    return worst


def averaged(twin, params, x):
    """Gradients of a model with these parameters, averaged over two ranks."""
    with torch.no_grad():
        for p, value in zip(twin.parameters(), params, strict=True):
            p.copy_(value)
    twin.zero_grad()
    twin(x).square().sum().backward()
    grads = [p.grad * 0.5 for p in twin.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    return grads


def stepped(kind, hyper, way, before, grads, state):
    """Parameters after a step of torch's own."""
    params = [torch.nn.Parameter(p.clone()) for p in before]
    plain = kind(params, **hyper, **{way: True})
    state = copy.deepcopy(state)
    for group in state["param_groups"]:  # by which loading decides where counters lie
        group.update(foreach=way == "foreach", fused=way == "fused")
    plain.load_state_dict(state)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    plain.step()
    return [p.detach() for p in params]


@pytest.mark.cuda
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_updates_are_torchs_within_one_ulp(overlap, transports, record_property):
    transport, *_ = for_ranks(transports, 2)
    found, _ = transport.run(2, fused, overlap, timeout=90)
    for name, worst in found.items():
        record_property(name, ", ".join(f"{ulp:.2f} ulp of {way}" for way, ulp in worst.items()))
    far = {name: worst for name, worst in found.items() if not min(worst.values()) <= 1}
    assert not far

# SPDX-License-Identifier: Apache-2.0
"""Compression inside DDP."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from _coded import CODECS, cast_hook
from _models import OPTIMIZERS, Awkward, difference
from _ranks import run_ranks
from usbyte.errors import UsageError


def hooked(rank, size):
    ub.init()

    def trained(hook_of, optimizer="sgd", steps=12):
        torch.manual_seed(3)
        model = Awkward()
        opt = OPTIMIZERS[optimizer](model.parameters())
        net = DistributedDataParallel(model, find_unused_parameters=True)
        net.register_comm_hook(None, hook_of(model))
        data = torch.Generator().manual_seed(rank)
        for _ in range(steps):
            opt.zero_grad()
            tokens = torch.randint(0, 40, (4, 6), generator=data)
            nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
            opt.step()
        return {k: v.clone() for k, v in model.state_dict().items()}

    warnings.simplefilter("error", FutureWarning)
    want = trained(lambda model: cast_hook(torch.bfloat16))
    assert difference(trained(lambda model: ub.ddp_comm_hook("bf16")), want) == 0
    for codec in CODECS:
        got = trained(lambda model, codec=codec: ub.ddp_comm_hook(codec), "adam", steps=4)
        flat = torch.cat([v.double().flatten() for v in got.values()])
        assert flat.isfinite().all(), codec
        assert torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min)), codec
    rules = {"*.weight": "int8"}
    trained(lambda model: ub.ddp_comm_hook(rules, model.named_parameters()), steps=2)


def test_a_hook_of_ddp_compresses_likewise():
    run_ranks(2, hooked)


def remembered(rank, size):
    ub.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 40, bias=False), nn.Linear(40, 30, bias=False))
    first, last = (layer.weight for layer in model)
    start = [p.detach().clone() for p in (first, last)]
    net = DistributedDataParallel(model, bucket_cap_mb=0.001)  # of one parameter each
    net.register_comm_hook(None, hook := ub.ddp_comm_hook("dgc:0.05,momentum=0,warmup=6"))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank)
    total = [torch.zeros_like(p) for p in start]
    for _ in range(10):
        opt.zero_grad()
        x = torch.randn(8, 50, generator=data)
        g = torch.randn(8, 30, generator=data)
        hidden = (x @ first.T).detach()
        want = [(g @ last).detach().T @ x, g.T @ hidden]
        (net(x) * g).sum().backward()
        opt.step()
        for sum_of, part in zip(total, want, strict=True):
            sum_of += ub.allreduce(part)
    hooks = hook.__self__
    for p, before, produced in zip((first, last), start, total, strict=True):
        left = (
            ub.allreduce(hooks._states[hooks._names[p]].parts[hooks._names[p]][0]).view_as(p) * size
        )
        sent = (before - p.detach()) / 0.01  # a hundred times the rounding of parameters, too
        assert torch.allclose(sent + left, produced, rtol=1e-4, atol=1e-2)
        assert left.abs().max() > 1


def test_the_hook_loses_nothing():
    run_ranks(2, remembered)


def test_the_hook_is_told_what_is_what():
    with pytest.raises(UsageError, match="patterns need named_parameters"):
        ub.ddp_comm_hook({"*": "int8"})
    with pytest.raises(UsageError, match="'zip' is unknown"):
        ub.ddp_comm_hook("zip")

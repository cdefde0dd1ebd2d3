# SPDX-License-Identifier: Apache-2.0
"""Updates whose sums arrive in one operation are applied together, whatever gets in between."""

from __future__ import annotations

import copy
import importlib
from itertools import pairwise

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import Error
from usbyte.torch import testing

LEARNING = {"USBYTE_LEARNING_STEPS": "2"}
PENDING = importlib.import_module("usbyte.torch.optimizer.overlap.deferred_queue")


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def trained(model, rank, steps, inner=None, between=lambda model, opt, step: None, **options):
    """Its optimizer, after so many steps, with `between` behind each of them."""
    opt = ub.DistributedOptimizer(
        inner or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        **{"overlap": "forward", "policy": "ddp"} | options,
    )
    for step in range(steps):
        opt.zero_grad()
        model(torch.full((2, 4), 1.0 + rank + step)).pow(2).mean().backward()
        opt.step()
        between(model, opt, step)
    return opt


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Counting(torch.optim.SGD):
    """Notes how many parameters each of its steps is for."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.updated = []

    def step(self, closure=None):
        self.updated.append(sum(len(group["params"]) for group in self.param_groups))
        return super().step(closure)


def counted(rank, size):
    ub.init()
    for policy, expected in [("wfbp", [2, 2, 2]), ("ddp", [6])]:
        model = layers()
        inner = Counting(model.parameters())
        opt = ub.DistributedOptimizer(
            inner, model.named_parameters(), overlap="forward", policy=policy
        )
        for step in range(6):
            inner.updated.clear()
            loss = model(torch.full((2, 4), 1.0 + rank + step)).pow(2).mean()
            if step > 3:
                assert inner.updated == expected, (policy, step)
            opt.zero_grad()
            loss.backward()
            opt.step()
        # Who reads a parameter brings the others' updates as well, each of them once.
        inner.updated.clear()
        model[2].bias.norm()
        assert inner.updated == [1 if policy == "wfbp" else 6]
        opt.drain()
        assert sum(inner.updated) == 6
        opt.close()


def test_updates_that_arrive_together_are_applied_by_one_step_of_the_optimizer():
    run_ranks(2, counted, env=LEARNING)


def written(rank, size):
    """Of an operation with a parameter that was written to nobody reads any that is not updated."""
    ub.init()
    for options in ({}, {"shard_optimizer": True, "policy": "dear"}):
        model = layers()
        opt = trained(model, rank, 6, **options)
        with torch._C.DisableTorchFunctionSubclass():  # past all that could fetch it first
            model[1].bias.detach().fill_(1.0)
        for module in (model[0], model[2], model[1]):
            with pytest.raises(Error, match=r"'1\.bias' was written to between step"):
                module.weight.norm()
        with pytest.raises(Error, match="was written to"):
            opt.close()


def test_a_parameter_that_was_written_to_stops_the_others_too():
    run_ranks(2, written, env=LEARNING)


def shares_a_version(rank, size):
    """Parameters made of views of one tensor: a write to one counts as a write to all."""
    ub.init()
    for options in ({"policy": "wfbp"}, {"shard_optimizer": True, "policy": "dear"}):
        model = layers()
        both = torch.stack([model[0].weight.detach(), model[2].weight.detach()])
        model[0].weight, model[2].weight = map(nn.Parameter, both)
        plain = copy.deepcopy(model)
        versions = [p._version for p in model.parameters()]
        opt = trained(model, rank, 0, **options)
        assert [p._version for p in model.parameters()] == versions
        opt.close()
        opt = trained(model, rank, 8, **options)
        opt.close()
        inner = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for step in range(8):
            inner.zero_grad()
            for each in range(size):
                loss = plain(torch.full((2, 4), 1.0 + each + step)).pow(2).mean()
                (loss / size).backward()
            inner.step()
        assert torch.allclose(flat(model), flat(plain), rtol=1e-5), options


def test_parameters_that_are_views_of_one_tensor_are_updated_together():
    run_ranks(2, shares_a_version, env=LEARNING)


def interrupts(rank, size):
    """A handler of a signal reads a parameter while others are being updated."""
    ub.init()
    release, results = PENDING.unwrap_all, []
    for where in (None, 0, 1, 4):
        model = layers()
        calls = -1

        def read(params, where=where, model=model):
            nonlocal calls
            for param in params:
                release([param])
                calls += 1
                if calls == where:  # as between any two lines
                    model[2].bias.sum()
                    model[0].bias.sum()

        def arm(model, opt, step, read=read):
            nonlocal calls
            calls = -1
            PENDING.unwrap_all = read

        opt = trained(model, rank, 8, between=arm)
        opt.drain()
        assert testing.deferred_updates(opt) == []
        results.append(flat(model))
        PENDING.unwrap_all = release
        opt.close()
    for a, b in pairwise(results):
        assert torch.equal(a, b)


def test_a_signal_handler_may_read_parameters_during_an_update():
    run_ranks(2, interrupts, env=LEARNING)


def interrupt_once(owner, name, after=False):
    """The next call of it is interrupted, before it or when it returns."""
    call = getattr(owner, name)

    def stop(*args, **options):
        setattr(owner, name, call)
        if after:
            call(*args, **options)
        raise KeyboardInterrupt

    setattr(owner, name, stop)


def interrupt_release():
    """The next release of parameters is interrupted behind the first of them."""
    release = PENDING.unwrap_all

    def stop(params):
        PENDING.unwrap_all = release
        release([next(iter(params))])
        raise KeyboardInterrupt

    PENDING.unwrap_all = stop


PLACES = {
    "none": lambda opt: None,
    "sums are there": lambda opt: interrupt_once(opt._session.controller.reducer, "begin_update"),
    "gradients are set": lambda opt: interrupt_once(opt._session.controller._deferred, "_narrowed"),
    "to be released": lambda opt: interrupt_once(PENDING, "unwrap_all"),
    "being released": lambda opt: interrupt_release(),
    "released": lambda opt: interrupt_once(PENDING, "unwrap_all", after=True),
}
SHARD_PLACES = {
    "none": lambda opt: None,
    "gathered": lambda opt: interrupt_once(opt._session.controller.reducer, "gathered"),
    "copied": lambda opt: interrupt_once(torch, "_foreach_copy_", after=True),
    "to be released": lambda opt: interrupt_once(PENDING, "unwrap_all"),
    "being released": lambda opt: interrupt_release(),
}


def stopped(rank, size, shard):
    """An interrupt before the optimizer's step has begun loses nothing."""
    ub.init()
    options = {"shard_optimizer": True, "policy": "dear"} if shard else {}
    for to_none in (True, False):
        results = []
        for place, interrupt in (SHARD_PLACES if shard else PLACES).items():
            model = layers()
            opt = trained(model, rank, 6, **options)
            opt.zero_grad(set_to_none=to_none)
            interrupt(opt)
            if place != "none":
                with pytest.raises(KeyboardInterrupt):
                    model(torch.ones(2, 4))
            model(torch.ones(2, 4)).mean().backward()
            opt.step()
            opt.drain()
            results.append(flat(model))
            opt.close()
            assert torch.equal(results[0], results[-1]), (place, to_none)


@pytest.mark.parametrize("shard", [False, True])
def test_an_interrupt_before_an_update_loses_nothing(shard):
    run_ranks(2, stopped, shard, env=LEARNING)


class Fence:
    """Notes on which streams it was waited for."""

    def __init__(self, stream):
        self.stream, self.waited = stream, []

    def wait(self, stream):
        self.waited.append(stream)


def two_streams(rank, size):
    """Who uses a parameter on another stream than that of its update waits for that."""
    ub.init()
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
        overlap="forward", policy="ddp", model=model,
    )  # fmt: skip
    fences, current = [], 1

    def fence():
        fences.append(Fence(current))
        return fences[-1]

    device = opt._session.controller.reducer.device  # the host, which has no streams of its own
    device.stream, device.fence = lambda: current, fence
    for _ in range(6):
        fences.clear()
        x = torch.ones(2, 4)
        current = 1
        y = model[0](x)
        current = 2
        z = model[1](x)
        current = 1
        (y + z).sum().backward()
        opt.step()
        opt.zero_grad()
    [update] = fences
    assert update.stream == 1
    assert 2 in update.waited
    opt.close()


def test_a_parameter_that_another_stream_has_updated_is_waited_for():
    run_ranks(2, two_streams, env=LEARNING)


def removed(rank, size):
    """A gradient that only the other rank had is removed on both: it counts nowhere."""
    ub.init()
    results = []
    for overlap in ("backward", "forward"):
        model = layers()
        opt = trained(model, rank, 6, overlap=overlap)
        for step in range(3):
            opt.zero_grad()
            x = torch.full((2, 4), 1.0 + rank + step)
            y = model[2](model[0](x)) if rank == 0 else model(x)
            y.pow(2).mean().backward()
            model[1].weight.grad = None
            opt.step()
        opt.drain()
        results.append(flat(model))
        opt.close()
    assert torch.equal(*results)
    sums = ub.allgather(results[0].sum().reshape(1))
    assert sums[0] == sums[1]


def test_a_gradient_that_another_rank_had_can_be_removed():
    run_ranks(2, removed, env=LEARNING)


def own_gradient(rank, size):
    """Gradients that are put in the place of those that are to be zeroed are not."""
    ub.init()
    for overlap in ("backward", "forward"):
        model = layers()
        opt = trained(model, rank, 6, overlap=overlap)
        opt.zero_grad(set_to_none=False)
        model[1].weight.grad = torch.ones(4, 4)
        model[0].weight.norm()
        opt.drain()
        assert model[1].weight.grad.sum() == 16, overlap
        assert model[0].weight.grad.sum() == 0, overlap
        opt.close()


def test_gradients_of_the_users_own_are_not_zeroed():
    run_ranks(2, own_gradient, env=LEARNING)

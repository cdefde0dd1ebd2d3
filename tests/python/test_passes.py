# SPDX-License-Identifier: Apache-2.0
"""Backward passes that come otherwise than in the first steps, or without a step()."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import usbyte.torch as ub
from _models import warnings_from_now_on
from _ranks import run_ranks
from usbyte.errors import UsageError

_ENV = {"USBYTE_LEARNING_STEPS": "3"}
_OTHERWISE = (12, 13, 19)  # steps, when updates wait for the forward pass


class _Heads(nn.Module):
    """Two outputs of one trunk."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        """Both."""
        hidden = self.trunk(x).tanh()
        return self.first(hidden), self.second(hidden)


def _one_graph_twice(model, x):
    first, second = model(x)
    first.pow(2).mean().backward(retain_graph=True)
    second.pow(2).mean().backward()


def _two_graphs(model, x):
    first, second = model(x)[0], model(2 * x)[1]
    first.pow(2).mean().backward()
    second.pow(2).mean().backward()


_PASSES = {"one graph twice": _one_graph_twice, "two graphs": _two_graphs}


def _train(model, opt, passes, rank, average):
    generator = torch.Generator().manual_seed(rank)
    for k in range(24):
        opt.zero_grad()
        x = torch.randn(5, 6, generator=generator)
        if k in _OTHERWISE:
            passes(model, x)
        else:
            sum(out.pow(2).mean() for out in model(x)).backward()
        average()
        opt.step()


def _with_late_passes(rank, size):
    """By passes, overlap and policy: distance from averaging by hand, and the last overlap."""
    ub.init()
    found = {}
    for name, passes in _PASSES.items():
        reference = _Heads()

        def average(model=reference):
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= size

        sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
        _train(reference, sgd, passes, rank, average)
        for overlap, policy in (("forward", "ddp"), ("auto", "ddp"), ("auto", "auto")):
            model = _Heads()
            opt = ub.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model.named_parameters(),
                overlap=overlap,
                policy=policy,
            )
            _train(model, opt, passes, rank, lambda: None)
            opt.synchronize()
            rows = zip(model.parameters(), reference.parameters(), strict=True)
            apart = max(float((a - b).detach().abs().max()) for a, b in rows)
            found[f"{name}, {overlap}, {policy}"] = apart, opt.decision.overlap
            opt.close()
    return found


def test_a_second_pass_after_learning():
    """Its sums are right under any overlap, and auto stays with backward from then on."""
    for found in run_ranks(2, _with_late_passes, env=_ENV, timeout=90):
        for how, (apart, overlap) in found.items():
            assert apart < 1e-6, how
            _, setting, policy = how.split(", ")
            if policy == "ddp":  # policy "auto" may still try plans in the last step
                assert overlap == ("forward" if setting == "forward" else "backward"), how


class _SharpnessAware(torch.optim.Optimizer):
    """SAM as published: each step takes two passes and two methods."""

    def __init__(self, params, base, rho=0.05):
        super().__init__(params, {"rho": rho})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        """Climbs."""
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        self._climbs = [p.grad * (0.05 / (norm + 1e-12)) for p in params]
        for param, climb in zip(params, self._climbs, strict=True):
            param.add_(climb)

    @torch.no_grad()
    def second_step(self):
        """Goes back and steps by the gradient from there."""
        params = [p for group in self.param_groups for p in group["params"]]
        for param, climb in zip(params, self._climbs, strict=True):
            param.sub_(climb)
        self.base_optimizer.step()


def _two_steps(rank, size, wraps_base):
    told = warnings_from_now_on()
    ub.init()
    model = _Heads()
    sam = opt = _SharpnessAware(model.parameters(), lambda groups: torch.optim.SGD(groups, lr=0.1))
    if wraps_base:
        opt = sam.base_optimizer = ub.DistributedOptimizer(
            sam.base_optimizer, model.named_parameters()
        )
    else:
        opt = sam = ub.DistributedOptimizer(sam, model.named_parameters())
    generator = torch.Generator().manual_seed(rank)
    for _ in range(20):
        x = torch.randn(5, 6, generator=generator)
        for step in (sam.first_step, sam.second_step):
            model.zero_grad()
            sum(out.pow(2).mean() for out in model(x)).backward()
            step()
    sums = ub.allgather_object([float(p.double().sum()) for p in model.parameters()])
    is_planned = opt.decision is not None
    return [text for text in told if "without a call of step()" in text], is_planned, sums


@pytest.mark.parametrize("wraps_base", [False, True])
def test_steps_of_two_methods(wraps_base):
    """Passes without a step() are warned of once, and what the warning advises has a plan made."""
    for told, is_planned, sums in run_ranks(2, _two_steps, wraps_base, env=_ENV):
        assert len(told) == (0 if wraps_base else 1)
        assert is_planned == wraps_base
        assert sums[0] == sums[1]


def _step_in_hooks(rank, size, comes_first):
    """An optimizer for each parameter, which a hook lets take its step."""
    ub.init()
    model = _Heads()
    opts = {}

    def hook(param):
        opts[param].step()

    for name, param in model.named_parameters():
        if comes_first:
            param.register_post_accumulate_grad_hook(hook)
        inner = torch.optim.SGD([param], lr=0.1)
        opts[param] = ub.DistributedOptimizer(inner, [(name, param)])
        if not comes_first:
            param.register_post_accumulate_grad_hook(hook)
    try:
        for _ in range(3):
            sum(out.pow(2).mean() for out in model(torch.ones(5, 6))).backward()
    except UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("comes_first", [False, True])
def test_steps_inside_backward(comes_first):
    """The error tells how to do without, whichever hook comes first."""
    for message in run_ranks(2, _step_in_hooks, comes_first, env=_ENV):
        assert "was called inside backward()" in message
        assert "call step() once backward() has returned" in message


def _set_by_hand(rank, size):
    """Master weights, whose gradients were there when the optimizer was wrapped."""
    told = warnings_from_now_on()
    ub.init()
    master = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    for param in master:
        param.grad = torch.zeros_like(param)
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(master, lr=0.1), [("a", master[0]), ("b", master[1])]
    )
    told_of = []
    for k in range(3):
        for param in master:
            param.grad.fill_(0.0 if k == 0 else 1.0 + rank)
        opt.step()
        by_hand = "'a' was assigned by the script, .* unless .* usbyte.torch.allreduce"
        told_of.append(sum(bool(re.search(by_hand, text)) for text in told))
    return told_of


def test_gradients_set_by_hand():
    """They are warned of once, also where .grad existed before; zeros are not."""
    assert run_ranks(2, _set_by_hand, env=_ENV) == [[0, 1, 1]] * 2


def _uses_what_others_do_not(rank, size, overlap, sharded):
    told = warnings_from_now_on()
    ub.init()
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
        overlap=overlap, shard_optimizer=sharded,
    )  # fmt: skip
    for step in range(6):
        if step % 2 == 0:
            opt.zero_grad()
        model[(rank + step) % 2](torch.ones(1, 2)).sum().backward()
        opt.step()
    opt.close()
    return [text for text in told if "assigned by the script" in text]


@pytest.mark.parametrize(
    ("overlap", "sharded"), [("backward", False), ("forward", False), ("forward", True)]
)
def test_gradients_of_other_ranks_were_not_set_by_hand(overlap, sharded):
    assert run_ranks(2, _uses_what_others_do_not, overlap, sharded, env=_ENV) == [[], []]

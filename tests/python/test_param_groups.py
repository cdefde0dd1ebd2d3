# SPDX-License-Identifier: Apache-2.0
"""Groups of an optimizer that a script rearranges by hand, after it was wrapped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _models import difference
from _ranks import run_ranks
from usbyte.errors import MismatchError, UsageError

OVERLAPS = {
    "backward": {"overlap": "backward"},
    "forward": {"overlap": "forward"},
    "sharded": {"shard_optimizer": True},
}


def split(opt):
    group = opt.param_groups[0]
    weights = [p for p in group["params"] if p.dim() > 1]
    group["params"] = [p for p in group["params"] if p.dim() == 1]
    opt.param_groups.append({**group, "params": weights, "lr": 0.003})


def merge(opt):
    first, second = opt.param_groups
    first["params"].extend(second["params"])
    del opt.param_groups[1]


def turn(opt):
    opt.param_groups.reverse()


def leave_out(opt):
    opt.param_groups[0]["params"].pop(0)


def two_groups(model):
    return [
        {"params": model[0].parameters()},
        {"params": model[1].parameters(), "lr": 0.05, "weight_decay": 0.1},
    ]


def trained(change, groups, wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    inner = torch.optim.AdamW(groups(model), lr=0.01)
    opt = wrap(inner, model)
    for step in range(8):
        if step == 5:  # between a backward pass and the next, with updates that wait
            change(opt)
        opt.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        if step == 6:
            change(opt)
        opt.step()
    return model, opt


CHANGES = {
    "split": (lambda opt: len(opt.param_groups) < 2 and split(opt), lambda m: m.parameters()),
    "merged": (lambda opt: len(opt.param_groups) > 1 and merge(opt), two_groups),
    "turned": (turn, two_groups),
    "left out": (leave_out, two_groups),
}


def changes(rank, size):
    ub.init()
    for name, (change, groups) in CHANGES.items():
        plain, _ = trained(change, groups, lambda inner, model: inner)
        expected = plain.state_dict()
        for overlap, options in OVERLAPS.items():

            def wrap(inner, model, options=options):
                return ub.DistributedOptimizer(inner, model.named_parameters(), **options)

            model, opt = trained(change, groups, wrap)
            assert difference(model.state_dict(), expected) == 0, (name, overlap)
            opt.close()


def test_parameters_have_the_options_of_the_group_that_they_are_in():
    run_ranks(2, changes, timeout=90, env={"USBYTE_LEARNING_STEPS": "2"})


def puts_new_ones(rank, size):
    ub.init()
    for options in OVERLAPS.values():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        new = nn.Parameter(torch.ones(5, 3))
        opt = ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            [*model.named_parameters(), ("new", new)],
            **options,
        )

        def step(model=model, opt=opt):
            opt.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            opt.step()

        for _ in range(4):
            step()
        groups = opt.param_groups
        groups[0]["params"].append(new)
        with pytest.raises(
            UsageError, match=r"group 0 .* shape \(5, 3\) .* added without add_param_gr"
        ):
            step()
        groups[0]["params"].pop()
        opt.step()  # nothing was lost
        groups.append({**groups[0], "params": [model[1].bias]})
        with pytest.raises(UsageError, match=r"'1\.bias' is in groups 0 and 1"):
            step()
        groups.pop()
        opt.step()
        wrong = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        with pytest.raises(UsageError, match=r"complex64.*view_as_real"):
            opt.add_param_group({"params": [new, wrong]})
        assert len(groups) == 1
        step()
        opt.add_param_group({"params": [new]})
        step()
        opt.close()


def test_parameters_whose_gradients_nobody_sends_are_an_error():
    run_ranks(2, puts_new_ones, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def refuses_new_ones(rank, size):
    ub.init()
    other = nn.Parameter(torch.ones(3))
    kept = ub.DistributedOptimizer(torch.optim.SGD([other], lr=0.1))
    gaps = nn.Parameter(torch.ones(4, 4)[:, :2])
    elsewhere = nn.Parameter(torch.ones(3, device="meta"))
    imaginary = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    own = nn.Parameter(torch.ones(2 + rank))
    refused = [
        ({"overlap": "forward"}, own, "Build the same model"),
        ({"shard_optimizer": True}, own, "Build the same model"),
        ({"overlap": "forward"}, other, "already wrapped by another"),
        ({"overlap": "backward"}, elsewhere, "on the meta device"),
        ({"overlap": "forward"}, imaginary, "has dtype torch.complex64"),
        ({"shard_optimizer": True}, gaps, "cannot be cut into shards"),
    ]
    for options, new, why in refused:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        opt = ub.DistributedOptimizer(torch.optim.Adam(model.parameters()), **options)
        for k in range(6):
            opt.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            opt.step()
            if k == 3:
                with pytest.raises(MismatchError if new is own else UsageError, match=why):
                    opt.add_param_group({"params": [new]})
                assert len(opt.param_groups) == 1
        assert all(state["step"] == 6 for state in opt.state_dict()["state"].values())
        opt.close()
    kept.close()


def test_training_goes_on_after_a_group_that_is_refused():
    run_ranks(2, refuses_new_ones, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})

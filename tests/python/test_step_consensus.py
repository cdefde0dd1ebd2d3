# SPDX-License-Identifier: Apache-2.0
"""Ranks that train otherwise than the others: told of, or an error, on every rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _emulated import emulate
from _models import short_probes, warnings_from_now_on
from _ranks import run_ranks
from usbyte.errors import MismatchError

LEARNING, STEPS = 3, 20
ENV = {"USBYTE_LEARNING_STEPS": str(LEARNING)}


def model_of(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def wrapped(seed: int = 1, **options: Any) -> tuple[nn.Sequential, ub.DistributedOptimizer]:
    short_probes()
    model = model_of(seed)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, ub.DistributedOptimizer(inner, model.named_parameters(), **options)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, more: float = 0) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(torch.ones(2, 6) + more).sum()
    loss.backward()
    return loss


def told_by(act: Any) -> str:
    try:
        act()
    except MismatchError as error:
        return str(error)
    return ""


def groups_otherwise(rank: int, size: int) -> str:
    ub.init()
    model = model_of()
    groups: Any = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    inner = torch.optim.SGD(list(model.parameters()) if rank == 1 else groups, lr=0.1)
    return told_by(lambda: ub.DistributedOptimizer(inner, model.named_parameters()))


def test_other_parameter_groups_are_an_error() -> None:
    results = run_ranks(2, groups_otherwise)
    assert results[0] == results[1]
    assert "parameter '2.weight' has group 1 on rank 0 but 0 on rank 1" in results[0]


def trains_another_model(rank: int, size: int, how: str) -> list[str]:
    ub.init()
    warnings = warnings_from_now_on()
    model, optimizer = wrapped(rank if how == "not broadcast" else 1, overlap="backward")
    for _ in range(LEARNING + 1):
        backward(model, optimizer)
        if how == "clipped" and rank == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return warnings


@pytest.mark.parametrize("how", ["not broadcast", "clipped", "alike"])
def test_other_models_are_warned_of(how: str) -> None:
    first, second = run_ranks(2, trains_another_model, how, env=ENV)
    assert not second
    assert len(first) == (how != "alike")
    assert all("the ranks train different models: '0.weight'" in text for text in first)
    assert all("Call broadcast_parameters(model.state_dict()) before" in text for text in first)


def leaves_steps_out(
    rank: int, size: int, way: tuple[str, str, str], outs: list[int], who: int
) -> tuple[int, str, int]:
    """In steps `outs`, after backward(): rank `who`, or all ranks if it is negative.

    Returns:
        In which step an error came, its text, and how often the plan has changed.
    """
    overlap, where, policy = way
    ub.init()
    if where == "device":
        emulate()
    tune_steps = None if policy == "wfbp" else 2
    model, optimizer = wrapped(overlap=overlap, policy=policy, tune_steps=tune_steps)
    plans = []
    for k in range(STEPS):

        def step(k: int = k) -> None:
            backward(model, optimizer, rank)
            if k not in outs or who not in (rank, -1):
                optimizer.step()

        if told := told_by(step):
            return k, told, 0
        plans.append(optimizer.plan.hash())
    return STEPS, "", sum(a != b for a, b in pairwise(plans))


# On a device votes are looked at some steps later. Where plans are tried for two steps each, they
# change after the last step that is learned from, two steps later, and so on.
WAYS = [
    ("backward", "host", "mergecomp_online"),
    ("forward", "host", "auto"),
    ("backward", "device", "wfbp"),
    ("forward", "device", "auto"),
]


@pytest.mark.parametrize("out", [0, LEARNING - 1, LEARNING, LEARNING + 1, LEARNING + 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_one_rank_leaves_out_is_an_error_on_all(
    way: tuple[str, str, str], out: int
) -> None:
    first, second = run_ranks(2, leaves_steps_out, way, [out], 1, env=ENV)
    assert first[1] == second[1]
    assert "rank 1 called no step()" in first[1]
    # Where the plan ends with it, those that take it are told in it, and others in the next one.
    assert 0 <= second[0] - first[0] <= 1
    assert second[0] - out <= (2 if way[1] == "host" else 10)


@pytest.mark.parametrize("way", WAYS)
def test_steps_that_all_ranks_leave_out_are_none(way: tuple[str, str, str]) -> None:
    outs = [0, 2, 3, LEARNING + 5, LEARNING + 6, LEARNING + 8]
    first, second = run_ranks(2, leaves_steps_out, way, outs, -1, env=ENV)
    assert first == second
    assert first[:2] == [STEPS, ""]
    assert way[2] != "mergecomp_online" or first[2] > 2


def in_a_set(rank: int, size: int) -> str:
    ub.init()
    members = ub.ProcessSet([1, 2])
    ub.add_process_set(members)
    if rank == 0:
        return ""
    model, optimizer = wrapped(process_set=members)

    def steps() -> None:
        for k in range(STEPS):
            backward(model, optimizer)
            if rank == 1 or k != 1:
                optimizer.step()

    return told_by(steps)


def test_ranks_of_a_set_bear_their_names_in_the_job() -> None:
    assert all("rank 2 called no step()" in told for told in run_ranks(3, in_a_set, env=ENV)[1:])


def watches(rank: int, size: int, closures: int) -> str:
    """Rank 0 alone has a hook on its steps, which take a closure at first."""
    ub.init()
    model, optimizer = wrapped()
    if rank == 0:
        handle = optimizer.register_step_post_hook(lambda *_: None)

    def steps() -> None:
        for k in range(STEPS):
            if k < closures:
                optimizer.step(lambda: backward(model, optimizer))
            else:
                backward(model, optimizer)
                optimizer.step()
            if k == 6 and rank == 0:
                handle.remove()

    return told_by(steps)


@pytest.mark.parametrize("closures", [4, STEPS])
def test_steps_that_one_rank_watches_are_steps(closures: int) -> None:
    assert run_ranks(2, watches, closures, env=ENV) == ["", ""]


def joins_without_a_step(rank: int, size: int, out: int) -> list[float]:
    ub.init()
    model, optimizer = wrapped()
    for k in range(STEPS):
        backward(model, optimizer)
        if rank == 1 and k == out:
            break
        optimizer.step()
    ub.join()
    for _ in range(STEPS):
        backward(model, optimizer)
        optimizer.step()
    assert optimizer.decision is not None
    return [param.sum().item() for param in model.parameters()]


@pytest.mark.parametrize("out", [0, 1, LEARNING - 1, LEARNING + 2])
def test_who_joins_may_leave_the_last_step_out(out: int) -> None:
    first, second = run_ranks(2, joins_without_a_step, out, env=ENV)
    assert first == second


def saves_first(rank: int, size: int) -> str:
    """Rank 0 alone takes a step before there is anything, as DCP does to save a state."""
    ub.init()
    model, optimizer = wrapped()
    if rank == 0:
        optimizer.step()

    def steps() -> None:
        for _ in range(LEARNING + 3):
            backward(model, optimizer)
            optimizer.step()
        optimizer.step()  # once more

    return told_by(steps)


def test_a_step_before_all_others_is_none() -> None:
    assert run_ranks(2, saves_first, env=ENV) == ["", ""]


def leaves_two_out(rank: int, size: int, where: str, both: int) -> str:
    """Rank 1 leaves out the last but one step that is learned from; `both` do so with a later."""
    ub.init()
    if where == "device":
        emulate()
    model, optimizer = wrapped()

    def steps() -> None:
        for k in range(STEPS):
            backward(model, optimizer)
            if k != both and (rank == 0 or k != LEARNING - 2):
                optimizer.step()

    return told_by(steps)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("both", [LEARNING - 1, -1])
def test_a_step_left_out_while_a_plan_is_learned_is_told_of(where: str, both: int) -> None:
    told = run_ranks(2, leaves_two_out, where, both, env=ENV)
    assert told[0] == told[1]
    assert "rank 1 called no step()" in told[0]

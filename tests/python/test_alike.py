"""Ranks that train otherwise than the others: told of, or an error, on every rank."""

from __future__ import annotations

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
    short_probes()
    warnings = warnings_from_now_on()
    model = model_of(seed=rank if how == "not broadcast" else 1)
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), overlap="backward"
    )
    for _ in range(LEARNING + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
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


def leaves_steps_out(rank: int, size: int, overlap: str, where: str, out: int, who: int) -> Any:
    """In step `out`, after backward(): rank `who`, or all ranks if it is negative."""
    ub.init()
    short_probes()
    if where == "device":
        emulate()
    model = model_of()
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        overlap=overlap,
        policy="auto" if overlap == "forward" else "wfbp",
        **({"tune_steps": 2} if overlap == "forward" else {}),
    )
    for k in range(STEPS):

        def step(k: int = k) -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 6) + rank).sum().backward()
            if k != out or who not in (rank, -1):
                optimizer.step()

        if told := told_by(step):
            return k, told
    return STEPS, ""


# On a device votes are looked at some steps later. Under "forward" plans are tried, for two steps
# each, and go over from one to the next where they would have been.
WAYS = [("backward", "host"), ("backward", "device"), ("forward", "host"), ("forward", "device")]


@pytest.mark.parametrize(("overlap", "where"), WAYS)
def test_a_step_that_one_rank_leaves_out_is_an_error_on_all(overlap: str, where: str) -> None:
    out = LEARNING + 2
    results = run_ranks(2, leaves_steps_out, overlap, where, out, 1, env=ENV)
    assert results[0] == results[1]
    seen, told = results[0]
    assert "rank 1 called no step()" in told
    assert seen - out <= (2 if where == "host" else 10)


@pytest.mark.parametrize(("overlap", "where"), WAYS)
def test_a_step_that_all_ranks_leave_out_is_none(overlap: str, where: str) -> None:
    results = run_ranks(2, leaves_steps_out, overlap, where, LEARNING + 2, -1, env=ENV)
    assert results == [[STEPS, ""]] * 2

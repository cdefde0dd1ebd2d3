# SPDX-License-Identifier: Apache-2.0
"""Exceptions that nobody catches, in the main thread or others: the other ranks hear of them."""

from __future__ import annotations

import sys
import threading

import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import FaultError

# The message of a lost connection, which must not pass for one that was told at once.
ENV = {"USBYTE_STALL_LIMIT_S": "30", "USBYTE_STALL_WARNING_S": "25"}


def run_in_thread(target, name: str) -> None:
    thread = threading.Thread(target=target, name=name)
    thread.start()
    thread.join()


def fault_of(call) -> str:
    try:
        call()
    except FaultError as error:
        return str(error)
    return "no fault"


def submits_in_a_thread(rank: int, size: int) -> str:
    ub.init()

    def work() -> None:
        ub.allreduce(torch.ones(3), name="first")
        if rank == 1:
            raise ValueError("the loss is nan")
        faults.append(fault_of(lambda: ub.allreduce(torch.ones(3), name="second")))

    faults: list[str] = []
    run_in_thread(work, "trainer")
    return faults[0] if faults else fault_of(lambda: ub.allreduce(torch.ones(3), name="second"))


def forward_fails_in_a_thread(rank: int, size: int) -> str:
    ub.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )

    def work() -> None:
        if rank == 1:  # the first thing that this thread does
            model(torch.ones(1, 4))

        def step() -> None:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

        faults.append(fault_of(step))

    faults: list[str] = []
    run_in_thread(work, "trainer")
    return faults[0] if faults else fault_of(optimizer.step)


def a_helper_dies(rank: int, size: int) -> list[object]:
    ub.init()
    ub.shutdown()  # with the default group, torch has put a hook of its own
    mine = sys.excepthook, threading.excepthook
    ub.init()
    ub.allreduce(torch.ones(3), name="first")

    def fail() -> None:
        raise OSError("the log server is gone")

    run_in_thread(fail, "logger")
    total = ub.allreduce(torch.ones(3), name="second", op=ub.Sum).tolist()
    ub.shutdown()
    restored = (sys.excepthook, threading.excepthook) == mine
    ub.init()
    on_top = [], sys.excepthook, threading.excepthook
    threading.excepthook = lambda args: (on_top[0].append(str(args.exc_value)), on_top[2](args))
    ub.shutdown()
    kept = threading.excepthook not in (*mine, on_top[2]) and sys.excepthook == mine[0]
    run_in_thread(fail, "logger")
    return [total, restored, kept, on_top[0]]


def test_a_thread_that_submits_and_dies_is_told_of() -> None:
    for fault in run_ranks(2, submits_in_a_thread, env=ENV):
        assert "thread 'trainer' of rank 1 ended with ValueError: the loss is nan" in fault


def test_a_thread_that_dies_in_its_first_forward_pass_is_told_of() -> None:
    for fault in run_ranks(2, forward_fails_in_a_thread, env=ENV):
        assert "thread 'trainer' of rank 1 ended with RuntimeError: mat1 and mat2" in fault


def test_a_thread_that_does_not_train_may_die_and_hooks_are_put_back() -> None:
    expected = [[2.0, 2.0, 2.0], True, True, ["the log server is gone"]]
    assert run_ranks(2, a_helper_dies, env=ENV) == [expected, expected]

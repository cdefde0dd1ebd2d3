# SPDX-License-Identifier: Apache-2.0
"""Threads beside the one that trains: they are waited for, told of, and "auto" keeps clear."""

from __future__ import annotations

import array
import importlib
import logging
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _models import difference, train
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import Error, UsageError
from usbyte.torch import testing
from usbyte.torch.fault.coordinator import FaultCoordinator
from usbyte.torch.world.participants import Participants
from usbyte.torch.world.world import current

LEARNING = {"USBYTE_LEARNING_STEPS": "2"}


class Gated(torch.optim.SGD):
    """Its step in any thread but the main one begins, and goes on once it may."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.begun, self.may = threading.Event(), threading.Event()

    def step(self, closure=None):
        if threading.current_thread() is not threading.main_thread():
            self.begun.set()
            assert self.may.wait(30)
        return super().step(closure)


def forward(model, opt):
    return model(torch.ones(1, 4)).detach()


def zero(model, opt):
    opt.zero_grad(set_to_none=False)


def schedule(model, opt):
    opt.param_groups[0]["lr"] *= 0.5


def waits(rank, size):
    """Whoever gets in the way of another thread's update waits until that is over."""
    ub.init()
    # Without a bias the update is the last one, too.
    for act, bias in product((forward, zero, schedule), (False, True)):
        results = []
        for beside in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(4, 4, bias=bias)
            inner = Gated(model.parameters())
            opt = ub.DistributedOptimizer(
                inner, model.named_parameters(), overlap="forward", policy="wfbp"
            )
            seen = []
            for step in range(6):
                opt.zero_grad()
                model(torch.full((2, 4), 1.0 + rank + step)).pow(2).sum().mul(0.01).backward()
                opt.step()
                if beside and step == 4:
                    assert len(testing.deferred_updates(opt)) == 1 + bias
                    reader = threading.Thread(target=lambda model=model: model.weight.norm())
                    reader.start()
                    assert inner.begun.wait(30)
                    timer = threading.Timer(0.2, inner.may.set)
                    timer.start()
                if step == 4:
                    seen.append(act(model, opt))
                if beside and step == 4:
                    assert inner.may.is_set(), (act.__name__, bias)  # or it has not waited
                    reader.join()
            opt.drain()
            results.append((seen, model.weight.detach().clone(), inner.param_groups[0]["lr"]))
            opt.close()
        (a, x, lr), (b, y, other) = results
        assert torch.equal(x, y), (act.__name__, bias)
        assert lr == other
        assert a[0] is None or torch.equal(a[0], b[0])


def test_what_another_thread_applies_is_waited_for():
    run_ranks(2, waits, env=LEARNING)


def decides(rank, size, policy, drains):
    """One rank's snapshots, which begin when forward overlap has been chosen.

    Returns the overlaps one after the other, and how often it was told of threads.
    """
    ub.init()
    importlib.import_module("usbyte.torch.plan.plan_chooser")._WORTH_FORWARD = -10.0  # always
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("usbyte").addHandler(handler)
    overlaps = []

    def copy(model):
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long))
        model.train()
        return [p.detach().clone() for p in model.parameters()]

    with ThreadPoolExecutor(1) as pool:

        def on_step(step, model, opt):
            overlaps.append(opt.decision.overlap if opt.settled else "learning")
            if drains:
                opt.drain()
            if (step >= 8 or drains) and rank == 1:
                pool.submit(copy, model).result()

        options = {"policy": policy, "tune_steps": 0} if policy == "auto" else {"policy": policy}
        got = train("auto", "adam", rank, size, steps=24, on_step=on_step, **options)
    assert difference(got, train("ddp", "adam", rank, size, steps=24)) == 0
    changes = [o for o, before in zip(overlaps, [None, *overlaps], strict=False) if o != before]
    return changes, sum("a thread other than the training thread" in text for text in warnings)


@pytest.mark.parametrize("policy", ["auto", "wfbp"])
def test_auto_goes_back_to_backward_once_another_thread_uses_parameters(policy):
    found = run_ranks(2, decides, policy, False, env=LEARNING)
    back = ["learning", "forward", "learning", "backward"]
    assert found == [[back, 0], [back, 1]]


def test_whoever_drains_before_threads_use_parameters_may_go_on():
    found = run_ranks(2, decides, "wfbp", True, env=LEARNING)
    assert found == [[["learning", "forward"], 0]] * 2


def closures(rank, size):
    """Closures whose work another thread does; one that raises before anything has changed."""
    ub.init()
    results = []
    with ThreadPoolExecutor(1) as pool:
        for wrapped in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(4, 2)
            opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
            if wrapped:
                opt = ub.DistributedOptimizer(opt, model.named_parameters())
            x = torch.arange(8.0).view(2, 4)  # the same on all ranks

            def evaluate(model=model, opt=opt, x=x):
                opt.zero_grad()
                loss = model(x).pow(2).mean()
                loss.backward()
                return loss

            def skip():
                raise ValueError("a batch to leave out")

            for step in range(4):
                if step == 2:
                    with pytest.raises(ValueError, match="to leave out"):
                        opt.step(skip)
                opt.step(lambda: pool.submit(evaluate).result())
            results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    # That of an optimizer that may have changed something before.
    model = nn.Linear(4, 2)
    opt = ub.DistributedOptimizer(Sharp(model.parameters(), lr=0.1), model.named_parameters())
    with pytest.raises(ValueError, match="to leave out"):
        opt.step(skip)
    with pytest.raises(Error, match=r"ended half-way .ValueError: a batch"):
        opt.step()
    with pytest.raises(Error, match=r"ended half-way .ValueError: a batch"):
        opt.state_dict()


class Sharp(torch.optim.SGD):
    """Looks for a worse place nearby first, as sharpness-aware optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(0.05)
        return super().step(closure)


def test_closures_may_use_threads_and_raise():
    run_ranks(2, closures)


def test_parameters_are_held_before_anybody_is_told_of_a_fault():
    order = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = torch.distributed.TCPStore("127.0.0.1", port, 1, True)
    board = FaultCoordinator(
        store, 0, 1, lambda: {"optimizers": {}, "eager": []},
        lambda verdict: order.append(("held", board.verdict)),
        lambda verdict: order.append(("told", board.verdict == verdict)),
    )  # fmt: skip
    verdict = board.report("a link was lost")
    assert "a link was lost" in verdict
    assert order == [("held", None), ("told", True)]
    board.close()


class Failing(torch.optim.SGD):
    """Its third step ends when some parameters have been updated."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 3:
            self.param_groups[0]["params"][0].data.mul_(2)
            raise MemoryError("no memory for the rest")
        return super().step(closure)


def half_way(rank, size):
    ub.init()
    model = nn.Linear(4, 4)
    inner = Failing(model.parameters()) if rank == 1 else torch.optim.SGD(model.parameters(), 0.1)
    opt = ub.DistributedOptimizer(inner, model.named_parameters(), overlap="backward")
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        if inner is opt._inner and rank == 1 and inner.steps == 2:
            with pytest.raises(MemoryError):
                opt.step()
            with pytest.raises(Error, match=r"ended half-way .*no memory for the rest"):
                opt.step()
        else:
            opt.step()


def test_nobody_goes_on_from_a_step_that_ended_half_way():
    run_ranks(2, half_way)


def asked_while_it_closes(rank, size, method):
    plan = _core.Plan(
        "test", [_core.TensorSpec("a", 4)], [_core.Op("all_reduce", [(0, 4)], 1 << 20)]
    )
    flat_buffer = array.array("f", [1.0] * (plan.flat_buffer_bytes // 4))
    (communicator,) = _core.make_local_communicators(1)
    current, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            with suppress(IndexError, UsageError):  # there is none yet, or it is closed
                call = getattr(current[-1], method)
                while True:
                    call(0) if method == "wait" else call()

    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        for i in range(1000):
            current[:] = [_core.Engine(plan, flat_buffer.buffer_info()[0], communicator)]
            for _ in range(i % 7):
                time.sleep(0)  # lets go of the GIL
            current[0].close()
        stop.set()
        for each in asking:
            each.result(20)


@pytest.mark.parametrize("method", ["wait", "op_times"])
def test_an_engine_may_be_closed_while_others_ask_it(method):
    """In a process of its own, as this once was a use of freed memory."""
    run_ranks(1, asked_while_it_closes, method)


class Added:
    """What a run asks of its optimizers here."""

    label = "optimizer.1"

    def set_timeline(self, _):
        pass

    def states(self):
        return {}


def test_optimizers_may_be_made_while_another_rank_asks_how_far_they_are(single, monkeypatch):
    """The thread that answers would end, and this rank seem to be frozen."""
    context, stop = current(), threading.Event()
    monkeypatch.setattr(context, "participants", Participants())

    def answer():
        while not stop.is_set():
            context._describe()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            answering = pool.submit(answer)
            end = time.monotonic() + 3
            while time.monotonic() < end and not answering.done():
                made = [Added() for _ in range(4)]
                for each in made:
                    context.add(each)
            stop.set()
            answering.result(20)
    finally:
        sys.setswitchinterval(before)

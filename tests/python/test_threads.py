"""Threads beside the one that trains: they are waited for, told of, and "auto" keeps clear."""

from __future__ import annotations

import importlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _models import difference, short_probes, train
from _ranks import run_ranks
from usbyte.errors import Error

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
    short_probes()
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
                    assert opt._updates.count == 1 + bias
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


def goes_back(rank, size):
    """One rank's snapshots, which begin when forward overlap has been chosen."""
    ub.init()
    importlib.import_module("usbyte.torch.planning")._WORTH_FORWARD = -10.0  # always
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("usbyte").addHandler(handler)
    overlaps = []
    with ThreadPoolExecutor(1) as pool:

        def on_step(step, model, opt):
            overlaps.append(opt.decision.overlap if opt.settled else "learning")
            if step >= 8 and rank == 1:
                pool.submit(lambda: [p.detach().clone() for p in model.parameters()]).result()

        got = train("auto", "adam", rank, size, steps=24, on_step=on_step, tune_steps=0)
    assert difference(got, train("ddp", "adam", rank, size, steps=24)) == 0
    told = [text for text in warnings if "another thread than the one that trains" in text]
    assert len(told) == (rank == 1), warnings
    changes = [o for o, before in zip(overlaps, [None, *overlaps], strict=False) if o != before]
    assert changes == ["learning", "forward", "learning", "backward"], overlaps


def test_auto_goes_back_to_backward_once_another_thread_uses_parameters():
    run_ranks(2, goes_back, env=LEARNING)


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

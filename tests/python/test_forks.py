# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from a rank: they read its model, end in order, and cannot train."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import UsageError


class Watching(Dataset):
    """Rows that tell what the model is."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, _):
        with torch.no_grad():
            return self.model(torch.ones(6))


def make(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, ub.DistributedOptimizer(sgd, model.named_parameters(), **options)


def step(model, opt, rank):
    opt.zero_grad()
    model(torch.full((3, 6), 1.0 + rank)).square().mean().backward()
    opt.step()


def tell(model, sender):
    sender.send([p.detach().tolist() for p in model.parameters()])


def read_in_child(model):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=tell, args=(model, sender))
    child.start()
    assert receiver.poll(20), "the child waits for something"
    told = receiver.recv()
    child.join(20)
    assert child.exitcode == 0
    return told


def code_of_child(work):
    """The exit code of a child that ends as a whole interpreter does."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(9)
        sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reads_and_ends(rank, size, options):
    ub.init()
    model, opt = make(options)
    for i in range(10):
        step(model, opt, rank)
        if i in (2, 6, 8):
            told = read_in_child(model)
            assert told == [p.detach().tolist() for p in model.parameters()]
        if i in (3, 7):
            assert code_of_child(lambda: None) == 3
        if i in (4, 9):
            rows = torch.cat(list(DataLoader(Watching(model), num_workers=1, batch_size=2)))
            assert torch.equal(rows, Watching(model)[0].expand(4, -1))

    def trains():
        with pytest.raises(UsageError, match="forked from a rank and cannot train"):
            step(model, opt, rank)
        with pytest.raises(UsageError, match="not initialised"):
            ub.allreduce(torch.ones(1))

    assert code_of_child(trains) == 3
    step(model, opt, rank)
    return [p.detach().tolist() for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [{"overlap": "forward"}, {"overlap": "backward"}, {"shard_optimizer": True}],
    ids=["forward", "backward", "sharded"],
)
def test_children_read_and_end(options):
    env = {"USBYTE_LEARNING_STEPS": "3"}
    first, second = run_ranks(2, reads_and_ends, options, env=env, timeout=120)
    assert first == second

# SPDX-License-Identifier: Apache-2.0
"""Gloo can overlook that its peers are gone, until its timeout: nobody has to wait for that."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import FaultError
from usbyte.torch.comm.process_group import TorchCommunicator
from usbyte.torch.eager.rank_group_ops import RankGroupOps
from usbyte.torch.world.world import current


def overlooked(kind, name):
    """Lets a method go on for ever where the backend fails."""
    method = getattr(kind, name)

    def stuck(*arguments):
        try:
            return method(*arguments)
        except RuntimeError:
            threading.Event().wait()

    setattr(kind, name, stuck)


def gradients(rank, size):
    ub.init()
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ub.DistributedOptimizer(
        optimizer, model.named_parameters(), policy="wfbp", overlap="backward"
    )
    overlooked(TorchCommunicator, "_settle")
    for step in range(9):
        if (step, rank) == (8, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()


def metric(rank, size, victim=1):
    ub.init()
    overlooked(RankGroupOps, "_wait")
    if rank == victim:
        RankGroupOps._wait = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    ub.allreduce(torch.ones(1 << 20), name="metric")


def lost(rank, size, kind):
    with pytest.raises(FaultError, match=r"rank 1 .* is gone or frozen"):
        {"gradients": gradients, "metric": metric}[kind](rank, size)
    eager = current().eager
    began = time.monotonic()
    ub.shutdown()
    assert time.monotonic() - began < 20
    assert eager._thread.is_alive() == (kind == "metric")
    assert (eager.peers._group is not None) == (kind == "metric")  # to end it would take as long
    names = [thread.name for thread in threading.enumerate()]
    assert ("usbyte-waiter" in names) == (kind == "gradients")


@pytest.mark.parametrize("kind", ["gradients", "metric"])
def test_a_process_ends_though_its_backend_does_not(kind):
    limits = {"USBYTE_STALL_LIMIT_S": "4", "USBYTE_ONE_SHOT_BYTES": "1"}
    run_ranks(2, lost, kind, env=limits, dies=[1], timeout=60)


def store_lost(rank, size):
    began = time.monotonic()
    with pytest.raises(FaultError, match="holds the store of this job, has ended or"):
        metric(rank, size, victim=0)
    assert time.monotonic() - began < 30  # not for the stall limit


def test_who_waits_with_such_a_backend_sees_that_the_store_is_lost():
    run_ranks(2, store_lost, env={"USBYTE_STALL_WARNING_S": "2"}, dies=[0], timeout=60)

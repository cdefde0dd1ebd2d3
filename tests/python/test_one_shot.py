# SPDX-License-Identifier: Apache-2.0
"""Small all_reduces in one round of messages: the sums, who goes that way, and lost peers."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import EnvError, FaultError, MismatchError
from usbyte.planning.layout import tensor_specs
from usbyte.torch.comm.direct_allreduce import DirectAllReduce, direct_allreduce_max_bytes
from usbyte.torch.comm.factory import connect
from usbyte.torch.runtime.device import Device
from usbyte.torch.runtime.ring import abort
from usbyte.torch.world.world import current

_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def _given(rank, numel, dtype):
    torch.manual_seed(100 * rank + numel)
    values = torch.randn(numel) * 100
    return values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def sums(rank, size):
    dist.init_process_group("gloo")
    one_shot = DirectAllReduce(dist.new_group())
    cases = [(dtype, numel) for dtype in _DTYPES for numel in (1, 7, 64, 1000)]
    flats = [_given(rank, numel, dtype) for dtype, numel in cases]
    # Several blocks each, all in flight at once.
    shots = [one_shot.start(tag, flat.tensor_split(3)) for tag, flat in enumerate(flats)]
    for shot in shots:
        one_shot.finish(shot)
    for flat, (dtype, numel) in zip(flats, cases, strict=True):
        expected = _given(0, numel, dtype)
        for other in range(1, size):
            expected += _given(other, numel, dtype)
        assert torch.equal(flat, expected), (dtype, numel)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_are_those_in_order_of_ranks(size):
    run_ranks(size, sums)


class Job:
    """An engine that sends some blocks of a buffer of ones times rank + 1."""

    def __init__(self, rank, numels, ops):
        self.communicator = connect(current(), Device())
        tensors = tensor_specs((f"t{i}", numel, "float32") for i, numel in enumerate(numels))
        blocks = [(t.offset, t.end) for t in tensors]
        ops = [_core.Op(kind, [blocks[i] for i in which], 1 << 30) for kind, which in ops]
        plan = _core.Plan("test", tensors, ops)
        self.buffer = torch.full((plan.numel,), rank + 1.0)
        self.communicator.register(self.buffer.view(torch.uint8))
        self.engine = _core.Engine(plan, self.buffer.data_ptr(), self.communicator.core)

    def step(self):
        self.engine.begin_step()
        for i in range(len(self.engine.plan.tensors)):
            self.engine.ready(i)
        self.engine.end_backward()
        self.engine.drain()

    def close(self):
        self.engine.close()
        self.communicator.close()


def ways(rank, size):
    ub.init()
    limit = direct_allreduce_max_bytes(size, current().env.one_shot_bytes)
    job = Job(
        rank,
        [limit // 4, limit // 4 + 1, 3, 5, 1000, 10],
        [("all_reduce", [0]), ("all_reduce", [1]), ("all_reduce", [2, 4]), ("all_reduce", [3]),
         ("reduce_scatter", [5]), ("all_gather", [5])],
    )  # fmt: skip
    started = []
    one_shot = job.communicator._one_shot
    start = one_shot.start

    def spied(tag, views):
        started.append(sum(view.nbytes for view in views))
        return start(tag, views)

    one_shot.start = spied
    job.step()
    job.close()
    assert job.buffer.eq(size * (size + 1) / 2).all()
    ub.shutdown()
    return started


def test_small_all_reduces_go_this_way_and_nothing_else():
    assert run_ranks(2, ways, env={"USBYTE_ONE_SHOT_BYTES": "4004"}) == 2 * [[4000, 20]]
    assert run_ranks(3, ways, env={"USBYTE_ONE_SHOT_BYTES": "4004"}) == 3 * [[2000, 20]]


def none(rank, size):
    ub.init()
    job = Job(rank, [1], [("all_reduce", [0])])
    assert job.communicator._one_shot is None
    job.step()
    job.close()
    assert ub.probe(1).one_shot == _core.OneShot()
    ub.shutdown()


def test_it_can_be_turned_off():
    run_ranks(2, none, env={"USBYTE_ONE_SHOT_BYTES": "1"})


@pytest.mark.parametrize(
    ("size", "sent", "most"), [(1, 100, 0), (2, 1, 0), (2, 100, 96), (16, 1200, 80), (17, 1200, 0)]
)
def test_which_sizes_are_exchanged_directly(size, sent, most):
    assert direct_allreduce_max_bytes(size, sent) == most


def test_a_large_limit_is_refused(monkeypatch):
    monkeypatch.setenv("USBYTE_ONE_SHOT_BYTES", "2M")
    with pytest.raises(EnvError, match="from 1 to 1M"):
        _core.Env.read()


def different(rank, size):
    os.environ["USBYTE_ONE_SHOT_BYTES"] = str(100 + rank)
    ub.init()
    with pytest.raises(MismatchError, match=r"is \d+ on rank \d but \d+ on rank \d"):
        connect(current(), Device())
    ub.shutdown()


def test_ranks_that_would_go_different_ways():
    run_ranks(2, different)


def lost(rank, size):
    ub.init()
    job = Job(rank, [4], [("all_reduce", [0])])
    job.step()
    ub.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for _ in range(2):  # the second one finds the connection lost before it starts
        try:
            job.step()
        except FaultError as e:
            errors.append(str(e))
    assert len(errors) == 2
    assert all("Traceback" not in e and "At:" not in e for e in errors), errors
    job.close()


def test_a_lost_peer_is_a_fault():
    run_ranks(3, lost, dies=[1])


def after(rank, size):
    dist.init_process_group("gloo")
    one_shot = DirectAllReduce(dist.new_group())
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for tag in range(20):  # until the backend has noticed, at a time that nothing tells
        shot = one_shot.start(tag, [torch.ones(4)])
        with pytest.raises(RuntimeError):
            one_shot.finish(shot)
        if shot.error is not None:
            break
        time.sleep(0.1)
    assert shot.error is not None
    assert len(one_shot._in_flight) == tag + 1  # their memory is kept
    abort(one_shot.group)


def test_what_cannot_be_started_fails_when_it_is_waited_for():
    run_ranks(2, after, dies=[1])

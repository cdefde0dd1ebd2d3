"""Small all_reduces in one round of messages: the sums, who goes that way, and lost peers."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import MismatchError
from usbyte.torch.one_shot import OneShot

_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def _given(rank, numel, dtype):
    torch.manual_seed(100 * rank + numel)
    values = torch.randn(numel) * 100
    return values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def sums(rank, size):
    dist.init_process_group("gloo")
    one_shot = OneShot(dist.new_group(), 32 << 10)
    cases = [(dtype, numel) for dtype in _DTYPES for numel in (1, 7, 64, 1000)]
    flats = [_given(rank, numel, dtype) for dtype, numel in cases]
    # Several blocks each, all in flight at once.
    shots = [one_shot.start(tag, flat.tensor_split(3)) for tag, flat in enumerate(flats)]
    for shot in shots:
        shot.finish()
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


def ways(rank, size):
    import usbyte.torch as ub
    from usbyte.lab.profiles import line
    from usbyte.torch.context import current

    ub.init()
    communicator = current().new_communicator()
    limit = communicator.one_shot_bytes
    assert limit == 4000 // (size - 1)
    started = []
    one_shot = communicator._one_shot
    start = one_shot.start

    def spied(tag, views):
        started.append(sum(view.nbytes for view in views))
        return start(tag, views)

    one_shot.start = spied
    numels = [limit // 4, limit // 4 + 1, 3, 5, 1000, 10]
    tensors = line((f"t{i}", numel, "float32") for i, numel in enumerate(numels))
    a, b, c, d, e, f = [(t.offset, t.end) for t in tensors]
    ops = [
        _core.Op("all_reduce", [a], 1 << 30),
        _core.Op("all_reduce", [b], 1 << 30),
        _core.Op("all_reduce", [c, e], 1 << 30),
        _core.Op("all_reduce", [d], 1 << 30),
        _core.Op("reduce_scatter", [f], 1 << 30),
        _core.Op("all_gather", [f], 1 << 30),
    ]
    plan = _core.Plan("test", tensors, ops)
    buffer = torch.full((plan.numel,), rank + 1.0)
    communicator.register(buffer.view(torch.uint8))
    engine = _core.Engine(plan, buffer.data_ptr(), communicator.core)
    engine.begin_step()
    for i in range(len(tensors)):
        engine.ready(i)
    engine.end_backward()
    for i in range(len(tensors)):
        engine.wait(i)
    engine.drain()
    engine.close()
    communicator.close()
    ub.shutdown()
    assert buffer.eq(size * (size + 1) / 2).all()
    return started


def test_small_all_reduces_go_this_way_and_nothing_else():
    [started, same] = run_ranks(2, ways, env={"USBYTE_ONE_SHOT_BYTES": "4000"})
    assert started == same == [4000, 20]
    started = run_ranks(3, ways, env={"USBYTE_ONE_SHOT_BYTES": "4000"})
    assert started == 3 * [[2000, 20]]


def environments(rank, size):
    import usbyte.torch as ub
    from usbyte.torch.context import current

    ub.init()
    with pytest.raises(MismatchError, match=r"is \d+ on rank \d but \d+ on rank \d"):
        current().new_communicator()
    ub.shutdown()


def different(rank, size):
    import os

    os.environ["USBYTE_ONE_SHOT_BYTES"] = str(100 + rank)
    environments(rank, size)


def test_ranks_that_would_go_different_ways():
    run_ranks(2, different)


def lost(rank, size):
    import os

    dist.init_process_group("gloo")
    one_shot = OneShot(dist.new_group(), 32 << 10)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    shot = one_shot.start(0, [torch.ones(4)])
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        shot.finish()
    assert time.monotonic() - start < 30
    os._exit(0)  # the group that is left cannot be closed in order


def test_a_lost_peer_is_an_error():
    run_ranks(2, lost, dies=[0, 1])


def alone(rank, size):
    dist.init_process_group("gloo")
    assert OneShot(dist.group.WORLD, 32 << 10).most_bytes == 0
    dist.destroy_process_group()


def test_a_group_of_one_has_none():
    run_ranks(1, alone)

# SPDX-License-Identifier: Apache-2.0
"""Rings over point-to-point against serial references, with real processes."""

import functools
import random
import threading

import pytest
import torch
import torch.distributed as dist

from _ranks import run_ranks
from usbyte.errors import UsageError
from usbyte.torch.runtime.ring import all_gather_ranges, ring_reduce_scatter

OPS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def _inputs(generator, numel, dtype, size):
    """Every rank's tensor, equal on all ranks."""
    raw = torch.randint(1, 6, (size, numel), generator=generator)
    return raw.to(dtype) if not dtype.is_floating_point else (raw / 3).to(dtype)


def _bounds(rng, numel, size):
    cuts = sorted(rng.randint(0, numel) for _ in range(2 * size))
    if rng.random() < 0.3:  # no gaps
        cuts = [0, *(c for c in cuts[1 : 2 * size - 2 : 2] for _ in range(2)), numel]
    bounds = list(zip(cuts[::2], cuts[1::2], strict=True))
    rng.shuffle(bounds)
    return bounds


def _random_rings(rank, size, group, cases):
    rng, generator = random.Random(size), torch.Generator().manual_seed(size)
    for case in range(cases):
        numel = rng.choice([0, 1, 2, size, 17, 1000, 70_000])
        dtype = rng.choice(DTYPES)
        op = rng.choice(list(OPS))
        bounds = _bounds(rng, numel, size)
        inputs = _inputs(generator, numel, dtype, size)

        flat = inputs[rank].clone()
        ring_reduce_scatter(flat, bounds, group, op, tag=case)
        begin, end = bounds[rank]
        # The order in which the ring accumulates; so even rounded sums are equal to the bit.
        order = [(rank + 1 + k) % size for k in range(size)]
        expected = functools.reduce(OPS[op], [inputs[r, begin:end] for r in order])
        assert torch.equal(flat[begin:end], expected), (case, numel, dtype, op, bounds)

        flat = inputs[rank].clone()
        expected = flat.clone()
        for owner, (begin, end) in enumerate(bounds):
            expected[begin:end] = inputs[owner, begin:end]
        all_gather_ranges(flat, bounds, group, tag=case)
        assert torch.equal(flat, expected), (case, numel, dtype, bounds)


def _concurrent_rings(rank, size, group):
    """Rings with different tags, started in different orders."""
    n = 5
    flats = [torch.full((30_000,), float(rank + k)) for k in range(n)]
    step = 30_000 // size
    bounds = [(r * step, (r + 1) * step) for r in range(size)]

    def both(k):
        ring_reduce_scatter(flats[k], bounds, group, dist.ReduceOp.SUM, tag=10 + k)
        all_gather_ranges(flats[k], bounds, group, tag=10 + k)

    threads = [threading.Thread(target=both, args=(k,)) for k in range(n)]
    for thread in threads if rank % 2 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    for k, flat in enumerate(flats):
        assert torch.all(flat == sum(range(size)) + k * size)


def _wrong_arguments(group):
    flat, halves, total = torch.zeros(4), [(0, 2), (2, 4)], dist.ReduceOp.SUM
    for wrong, bounds, op, message in [
        (torch.zeros(2, 2), halves, total, "1-d contiguous"),
        (torch.zeros(8)[::2], halves, total, "1-d contiguous"),
        (flat, [(0, 4)], total, "needs 2 ranges, not 1"),
        (flat, [(0, 3), (2, 4)], total, r"\[2, 4\) overlaps"),
        (flat, [(0, 2), (2, 5)], total, r"\[2, 5\) overlaps another range or leaves"),
        (flat, [(0, 2), (4, 3)], total, "overlaps"),
        (flat, halves, dist.ReduceOp.BXOR, "cannot reduce"),
    ]:
        with pytest.raises(UsageError, match=message):
            ring_reduce_scatter(wrong, bounds, group, op, 0)


def _everything(rank, size):
    dist.init_process_group("gloo")
    group = dist.new_group()
    _random_rings(rank, size, group, cases=60)
    if size == 2:
        _wrong_arguments(group)
    _concurrent_rings(rank, size, group)
    dist.barrier(group)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rings_equal_the_serial_reference(size):
    run_ranks(size, _everything)


def alone(rank, size):
    dist.init_process_group("gloo")
    flat = torch.arange(3.0)
    ring_reduce_scatter(flat, [(0, 3)], dist.group.WORLD, dist.ReduceOp.SUM, 0)
    all_gather_ranges(flat, [(1, 2)], dist.group.WORLD, 0)
    dist.destroy_process_group()
    return flat.tolist()


def test_one_rank_is_left_alone():
    assert run_ranks(1, alone) == [[0, 1, 2]]

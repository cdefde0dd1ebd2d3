"""Ranks that have joined, and what other ranks submit meanwhile."""

from __future__ import annotations

import random
import time

import pytest
import torch

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import MismatchError


def metrics(rank, size):
    ub.init()
    counts = [7, 3, 5]
    names = random.Random(rank)
    for k in range(counts[rank]):
        active = [r for r in range(size) if counts[r] > k]
        tens = sum(10.0**r for r in active)
        asked = ["one", "two", "three"]
        names.shuffle(asked)  # each rank in its own order
        x = torch.full((3, 2), 10.0**rank, requires_grad=True)
        handles = {name: ub.allreduce_async(x.detach(), name=name, op=ub.Sum) for name in asked}
        mean = ub.allreduce(x)
        assert torch.allclose(mean, torch.full((3, 2), tens / size)), (k, mean)
        mean.sum().backward()  # the gradient is the mean of ones on the ranks that are there
        assert torch.allclose(x.grad, torch.full((3, 2), len(active) / size))
        for handle in handles.values():
            assert torch.equal(handle.synchronize(), torch.full((3, 2), tens))
        group = [torch.tensor(4 * rank + 5), torch.full((2,), 2.0), torch.zeros(0), torch.ones(1)]
        integer, twos, nothing, scaled = ub.grouped_allreduce(
            group, op=ub.Sum, prescale_factor=0.5, postscale_factor=3.0
        )
        assert integer.item() == 3 * sum((4 * r + 5) // 2 for r in active)
        assert twos.tolist() == [3.0 * len(active)] * 2
        assert nothing.shape == (0,)
        assert scaled.item() == 1.5 * len(active)
        half = ub.allreduce(torch.ones(5), op=ub.Sum, compression=ub.Compression.fp16)
        assert half.tolist() == [float(len(active))] * 5
        assert ub.allreduce(torch.tensor([True, False]), op=ub.Sum).tolist() == [True, False]
    late = ub.allreduce_async(torch.ones(1), name="late", op=ub.Sum)  # of all, before they join
    assert ub.join() == 0
    assert late.synchronize().item() == 3.0
    # Unnamed operations meet again, though some ranks have made fewer.
    assert ub.allreduce(torch.tensor([float(rank)]), op=ub.Max).item() == 2.0
    assert ub.allgather(torch.tensor([rank])).tolist() == [0, 1, 2]
    last = ub.join()
    assert last == ub.broadcast_object(last)


def test_ranks_that_have_joined_answer_allreduce_with_zeros():
    run_ranks(3, metrics, timeout=60)


def others(rank, size):
    ub.init()
    x = torch.ones(2, 2)
    for k in range(2):
        if rank != 1:
            calls = [
                ("allgather", lambda: ub.allgather(x)),
                ("alltoall", lambda: ub.alltoall(torch.ones(3))),
                ("broadcast", lambda: ub.broadcast(x, 0)),
                ("broadcast", lambda: ub.broadcast(x, 1)),
                ("reducescatter", lambda: ub.reducescatter(x)),
                ("barrier", lambda: ub.barrier()),
                ("allreduce .* with Max", lambda: ub.allreduce(x, op=ub.Max)),
                ("sparse_allreduce", lambda: ub.allreduce(x.to_sparse())),
                ("broadcast_bytes", lambda: ub.broadcast_object(1)),
            ]
            for what, call in calls:
                with pytest.raises(MismatchError, match=f"{what}.*: rank 1 ran out of data and"):
                    call()
            with pytest.raises(MismatchError, match=r"about the shape: .* on rank 0; .* on"):
                ub.allreduce(torch.ones(rank + 1), name="differs")
            assert ub.allreduce(x, process_set=[0, 2]).sum() == 4.0
            assert ub.allreduce(x, op=ub.Sum).sum() == 8.0
        ub.join()
        assert ub.allgather(torch.tensor([rank + k])).tolist() == [k, 1 + k, 2 + k]


def test_what_ranks_that_have_joined_cannot_answer_is_an_error():
    run_ranks(3, others, timeout=60)


def patient(rank, size):
    ub.init()
    if rank == 0:
        for _ in range(16):
            time.sleep(0.25)
            assert ub.allreduce(torch.ones(1), op=ub.Sum).item() == 1.0
    assert ub.join() == 0


def test_a_rank_that_has_joined_may_wait_beyond_the_stall_limit():
    run_ranks(2, patient, timeout=60, env={"USBYTE_STALL_LIMIT_S": "2"})


def at_random(rank, size, seed):
    ub.init()
    shared, mine = random.Random(seed), random.Random(f"{seed} {rank}")
    for _ in range(4):
        counts = [shared.randrange(12) for _ in range(size)]
        pending = {}
        for k in range(counts[rank]):
            pending[k] = ub.allreduce_async(torch.tensor([1 << rank]), name=f"at {k}", op=ub.Sum)
            if mine.random() < 0.5:
                time.sleep(mine.random() * 0.01)
            while pending and mine.random() < 0.4:
                k, handle = pending.popitem()
                want = sum(1 << r for r in range(size) if counts[r] > k)
                assert handle.synchronize().item() == want
        last = ub.join()
        assert last == ub.broadcast_object(last)
        for k, handle in pending.items():
            want = sum(1 << r for r in range(size) if counts[r] > k)
            assert handle.synchronize().item() == want


def test_joining_while_others_submit():
    for seed in range(3):
        run_ranks(4, at_random, seed, timeout=60)

# SPDX-License-Identifier: Apache-2.0
"""Ranks that have joined, and what other ranks submit meanwhile."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import MismatchError, UsageError
from usbyte.torch.world.world import current


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
                with pytest.raises(MismatchError, match=f"{what}.*: rank 1 ran out of data"):
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
        for k in range(16):
            time.sleep(0.4)
            if k < 8:
                with pytest.raises(MismatchError, match="called join"):
                    ub.barrier()
            else:
                assert ub.allreduce(torch.ones(1), op=ub.Sum).item() == 1.0
    assert ub.join() == 0


def test_a_rank_that_has_joined_may_wait_beyond_the_stall_limit():
    run_ranks(2, patient, timeout=60, env={"USBYTE_STALL_LIMIT_S": "5"})


def stale(rank, size):
    """An error that comes when the rank that it stands for zeros on has left join() again."""
    ub.init()
    for k in range(20):
        large = ub.allreduce_async(torch.ones(1 << 20), name="large", op=ub.Sum)
        early = None
        if rank == 0:
            early = ub.allreduce_async(torch.ones(1), name="m", op=ub.Max)
        ub.join()
        if early is not None:
            with pytest.raises(MismatchError, match="called join"):
                early.synchronize()
        assert ub.allreduce(torch.tensor([rank + k]), name="m", op=ub.Max).item() == 1 + k
        assert large.synchronize()[0] == 2


def test_an_error_does_not_reach_what_is_submitted_later():
    run_ranks(2, stale, timeout=60)


def overtaken(rank, size):
    ub.init()
    negotiation = current().eager._negotiation
    read = negotiation._read

    def slow():
        text = read()
        if text is not None and b"joined" in text:
            time.sleep(0.3)
        return text

    negotiation._read = slow  # so that JOIN could be told of before what waits for those who joined
    for k in range(3):
        x = None
        if rank == 1:
            x = ub.allreduce_async(torch.ones(1), name="x", op=ub.Sum)
        ub.join()
        if x is not None:
            assert x.done(), k
            assert x.synchronize().item() == 1.0


def test_what_was_submitted_before_join_ends_inside_it():
    run_ranks(2, overtaken, timeout=60)


def patient_with_steps(rank, size):
    ub.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ub.DistributedOptimizer(
        optimizer, model.named_parameters(), policy="wfbp", overlap="backward"
    )
    early = ub.allreduce_async(torch.ones(1), name="x", op=ub.Sum) if rank == 1 else None
    for _ in range(4 if rank == 0 else 0):
        time.sleep(1.5)  # of computing; the four steps take longer than the stall limit
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    ub.join()
    if early is not None:
        assert early.synchronize().item() == 1.0


def test_what_was_submitted_before_join_may_wait_for_steps_beyond_the_stall_limit():
    limits = {"USBYTE_STALL_LIMIT_S": "5", "USBYTE_STALL_WARNING_S": "1"}
    run_ranks(2, patient_with_steps, timeout=60, env=limits)


def submits(rank, size):
    ub.init()
    model = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = ub.DistributedOptimizer(opt, model.named_parameters(), policy="wfbp", overlap="backward")
    opt.inner.register_step_post_hook(lambda *_: ub.allreduce(torch.ones(1), name="hook"))
    for _ in range(2 - rank):
        opt.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
    if rank == 1:
        with pytest.raises(UsageError, match="'hook': rank 1 is inside join"):
            ub.join()
    os._exit(0)


def test_a_rank_that_has_joined_submits_nothing_of_its_own():
    run_ranks(2, submits, timeout=60, dies=(0, 1))


def clean(rank, size):
    ub.init()
    store = current().eager._negotiation._store
    ub.barrier()
    before = store.num_keys()
    for _ in range(60):
        ub.allreduce_async(torch.ones(1), name="x", op=ub.Sum)
        ub.join()
    ub.barrier()
    if rank == 0:
        # Whoever is through with an operation deletes its keys; others wait below.
        deadline = time.monotonic() + 20
        while store.num_keys() > before + 2 * size and time.monotonic() < deadline:
            time.sleep(0.05)
        assert store.num_keys() <= before + 2 * size
    ub.barrier()


def test_joining_leaves_nothing_in_the_store():
    run_ranks(3, clean, timeout=60)


def many(rank, size):
    ub.init()
    group = [torch.zeros(1)] * 150_000
    assert len(ub.grouped_allreduce(group)) == len(group)


def test_descriptors_may_be_larger_than_what_the_store_compares():
    run_ranks(2, many, timeout=60)


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

# SPDX-License-Identifier: Apache-2.0
"""The eager queue with real processes: order, names, errors, faults."""

import logging
import os
import signal
import threading
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import usbyte.torch as ub
from _eager import eager, leave_last, same
from _ranks import run_ranks
from usbyte.errors import FaultError, MismatchError, UsageError
from usbyte.torch.compression.codecs import Compression
from usbyte.torch.world.world import current

# ---- order, names, mismatches ----------------------------------------------------------------


def _other_order(rank, size):
    n = 40
    handles = {}
    order = list(range(n))
    if rank == 1:
        order.reverse()
    if rank == 2:
        order = order[::2] + order[1::2]
    for k in order:
        if k % 3 == 0:
            handles[k] = ub.allreduce_async(torch.tensor([rank + k]), name=f"op.{k}", op=ub.Sum)
        elif k % 3 == 1:
            handles[k] = ub.allgather_async(torch.tensor([rank + k]), name=f"op.{k}")
        else:
            handles[k] = ub.broadcast_async(torch.tensor([rank + k]), k % size, name=f"op.{k}")
    for k in range(n):
        values = [r + k for r in range(size)]
        expected = [[sum(values)], values, [values[k % size]]][k % 3]
        assert ub.synchronize(handles[k]).tolist() == expected
        assert ub.poll(handles[k])
        assert ub.synchronize(handles[k]).tolist() == expected


def _from_threads(rank, size, queue):
    results = [None] * 4

    def work(k):
        for _ in range(5):
            results[k] = queue.allgather_bytes(f"thread.{k}", bytes([rank, k]) * k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[bytes([r, k]) * k for r in range(size)] for k in range(4)]


def _bytes(rank, size, queue):
    payloads = [b"", b"x", b"\0" * 10_000]
    assert queue.allgather_bytes("gather", payloads[rank]) == payloads[:size]
    for payload in payloads:
        mine = payload if rank == 1 else b"ignored"
        assert queue.broadcast_bytes("broadcast", mine, root=1) == payload
    with pytest.raises(UsageError, match="root rank 7 is not one of the 3 ranks"):
        queue.broadcast_bytes("broadcast", b"", root=7)


def _mismatches(rank, size):
    odd = rank == 2
    ones = torch.ones(3, 4)
    cases = {
        "shape: [3, 4] on ranks 0, 1; [4, 3] on rank 2": lambda name: ub.allreduce(
            ones.t() if odd else ones, name=name
        ),
        "dtype: float32 on ranks 0, 1; float64 on rank 2": lambda name: ub.allreduce(
            ones.double() if odd else ones, name=name
        ),
        "reduction: sum on ranks 0, 1; max on rank 2": lambda name: ub.reducescatter(
            ones, op=ub.Max if odd else ub.Sum, name=name
        ),
        "root rank: 0 on rank 0; 1 on rank 1; 2 on rank 2": lambda name: ub.broadcast_(
            ones, rank, name=name
        ),
        "kind of operation: allreduce on ranks 0, 1; allgather on rank 2": lambda name: (
            ub.allgather(ones, name=name) if odd else ub.allreduce(ones, name=name)
        ),
        "shape beyond the first dimension: [4] on ranks 0, 1; [5] on rank 2": lambda name: (
            ub.allgather(torch.ones(3, 5) if odd else ones, name=name)
        ),
        "number of dimensions: 2 on ranks 0, 1; 1 on rank 2": lambda name: ub.alltoall(
            torch.ones(3) if odd else ones, name=name
        ),
        "number of tensors: 1 on ranks 0, 1; 2 on rank 2": lambda name: ub.grouped_allreduce(
            [ones] * (1 + odd), name=name
        ),
        "shape of tensor 1: [3, 4] on ranks 0, 1; [4, 3] on rank 2": lambda name: (
            ub.grouped_allreduce([ones, ones.t() if odd else ones], name=name)
        ),
        "dtype of tensor 1: float32 on ranks 0, 1; float64 on rank 2": lambda name: (
            ub.grouped_allgather([ones, ones.double() if odd else ones], name=name)
        ),
        "shape beyond the first dimension of tensor 1: [4] on ranks 0, 1; [3] on rank 2": (
            lambda name: ub.grouped_allgather([ones, ones.t() if odd else ones], name=name)
        ),
        "number of tensors: 2 on ranks 0, 1; 3 on rank 2": lambda name: ub.grouped_allgather(
            [ones] * (2 + odd), name=name
        ),
        "reduction: average on ranks 0, 1; sum on rank 2": lambda name: ub.grouped_reducescatter(
            [ones], name, op=ub.Sum if odd else ub.Average
        ),
        "shape of tensor 1: [3, 4] on ranks 0, 1; [5] on rank 2": lambda name: (
            ub.grouped_reducescatter([ones, torch.ones(5) if odd else ones], name)
        ),
        "kind of operation: sparse_allreduce on ranks 0, 1; allreduce on rank 2": lambda name: (
            ub.allreduce(ones if odd else ones.to_sparse(), name=name)
        ),
        "shape of the sparse tensor: [3, 4] on ranks 0, 1; [4, 3] on rank 2": lambda name: (
            ub.allreduce((ones.t() if odd else ones).to_sparse(), name=name)
        ),
        "dtype of tensor 1: float32 on ranks 0, 1; int64 on rank 2": lambda name: (
            ub.sparse_allreduce_async((ones.long() if odd else ones).to_sparse(), name, ub.Sum)()
        ),
        "shape beyond the first dimension of tensor 0: [2] on ranks 0, 1; [1] on rank 2": (
            lambda name: ub.sparse_allreduce_async(ones.to_sparse(1 if odd else 2), name)()
        ),
        "prescale and postscale factors: [1.0, 1.0] on ranks 0, 1; [2.0, 1.0] on rank 2": (
            lambda name: ub.allreduce(ones, name=name, prescale_factor=1.0 + odd)
        ),
    }
    for text, call in cases.items():
        with pytest.raises(MismatchError) as error:
            call("the one")
        assert f"'the one': the ranks disagree about the {text}." in str(error.value)
    assert torch.equal(ones, torch.ones(3, 4))
    same(ub.allreduce(ones, name="the one"), ones)


def _refused(rank, size):
    for call, message in [
        (
            lambda: ub.allreduce(torch.ones(1, dtype=torch.int16)),
            "cannot reduce torch.int16",
        ),
        (lambda: ub.allreduce(torch.ones(1) > 0), "cannot average torch.bool"),
        (
            lambda: ub.allreduce(torch.ones(1) * 1j, op=ub.Max),
            "needs Sum or Average",
        ),
        (lambda: ub.allreduce(torch.ones(1), op="sum"), "op must be Average"),
        (
            lambda: ub.allreduce(torch.ones(1), average=True, op=ub.Sum),
            "both given",
        ),
        (lambda: ub.allgather(torch.ones(2, 2).to_sparse()), "dense"),
        (lambda: ub.reducescatter(torch.tensor(1.0)), "needs a first dimension"),
        (lambda: ub.alltoall(torch.tensor(1.0)), "needs a first dimension"),
        (lambda: ub.alltoall(torch.ones(4)), "4 rows do not split evenly over 3 ranks"),
        (lambda: ub.alltoall(torch.ones(4), [1, 1, 1]), "add up to the tensor's 4 rows"),
        (lambda: ub.broadcast(torch.ones(1), 3), "root rank 3 is not one of the 3"),
        (lambda: ub.grouped_reducescatter([torch.tensor(1.0)]), "needs a first dimension"),
        (lambda: ub.grouped_allgather([torch.ones(1).to_sparse()]), "dense"),
        (lambda: ub.allreduce_(torch.ones(1).to_sparse()), "dense"),
        (
            lambda: ub.allreduce(torch.ones(1).to_sparse(), op=ub.Max),
            "needs Sum or Average",
        ),
        (lambda: ub.allreduce(torch.tensor([1]).to_sparse()), "cannot average a sparse"),
        (lambda: ub.sparse_allreduce_async(torch.ones(1)), "needs a sparse COO tensor"),
        (
            lambda: ub.allreduce(torch.ones(1), compression=Compression.int8),
            "compression int8 does not work",
        ),
        (lambda: ub.allreduce(torch.ones(1), compression="fp16"), "no compress"),
        (lambda: ub.synchronize(7), "7 is no handle"),
        (lambda: ub.poll(None), "None is no handle"),
    ]:
        with pytest.raises(UsageError, match=message):
            call()


def _same_name(rank, size):
    handle = None
    if rank == 0:  # while the others have not submitted it, it cannot end
        handle = ub.allreduce_async(torch.ones(1), name="twice")
        with pytest.raises(ValueError, match="'twice': an operation of this name is still in"):
            ub.allgather_async(torch.ones(1), name="twice")
        assert not ub.poll(handle)
    dist.barrier()
    handle = handle or ub.allreduce_async(torch.ones(1), name="twice")
    same(ub.synchronize(handle), torch.ones(1))


def _no_key_stays(rank, size):
    shared = dist.distributed_c10d._get_default_store()
    ub.barrier()
    dist.barrier()
    keys = shared.num_keys()
    dist.barrier()
    handles = [ub.allreduce_async(torch.ones(1), name=f"many.{k % 100}") for k in range(100)]
    for _ in range(4):
        for k, handle in enumerate(handles):
            same(ub.synchronize(handle), torch.ones(1))
            handles[k] = ub.allreduce_async(torch.ones(1), name=f"many.{k}")
    for handle in handles:
        ub.synchronize(handle)
    deadline = time.monotonic() + 20  # a rank deletes its last key after it has its result
    while shared.num_keys() > keys and time.monotonic() < deadline:
        time.sleep(0.01)
    assert shared.num_keys() <= keys
    dist.barrier()


def _order_and_names(rank, size):
    with eager(rank, size) as queue:
        _other_order(rank, size)
        _from_threads(rank, size, queue)
        _bytes(rank, size, queue)
        _refused(rank, size)
        _mismatches(rank, size)
        _same_name(rank, size)
        _no_key_stays(rank, size)
        handle = ub.barrier() or (ub.allreduce_async(torch.ones(1)) if rank == 0 else None)
        queue.close()
        queue.close()
        assert not queue._thread.is_alive()
        if handle:
            with pytest.raises(FaultError, match="had not ended when usbyte was shut down"):
                ub.synchronize(handle)
        with pytest.raises(UsageError, match=r"call usbyte\.torch\.init"):
            ub.allreduce(torch.ones(1))
        dist.barrier()


def test_order_names_and_mismatches():
    run_ranks(3, _order_and_names, timeout=120)


class _Signalled(Counter):
    def __setitem__(self, kind, count):
        super().__setitem__(kind, count)
        signal.raise_signal(signal.SIGTERM)


def _is_told_to_end(rank, size):
    ub.init()
    queue = current().eager
    queue._unnamed = _Signalled()
    signal.signal(signal.SIGTERM, lambda *_: ub.shutdown())
    queue.auto_name("allreduce")
    assert not ub.is_initialized()


def test_a_signal_handler_may_shut_down_in_the_middle_of_a_call():
    run_ranks(2, _is_told_to_end, timeout=30)


# ---- stalls and faults -----------------------------------------------------------------------


class _Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []
        logging.getLogger("usbyte").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def _stalls(rank, size):
    log, noticed = _Log(), []

    def on_fault(text):
        noticed.append(text)
        return f"agreed: {text}"

    with eager(rank, size, limit_s=8.0, warning_s=0.5, on_fault=on_fault):
        if rank == 2:
            dist.distributed_c10d._get_default_store().wait(["stalled/0", "stalled/1"])
            leave_last(rank, [1, 2], "end")
            return
        interrupt = threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT))
        began = time.monotonic()
        handle = ub.allreduce_async(torch.ones(1), name="lonely")
        other = ub.allgather_async(torch.ones(1), name="also lonely")
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            ub.synchronize(handle)
        assert not noticed
        if rank == 0:
            with pytest.raises(FaultError) as fault:
                ub.synchronize(handle)
        else:
            while not ub.poll(handle):
                time.sleep(0.05)
            with pytest.raises(FaultError) as fault:
                ub.synchronize(handle)
        assert 7.9 < time.monotonic() - began < 40
        for text in [str(fault.value), log.texts[0]]:
            assert "allreduce 'lonely' has waited" in text, (text, log.texts)
            assert "for rank 2, which did not submit it" in text
        assert str(fault.value) == f"agreed: {noticed[0]}"
        assert len(noticed) == 1
        for call in [
            lambda: ub.synchronize(other),
            lambda: ub.allreduce(torch.ones(1)),
        ]:
            with pytest.raises(FaultError, match="agreed: allreduce 'lonely'"):
                call()
        dist.distributed_c10d._get_default_store().set(f"stalled/{rank}", "1")
        leave_last(rank, [1, 2], "end")


def test_a_stall_is_warned_of_and_then_a_fault_that_names_the_missing_rank():
    run_ranks(3, _stalls)


def _failed_from_outside(rank, size):
    with eager(rank, size) as queue:
        pending = ub.allreduce_async(torch.ones(1), name="pending") if rank == 0 else None
        queue.fail("the network burnt down")
        queue.fail("too late to count")
        for call in [
            lambda: ub.synchronize(pending) if pending else ub.barrier(),
            lambda: ub.allreduce(torch.ones(1)),
            lambda: queue.allgather_bytes("x", b""),
        ]:
            with pytest.raises(FaultError, match=r"^the network burnt down(?m:$)"):
                call()


def _ends_in_the_middle(rank, size, victim, how):
    """Every other rank gets a FaultError soon, whatever rank ends, and however."""
    # Gloo may overlook the end of its peers; the store, which rank 0 serves, is asked at warnings.
    limits = (20.0, 5.0) if how == "killed" else (6.0, 0.0)
    with eager(rank, size, *limits) as queue:
        shared = dist.distributed_c10d._get_default_store()
        ub.barrier()
        big = torch.ones(16 << 20)
        began = time.monotonic()
        if rank == victim:
            shared.set("victim", str(os.getpid()))
            if how != "before":
                ub.allreduce_async_(big, name="big")
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGSTOP if how == "frozen" else signal.SIGKILL)

        def reduce_on():
            for _ in range(1000):
                ub.allreduce_(big, name="big")

        with pytest.raises(FaultError) as fault:
            reduce_on()
        assert time.monotonic() - began < 30
        with pytest.raises(FaultError):
            ub.barrier()
        began = time.monotonic()
        queue.close(timeout_s=0.5)
        assert time.monotonic() - began < 5
        # It may go on only where Gloo can overlook the end of its peers: see the limits.
        assert how == "killed" or not queue._thread.is_alive()
        if victim:
            leave_last(rank, set(range(1, size)) - {victim}, "end")
        if how == "frozen" and rank == 0:
            os.kill(int(shared.get("victim")), signal.SIGKILL)
        return str(fault.value)


@pytest.mark.parametrize(
    ("size", "victim", "how"),
    [(4, 1, "killed"), (3, 0, "killed"), (3, 1, "frozen"), (3, 1, "before")],
)
def test_the_end_of_a_rank_is_a_fault_on_the_others(size, victim, how):
    texts = run_ranks(size, _ends_in_the_middle, victim, how, dies=[victim])
    for text in texts[:victim] + texts[victim + 1 :]:
        assert "big" in text or "store" in text
        if how == "before":
            assert "rank 1, which did not submit it" in text


def _store_gone(rank, size):
    """Rank 0, which serves the store, dies while rank 1 is idle, which goes on, and closes."""
    told = []

    def on_fault(text):
        told.append(text)
        return f"the verdict: {text}"

    with eager(rank, size, on_fault=on_fault) as queue:
        ub.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        queue._thread.join(30)
        assert not queue._thread.is_alive()
        assert not told  # so do jobs end
        for _ in range(2):
            with pytest.raises(FaultError, match=r"the verdict: .* the job's store is lost"):
                ub.barrier()
        assert len(told) == 1
        began = time.monotonic()
        queue.close()
        assert time.monotonic() - began < 5


def test_fail_ends_what_is_pending_and_what_comes():
    run_ranks(2, _failed_from_outside)


def test_close_without_a_store():
    run_ranks(2, _store_gone, dies=[0])

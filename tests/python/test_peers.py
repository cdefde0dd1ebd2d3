# SPDX-License-Identifier: Apache-2.0
"""What one rank does wrong, and what the others hear of it; objects and names between ranks."""

from __future__ import annotations

import pytest
import torch

import usbyte.torch as ub
from _ranks import run_ranks
from test_wire import MATRIX, Local, refused, without_memory
from usbyte.errors import FaultError, MismatchError, UsageError
from usbyte.torch.eager import operations
from usbyte.torch.eager.operation_names import OperationName
from usbyte.torch.world.world import current


def objects(rank, size):
    ub.init()
    column_major = MATRIX.t()
    found = ub.broadcast_object({"q": column_major, "n": [1]}, 0)
    assert found["q"].stride() == column_major.stride()
    assert torch.equal(found["q"], column_major)
    for found in ub.allgather_object(column_major[1:3]):
        assert found.stride() == column_major.stride()
        assert torch.equal(found, column_major[1:3])

    weight = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    if rank == 0:
        optimizer.state[weight]["momentum_buffer"] = MATRIX.view(6, 4).t()
    ub.broadcast_optimizer_state(optimizer)
    assert optimizer.state[weight]["momentum_buffer"].stride() == (1, 4)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], MATRIX.view(6, 4).t())

    # The cause is heard at once: the stall limit would come after this test's own.
    for obj, told in [*refused()[:3], (Local(), "Local .*to_local")]:
        with pytest.raises(UsageError, match=f"broadcast_object on rank 0: .*{told}"):
            ub.broadcast_object(obj if rank == 0 else None, 0)
        with pytest.raises(UsageError, match=f"allgather_object on rank 1: .*{told}"):
            ub.allgather_object(obj if rank == 1 else rank)
    for obj, told in refused()[3:]:
        with pytest.raises(UsageError, match=f"broadcast_object on rank 0: .*{told}"):
            ub.broadcast_object(obj if rank == 0 else None, 0)

    indices = torch.tensor([[0, 5 if rank == 1 else 1]])
    wild = torch.sparse_coo_tensor(indices, torch.ones(2), (3,), check_invariants=False)
    with pytest.raises(UsageError, match=r"rank 1 has the index \[5\].*shape \[3\]"):
        ub.allreduce(wild)
    assert ub.allreduce(torch.ones(1), op=ub.Sum).item() == size


def test_objects_between_ranks():
    run_ranks(2, objects, timeout=60, env={"USBYTE_STALL_LIMIT_S": "1000"})


NAMES = ["usbyte.join", "optimizer.0.loss", "optimizer.1.hash", "usbyte.hosts"]


def own_names(rank, size):
    ub.init()
    for name in NAMES:
        if rank == 1:
            handle = ub.allreduce_async(torch.ones(1), name="allreduce.noname.1", op=ub.Sum)
            value = ub.allreduce(torch.full((2,), 4.0), name=name, op=ub.Sum)
            assert value.tolist() == [4.0, 4.0]
            assert ub.allreduce(torch.ones(1)).item() == 0.5
            assert handle.synchronize().item() == 1.0
        assert ub.join() == 1
    # A name that the backward pass of another operation has, too.
    x = torch.ones(1, requires_grad=True)
    out = ub.allreduce(x, name="x")
    handle = None
    if rank == 0:
        handle = ub.allreduce_async(torch.ones(1), name="x.backward", op=ub.Sum)
    out.sum().backward()
    if rank == 1:
        handle = ub.allreduce_async(torch.ones(1), name="x.backward", op=ub.Sum)
    assert handle is not None
    assert handle.synchronize().item() == 2.0
    assert x.grad.item() == 1.0


def test_users_names_are_never_taken_for_usbytes():
    run_ranks(2, own_names, timeout=60, env={"USBYTE_STALL_LIMIT_S": "20"})


def allreduce_until_it_fails(name):
    while True:
        ub.allreduce(torch.ones(1), name=name)


def broken_thread(rank, size):
    ub.init()
    ub.barrier()
    if rank == 1:

        def advance():
            raise KeyError("lost")

        current().eager._negotiation.advance = advance
    with pytest.raises(FaultError, match=r"of eager operations failed on rank 1: KeyErr.*lost"):
        allreduce_until_it_fails("x")


def test_whatever_ends_the_eager_thread_is_a_fault_that_names_it():
    run_ranks(2, broken_thread, timeout=60, env={"USBYTE_STALL_LIMIT_S": "1000"})


def broken_message(rank, size):
    ub.init()
    ub.barrier()
    if rank == 1:
        negotiation = current().eager._negotiation
        negotiation._store.append("op/user:x", '{"rank": 1, "kind": "nothing"}\n')
        negotiation._store.add("count/user:x", 1)
    ub.barrier()
    told = "what the ranks have sent for 'x' cannot be read: 'nothing' is no kind of operation"
    with pytest.raises(FaultError, match=told):
        allreduce_until_it_fails("x" if rank == 0 else "y")


def test_a_peers_message_that_cannot_be_read_is_a_fault_that_says_so():
    run_ranks(2, broken_message, timeout=60, env={"USBYTE_STALL_LIMIT_S": "1000"})


def averages(rank, size):
    ub.init()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        top = torch.full((2,), torch.finfo(dtype).max, dtype=dtype)
        assert torch.equal(ub.allreduce(top), top)
        assert torch.equal(ub.reducescatter(top), top[rank : rank + 1])
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        given = torch.tensor([most, least, most if rank else least, most - rank], dtype=dtype)
        total = [2 * most, 2 * least, most + least, 2 * most - 1]
        expected = [abs(n) // 2 * (1 if n > 0 else -1) for n in total]
        assert ub.allreduce(given).tolist() == expected, dtype
        assert ub.reducescatter(given).tolist() == expected[2 * rank : 2 * rank + 2]
    odd = torch.tensor([-1, 1, -3]) if rank else torch.tensor([0, 0, -2])
    assert ub.allreduce(odd).tolist() == [0, 0, -2]  # toward zero


def test_averages_do_not_overflow():
    run_ranks(2, averages, timeout=60)


def test_what_has_no_memory_of_its_own_is_refused_by_all_collectives(single):
    calls = [
        ub.allreduce, ub.allreduce_, ub.allreduce_async, ub.allgather, ub.reducescatter,
        ub.alltoall, lambda t: ub.broadcast(t, 0), lambda t: ub.broadcast_(t, 0),
        lambda t: ub.grouped_allreduce([torch.ones(1), t]), lambda t: ub.grouped_allgather([t]),
        lambda t: ub.allreduce(t, compression=ub.Compression.fp16),
    ]  # fmt: skip
    for tensor, told in without_memory():
        for call in calls:
            with pytest.raises(UsageError, match=told):
                call(tensor)
        with pytest.raises(UsageError, match=f"broadcast_parameters of 'layer.weight' .*{told}"):
            ub.broadcast_parameters({"first": torch.ones(1), "layer.weight": tensor})
        with pytest.raises(UsageError, match=f"object.'state'..0..'exp_avg'. is a .*{told}"):
            ub.broadcast_object({"state": {0: {"exp_avg": tensor}}})
    with pytest.raises(UsageError, match=r"inside a torch.func transform: call this outside"):
        torch.vmap(lambda t: ub.allreduce(t))(torch.ones(2, 2))
    ub.broadcast_parameters({"nothing": torch.ones(0, 3)})


def test_a_verdict_for_what_was_never_submitted_is_no_operation(single):
    queue = current().eager
    verdict = operations.MatchResult(OperationName.user("x").key)
    with pytest.raises(MismatchError, match="'x' is to run on rank 0, which has not submitted it"):
        queue._execute(verdict)

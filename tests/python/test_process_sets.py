# SPDX-License-Identifier: Apache-2.0
"""Process sets with real processes: values, gradients, names, errors, faults."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import usbyte.torch as ub
from _eager import same
from _ranks import run_ranks
from usbyte.errors import FaultError, MismatchError, UsageError
from usbyte.torch.world.process_sets import ranks_of


def _values(rank, members, among):
    """Every operation among ranks 0 and 2."""
    mine = torch.arange(4.0) + rank
    both = [torch.arange(4.0) + r for r in members]
    same(ub.allreduce(mine, op=ub.Sum, process_set=among), both[0] + both[1])
    same(ub.allreduce(mine, process_set=among), torch.arange(4.0) + 1)
    same(ub.allreduce_(mine.clone(), op=ub.Max, process_set=among), both[1])
    handle = ub.allreduce_async(mine, op=ub.Min, process_set=among, name="least")
    same(handle.synchronize(), both[0])
    group = [mine, torch.tensor([rank])]
    sums = ub.grouped_allreduce(group, op=ub.Sum, process_set=among)
    same(sums[1], torch.tensor([2]))
    ub.grouped_allreduce_(group, op=ub.Sum, process_set=among)
    same(group[0], both[0] + both[1])

    rows = torch.full((rank + 1, 2), float(rank))
    gathered = ub.allgather(rows, process_set=among)
    assert gathered[:, 0].tolist() == [0.0, 2.0, 2.0, 2.0]
    several = ub.grouped_allgather([rows, torch.tensor(rank)], process_set=among)
    assert several[1].tolist() == list(members)

    for root in members:
        same(ub.broadcast(torch.tensor([rank]), root, process_set=among), torch.tensor([root]))
        kept = torch.tensor([rank])
        assert ub.broadcast_(kept, root, "kept", among) is kept
        same(kept, torch.tensor([root]))
    share = ub.reducescatter(torch.arange(3) + rank, op=ub.Sum, process_set=among)
    assert share.tolist() == ([2, 4] if rank == 0 else [6])
    shares = ub.grouped_reducescatter([torch.ones(2), torch.ones(4)], process_set=among)
    assert [len(part) for part in shares] == [1, 2]
    exchanged, counts = ub.alltoall(torch.full((3,), rank), [1, 2], process_set=among)
    assert exchanged.tolist() == ([0, 2] if rank == 0 else [0, 0, 2, 2])
    assert counts.tolist() == ([1, 1] if rank == 0 else [2, 2])
    ub.barrier(process_set=among)


def _objects(rank, among):
    told = ub.broadcast_object({"from": rank, "t": torch.ones(2) * rank}, 2, process_set=among)
    assert told["from"] == 2
    same(told["t"], torch.ones(2) * 2)
    everyones = ub.allgather_object([rank] * rank, process_set=among)
    assert everyones == [[], [2, 2]]
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, rank)
    ub.broadcast_parameters(model.state_dict(), 2, process_set=among)
    same(model.weight.detach(), torch.full((2, 2), 2.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=rank + 1.0)
    ub.broadcast_optimizer_state(optimizer, 2, process_set=among)
    assert optimizer.param_groups[0]["lr"] == 3.0


def _gradients(rank, among):
    def gradient(function, weight):
        leaf = torch.ones(4, requires_grad=True)
        (function(leaf) * weight).sum().backward()
        return leaf.grad

    weight = torch.arange(4.0) + rank
    mean = torch.arange(4.0) + 1  # over ranks 0 and 2
    same(gradient(lambda t: ub.allreduce(t, op=ub.Sum, process_set=among), weight), mean * 2)
    same(gradient(lambda t: ub.grouped_allreduce([t], process_set=among)[0], weight), mean)
    expected = mean if rank == 2 else torch.zeros(4)
    same(gradient(lambda t: ub.broadcast(t, 2, process_set=among), weight), expected)
    both = torch.arange(8.0) * (rank + 1)
    own = torch.arange(8.0)[4 * (rank // 2) : 4 * (rank // 2) + 4] * 2
    same(gradient(lambda t: ub.grouped_allgather([t], process_set=among)[0], both), own)
    halves = torch.tensor([1.0, 1.0, 3.0, 3.0])
    own = torch.full((2,), rank + 1.0)
    same(gradient(lambda t: ub.grouped_reducescatter([t], process_set=among)[0], own), halves)
    same(gradient(lambda t: ub.alltoall(t, process_set=among), weight[:1] + 1), halves)


def _names_do_not_collide(rank, even, pair):
    handles = [ub.allreduce_async(torch.tensor([rank]), name="same", op=ub.Sum)]
    if rank != 1:
        mine = torch.tensor([rank])
        handles.append(ub.allreduce_async(mine, name="same", op=ub.Sum, process_set=even))
    if rank != 0:
        handles.append(ub.allgather_async(torch.tensor([rank]), name="same", process_set=pair))
    results = [ub.synchronize(handle).tolist() for handle in reversed(handles)]
    assert results == [[[2], [3]], [[1, 2], [3]], [[1, 2], [2], [3]]][rank]


def _raises_everywhere(kind, text, call):
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value), str(error.value)


def _errors(rank, even):
    if rank == 1:
        text = "rank 1 is not in the process set of ranks 0, 2: call it on these ranks only"
        for call in [ub.allreduce, ub.allgather, ub.reducescatter, ub.alltoall]:
            _raises_everywhere(UsageError, text, lambda c=call: c(torch.ones(2), process_set=even))
        _raises_everywhere(UsageError, text, lambda: ub.barrier(process_set=even))
        _raises_everywhere(UsageError, text, lambda: ub.broadcast_object(1, process_set=even))
    else:
        text = "root rank 1 is not in the process set of ranks 0, 2"
        _raises_everywhere(
            UsageError, text, lambda: ub.broadcast(torch.ones(1), 1, process_set=even)
        )
        text = "disagree about the shape: [1] on rank 0; [2] on rank 2. Make it equal on every rank"
        odd = torch.ones(1 + rank // 2)
        _raises_everywhere(MismatchError, text, lambda: ub.allreduce(odd, process_set=even))
        text = "disagree about the root rank: 0 on rank 0; 2 on rank 2."
        _raises_everywhere(
            MismatchError, text, lambda: ub.broadcast(torch.ones(1), rank, process_set=even)
        )
        text = "broadcast_object on rank 2: object is a complex"
        _raises_everywhere(
            UsageError, text, lambda: ub.broadcast_object(1j * rank, 2, process_set=even)
        )
        text = "allgather_object on rank 2: object is a complex"
        obj = 1j if rank == 2 else 1
        _raises_everywhere(UsageError, text, lambda: ub.allgather_object(obj, process_set=even))
    absent = ub.ProcessSet([0, 1])
    assert absent.size() is absent.rank() is absent.included() is absent.process_set_id is None
    for members, text in [
        (absent, "is not part of the run: pass it to init"),
        ([0, 3], "the job has ranks 0 to 2, no 3"),
        ([0, 0], "each once"),
        ([], "at least one rank"),
        ("all", "is made of ranks"),
        (None, "is made of ranks"),
        (init_device_mesh("cpu", (3, 1)), "a mesh of 2 dimensions means several groups"),
    ]:
        _raises_everywhere(
            UsageError, text, lambda m=members: ub.allreduce(torch.ones(1), process_set=m)
        )


def _queues():
    return sum(thread.name == "usbyte-eager" for thread in threading.enumerate())


def _added_and_removed(rank):
    text = "the list of sets is [[0, 1]] on ranks 0, 1 but [[1, 2]] on rank 2"
    wanted = [1, 2] if rank == 2 else [0, 1]
    _raises_everywhere(MismatchError, text, lambda: ub.add_process_set(wanted))
    text = "add_process_set on rank 1: process set [0, 7]: the job has ranks 0 to 2, no 7"
    wanted = [0, 7] if rank == 1 else [0, 1]
    _raises_everywhere(UsageError, text, lambda: ub.add_process_set(wanted))
    for known in [[0, 2], [0, 1, 2]]:
        text = f"there is a set of ranks {known} already"
        _raises_everywhere(UsageError, text, lambda k=known: ub.add_process_set(k))

    before = _queues()
    pair = ub.add_process_set([2, 1])
    assert (pair.ranks, pair.process_set_id, pair.size()) == ([1, 2], 2, 2)
    assert pair.rank() == rank - 1
    assert pair.included() is (rank > 0)
    handle = None
    if rank == 1:  # cannot end, as rank 2 has not submitted it
        handle = ub.allreduce_async(torch.ones(1), name="late", process_set=pair)
        with pytest.raises(ValueError, match="'late': an operation of this name is still in"):
            ub.allgather_async(torch.ones(1), name="late", process_set=pair)
    text = "remove_process_set on rank 1: allreduce 'late' is in flight in ProcessSet"
    _raises_everywhere(UsageError, text, lambda: ub.remove_process_set(pair))
    if rank == 2:
        handle = ub.allreduce_async(torch.ones(1), name="late", process_set=pair)
    if handle is not None:
        same(handle.synchronize(), torch.ones(1))
        assert _queues() == before + 1
    assert ub.remove_process_set(pair)
    assert _queues() == before
    assert not ub.remove_process_set(pair)
    assert not ub.remove_process_set(ub.global_process_set)
    assert pair.process_set_id is None
    text = "is not part of the run"
    _raises_everywhere(UsageError, text, lambda: ub.barrier(process_set=pair))
    assert ub.add_process_set(pair) is pair
    assert pair.process_set_id == 3
    if rank:
        same(ub.allreduce(torch.tensor([rank]), op=ub.Sum, process_set=pair), torch.tensor([3]))
    return pair


def _groups(rank):
    """Ranks, groups and meshes, first used in another order on each rank, and by members only."""
    lists = [[0, 1], [1, 2], [2, 0]]
    mine = [ranks for ranks in lists if rank in ranks]
    handles = {}
    for ranks in mine[::-1] if rank == 1 else mine:
        handles[str(ranks)] = ub.allreduce_async(
            torch.tensor([rank]), name="x", op=ub.Sum, process_set=ranks
        )
    for ranks in mine:
        assert handles[str(ranks)].synchronize().tolist() == [sum(ranks)]
    alone = torch.tensor([rank])
    same(ub.allreduce(alone, op=ub.Sum, process_set=[rank]), alone)
    same(ub.broadcast(alone, rank, process_set=[rank]), alone)
    group = dist.new_group([0, 2], backend="gloo")
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("model", "data"))["data"]
    part = DeviceMesh("cpu", [2, 0])
    assert ranks_of(mesh, 3) == ranks_of(ub.global_process_set, 3) == [0, 1, 2]
    same(ub.allreduce(torch.tensor([rank]), op=ub.Sum, process_set=mesh), torch.tensor([3]))
    if rank == 1:
        for members, text in [(group, "not in that torch.distributed group"), (part, "ranks 0, 2")]:
            _raises_everywhere(
                UsageError, text, lambda m=members: ub.allreduce(torch.ones(1), process_set=m)
            )
        return
    for members in [group, part, [0, 2]]:  # all the same
        assert ranks_of(members, 3) == [0, 2]
        handle = ub.allreduce_async(torch.tensor([rank]), op=ub.Sum, process_set=members)
        same(handle.synchronize(), torch.tensor([2]))
    dist.destroy_process_group(group)
    text = "group is destroyed"
    _raises_everywhere(UsageError, text, lambda: ub.barrier(process_set=group))


def _all(rank, size):
    assert ub.global_process_set.size() is None
    even = ub.ProcessSet([2, 0])
    with pytest.raises(UsageError, match="on rank 1: a process set is made of ranks"):
        ub.init(process_sets=[["a"] if rank == 1 else even])
    assert not ub.is_initialized()
    ub.init(process_sets=[even])
    with pytest.raises(UsageError, match="use add_process_set"):
        ub.init(process_sets=[[0, 1]])
    ub.init()
    everyone = ub.global_process_set
    assert (everyone.ranks, everyone.process_set_id, everyone.rank()) == ([0, 1, 2], 0, rank)
    assert (even.ranks, even.process_set_id, even.size()) == ([0, 2], 1, 2)
    assert even.rank() == [0, -1, 1][rank]
    assert even.included() is (rank != 1)
    for among in [even, [0, 2]]:
        if rank != 1:
            _values(rank, [0, 2], among)
    if rank != 1:
        _objects(rank, even)
        _gradients(rank, even)
    _errors(rank, even)
    pair = _added_and_removed(rank)
    ub.barrier()
    _names_do_not_collide(rank, even, pair)
    _groups(rank)
    ub.barrier()
    late = None
    if rank == 0:  # cannot end, as rank 2 does not submit it
        late = ub.allreduce_async(torch.ones(1), name="late", process_set=even)
    ub.shutdown()
    if late is not None:
        with pytest.raises(FaultError, match="had not ended when usbyte was shut down"):
            late.synchronize()
    assert even.process_set_id is None
    assert everyone.ranks == []

    ub.init(process_sets=[pair, even])
    assert (pair.process_set_id, even.process_set_id) == (1, 2)
    if rank != 1:
        same(ub.allreduce(torch.tensor([rank]), op=ub.Sum, process_set=even), torch.tensor([2]))
    ub.barrier()
    ub.shutdown()


def test_process_sets():
    run_ranks(3, _all, timeout=120)


def _stalls(rank, size):
    ub.init(process_sets=[[0, 2]])
    ub.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        with pytest.raises(FaultError) as fault:
            ub.allreduce(torch.ones(1), name="lonely", process_set=[0, 2])
        assert "allreduce 'lonely' has waited" in str(fault.value)
        assert "for rank 2, which did not submit it" in str(fault.value)
        assert "in the process set of ranks 0, 2" in str(fault.value)
        store.set("noticed", "1")
    store.wait(["noticed"])
    for among in [ub.global_process_set, [0, 2], [0, 1, 2]]:
        if rank != 1 or among != [0, 2]:
            with pytest.raises(FaultError, match="'lonely'"):
                ub.barrier(process_set=among)
    ub.shutdown()


def test_a_stall_in_a_set_is_a_fault_of_all():
    run_ranks(3, _stalls, env={"USBYTE_STALL_LIMIT_S": "6"})


def _dies(rank, size):
    ub.init()
    among = ub.add_process_set([1, 2])
    if rank:
        ub.allreduce(torch.ones(1), process_set=among)
    ub.barrier()
    big = torch.ones(16 << 20)
    if rank == 2:
        ub.allreduce_async_(big, name="big", process_set=among)
        os.kill(os.getpid(), signal.SIGKILL)

    def reduce_on():
        for _ in range(1000):
            ub.allreduce_(big, name="big", process_set=among)

    with pytest.raises(FaultError):
        reduce_on() if rank else ub.barrier()
    ub.shutdown()


def test_the_end_of_a_member_is_a_fault_of_all():
    run_ranks(3, _dies, dies=[2])

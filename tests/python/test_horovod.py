# SPDX-License-Identifier: Apache-2.0
"""The names, arguments and answers that scripts written for Horovod rely on."""

import inspect
import os

import numpy as np
import pytest
import torch

import usbyte.torch as ub
from _eager import same
from _ranks import run_ranks
from usbyte.errors import Error, FaultError, UsageError

_REDUCTION = "op prescale_factor postscale_factor process_set"
_SCATTER = "op process_set prescale_factor postscale_factor"

#: Arguments in the order of Horovod 0.28's documentation.
SIGNATURES = {
    "init": "comm process_sets",
    "shutdown": "",
    "is_initialized": "",
    "start_timeline": "file_path mark_cycles",
    "stop_timeline": "",
    "size": "",
    "local_size": "",
    "cross_size": "",
    "rank": "",
    "local_rank": "",
    "cross_rank": "",
    "is_homogeneous": "",
    "mpi_threads_supported": "",
    "mpi_enabled": "",
    "mpi_built": "",
    "gloo_enabled": "",
    "gloo_built": "",
    "nccl_built": "",
    "ddl_built": "",
    "ccl_built": "",
    "cuda_built": "",
    "rocm_built": "",
    "ProcessSet": "ranks_or_comm",
    "ProcessSet.size": "self",
    "ProcessSet.rank": "self",
    "ProcessSet.included": "self",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "allreduce": f"tensor average name compression {_REDUCTION}",
    "allreduce_async": f"tensor average name {_REDUCTION}",
    "allreduce_": f"tensor average name {_REDUCTION}",
    "allreduce_async_": f"tensor average name {_REDUCTION}",
    "grouped_allreduce": f"tensors average name compression {_REDUCTION}",
    "grouped_allreduce_async": f"tensors average name {_REDUCTION}",
    "grouped_allreduce_": f"tensors average name {_REDUCTION}",
    "grouped_allreduce_async_": f"tensors average name {_REDUCTION}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": f"tensor name compression {_SCATTER}",
    "reducescatter_async": f"tensor name {_SCATTER}",
    "grouped_reducescatter": f"tensors name compression {_SCATTER}",
    "grouped_reducescatter_async": f"tensors name {_SCATTER}",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name",
}

#: Defaults that a script may rely on without naming them.
DEFAULTS = {
    "average": None,
    "name": None,
    "splits": None,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "compression": ub.Compression.none,
    "process_set": ub.global_process_set,
}


def _member(name):
    found = ub
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_horovods(name):
    parameters = list(inspect.signature(_member(name)).parameters.values())
    wanted = SIGNATURES[name].split()
    assert [p.name for p in parameters[: len(wanted)]] == wanted
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[: len(wanted)])
    assert all(p.default is not p.empty for p in parameters[len(wanted) :])
    if name == "add_process_set" or name == "remove_process_set":
        return
    for parameter in parameters:
        if parameter.name in DEFAULTS:
            assert parameter.default == DEFAULTS[parameter.name]
        if parameter.name == "op":
            assert parameter.default in (None, ub.Average)


def test_what_is_not_here_says_what_to_do():
    for name, remedy in [
        ("Adasum", "use op=Average"),
        ("SyncBatchNorm", r"torch\.nn\.SyncBatchNorm"),
        ("elastic", "save checkpoints"),
    ]:
        with pytest.raises(UsageError, match=remedy):
            getattr(ub, name)
    with pytest.raises(AttributeError, match="'no_such_name'"):
        _ = ub.no_such_name
    with pytest.raises(UsageError, match="use op=Average"):
        exec("from usbyte.torch import Adasum")
    with pytest.raises(UsageError, match=r"init\(comm=\.\.\.\) is not for usbyte"):
        ub.init([0, 1])
    assert not ub.is_initialized()


def test_answers_are_true():
    assert ub.gloo_built()
    assert ub.gloo_enabled()
    for answer in [
        ub.mpi_built, ub.mpi_enabled, ub.mpi_threads_supported, ub.ddl_built, ub.ccl_built,
        ub.rocm_built,
    ]:  # fmt: skip
        assert answer() is False
    if not torch.cuda.is_available():
        assert bool(ub.nccl_built()) <= ub.cuda_built()
    assert ub.HorovodInternalError is Error
    assert issubclass(FaultError, ub.HorovodInternalError)


def _places(rank, size):
    """Ranks 0 and 1 on one host, rank 2 on another."""
    os.environ["LOCAL_RANK"] = str([0, 1, 0][rank])
    os.environ["LOCAL_WORLD_SIZE"] = str([2, 2, 1][rank])
    ub.init()
    assert (ub.local_rank(), ub.local_size()) == ([0, 1, 0][rank], [2, 2, 1][rank])
    assert (ub.cross_rank(), ub.cross_size()) == ([0, 0, 1][rank], [2, 1, 2][rank])
    assert not ub.is_homogeneous()


def _objects(rank):
    mine = {"rank": rank, "t": torch.arange(rank), "c": torch.ones(2) * (1 + rank), "s": "x" * rank}
    for other, found in enumerate(ub.allgather_object(mine, name="mine")):
        assert (found["rank"], found["s"]) == (other, "x" * other)
        same(found["t"], torch.arange(other))
        same(found["c"], torch.ones(2) * (1 + other))
    assert ub.allgather_object(None) == [None] * 3
    with pytest.raises(UsageError, match="allgather_object on rank 1: object is a set"):
        ub.allgather_object({1} if rank == 1 else 1)
    rows = torch.sparse_coo_tensor([[2, 0, 2]], torch.ones(3, 2) * (1 + rank), (4, 2))
    with torch.device("meta"):
        found = [*ub.allgather_object([rows, rows.coalesce()])[1], ub.broadcast_object(rows, 1)]
    assert [each.is_coalesced() for each in found] == [False, True, False]
    assert [each._nnz() for each in found] == [3, 2, 3]
    for each in found:
        same(each.to_dense(), torch.tensor([[2.0, 2.0], [0, 0], [4, 4], [0, 0]]))
    odd = torch.eye(2).to_sparse_csr()
    with pytest.raises(UsageError, match=r"allgather_object on rank 2: object\[0\] is a Tensor of"):
        ub.allgather_object([odd if rank == 2 else 1])
    with pytest.raises(UsageError, match=r"broadcast_object on rank 0: object is a Tensor of"):
        ub.broadcast_object(odd)
    with pytest.raises(UsageError, match=r"on rank 1: object\[0\] is an array of <U1"):
        ub.allgather_object([np.array(["a"]) if rank == 1 else 1])
    eye = torch.eye(2).to_sparse()
    masked = torch.masked.masked_tensor(eye, eye.bool())
    with pytest.raises(UsageError, match=r"broadcast_object on rank 0: object is a MaskedTensor"):
        ub.broadcast_object(masked if rank == 0 else None)
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])  # has no shape to tell
    with pytest.raises(UsageError, match=r"broadcast_object on rank 0: object is a Tensor that is"):
        ub.broadcast_object(nested if rank == 0 else None)
    with pytest.raises(UsageError, match=r"on rank 0: object is a MaskedArray"):
        ub.broadcast_object(np.ma.masked_array([1.0, 2.0], mask=[0, 1]))
    with pytest.raises(UsageError, match=r"on rank 2: object is a complex64"):
        ub.broadcast_object(np.complex64(1j), np.int64(2))
    arrays = [np.array(1.5 + rank), torch.arange(6.0).view(2, 3)[:1, 1], torch.ones(1).expand(4)]
    with torch.device("meta"):
        found = ub.broadcast_object(arrays, 1)
    assert isinstance(found[0], np.ndarray)
    assert (found[0].shape, found[0].item()) == ((), 2.5)
    same(found[1], torch.tensor([1.0]))
    same(found[2].contiguous(), torch.ones(4))
    assert [each[0].item() for each in ub.allgather_object(arrays)] == [1.5, 2.5, 3.5]
    assert ub.broadcast_object([rank], root_rank=1, name="told") == [1]
    tensors = [torch.tensor([rank]), torch.tensor([10.0 * rank])]
    ub.broadcast_parameters(tensors, root_rank=2)
    assert [tensor.item() for tensor in tensors] == [2, 20.0]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rank + 1.0)
    ub.broadcast_optimizer_state(optimizer, 1, model)
    assert optimizer.param_groups[0]["lr"] == 2.0
    model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    optimizer = torch.optim.NAdam(model.parameters())
    if rank == 1:
        model(torch.ones(2, dtype=torch.bfloat16)).backward()
        optimizer.step()
    ub.broadcast_optimizer_state(optimizer, 1)
    for each in ub.allgather_object([s["mu_product"] for s in optimizer.state.values()]):
        same(each[0], torch.tensor(0.9 * (1 - 0.5 * 0.96**0.004)))  # not in the model's bfloat16


def _script(rank, size):
    _places(rank, size)
    _objects(rank)
    ub.shutdown()


def test_places_and_objects():
    run_ranks(3, _script)

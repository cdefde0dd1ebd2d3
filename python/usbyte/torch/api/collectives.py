"""The user's collectives, under Horovod's names.

Operations are matched across ranks by name, so they may be submitted in different orders; an
unnamed one is the n-th of its kind and meets the n-th on the other ranks. Inputs must not be
changed, nor in-place results read, before the operation has been synchronized. The blocking forms
support autograd. With `process_set=`, "all ranks" are those of the set, who alone take part, and
"rank order" is theirs; names of different sets do not collide.

All functions raise `UsageError`, a ValueError, before `init`, on tensors they cannot handle, and if
an operation of the same name is in flight on this rank; `MismatchError` on every rank if the ranks
disagree about shape, dtype, op or root; and `FaultError` if the job has failed. The asynchronous
ones raise the last two when synchronized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from usbyte.errors import UsageError
from usbyte.torch.api.reductions import *  # noqa: F403
from usbyte.torch.api.submission import first_of, queue_of
from usbyte.torch.eager import autograd, operations
from usbyte.torch.eager.request import Handle
from usbyte.torch.world.process_sets import ProcessSetLike, global_process_set

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "poll",
    "synchronize",
]

Splits = Sequence[int] | torch.Tensor | None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> torch.Tensor:
    """Concatenates the tensors of all ranks along the first dimension, in rank order.

    Args:
        tensor: Of equal dtype on all ranks, and equal shape but for the first dimension; a scalar
            counts as one row.
        name: What the ranks match it by.
        process_set: The ranks that take part; see `usbyte.torch.world.process_sets.ProcessSetLike`.
    """
    queue, called = queue_of("allgather", name, process_set, tensor)
    return _tensor(autograd.Allgather.apply(queue, called, tensor)[0])


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Handle:
    """Starts `allgather`; `synchronize` returns the new tensor. Without autograd."""
    queue, called = queue_of("allgather", name, process_set, tensor)
    request = operations.allgather(queue.peers, called, [tensor])
    return queue.submit(first_of(first_of(request)))


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> list[torch.Tensor]:
    """Gathers several tensors as one operation, as `allgather` does each."""
    queue, called = queue_of("grouped_allgather", name, process_set, *tensors)
    return list(autograd.Allgather.apply(queue, called, *tensors))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts `grouped_allgather`; `synchronize` returns the new tensors. Without autograd."""
    queue, called = queue_of("grouped_allgather", name, process_set, *tensors)
    request = operations.allgather(queue.peers, called, tensors)
    finish = request.postprocess
    return queue.submit(replace(request, postprocess=lambda value: [t for t, _ in finish(value)]))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor:
    """Returns the root rank's tensor as a new one on every rank.

    Args:
        tensor: Of equal shape and dtype on all ranks.
        root_rank: The rank whose values are sent; in a process set too, its rank in the whole job.
        name: What the ranks match it by.
        process_set: The ranks that take part; see `usbyte.torch.world.process_sets.ProcessSetLike`.
    """
    queue, called = queue_of("broadcast", name, process_set, tensor)
    return _tensor(autograd.Broadcast.apply(queue, called, root_rank, tensor))


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts `broadcast`; `synchronize` returns the new tensor. Without autograd."""
    queue, called = queue_of("broadcast", name, process_set, tensor)
    return queue.submit(operations.broadcast(queue.peers, called, tensor, root_rank))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor:
    """Overwrites the tensor with the root rank's, and returns it. Without autograd."""
    return _tensor(broadcast_async_(tensor, root_rank, name, process_set).synchronize())


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts `broadcast_`; `synchronize` returns the tensor."""
    queue, called = queue_of("broadcast", name, process_set, tensor)
    return queue.submit(operations.broadcast(queue.peers, called, tensor, root_rank, in_place=True))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends a run of rows to each rank, and concatenates the runs that arrive, in rank order.

    Args:
        tensor: Of equal dtype on all ranks, and equal shape but for the first dimension.
        splits: How many rows go to each rank; evenly if None.
        name: What the ranks match it by.
        process_set: The ranks that take part; see `usbyte.torch.world.process_sets.ProcessSetLike`.

    Returns:
        The rows received; with `splits`, also how many came from each rank, 1-d, int32 or like
        `splits`.
    """
    queue, called = queue_of("alltoall", name, process_set, tensor)
    rows, received = autograd.Alltoall.apply(queue, called, splits, tensor)
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts `alltoall`; `synchronize` returns a pair, as with `splits`. Without autograd."""
    queue, called = queue_of("alltoall", name, process_set, tensor)
    return queue.submit(operations.alltoall(queue.peers, called, tensor, splits))


def barrier(process_set: ProcessSetLike = global_process_set) -> None:
    """Blocks until every rank has come to its n-th barrier."""
    queue, called = queue_of("barrier", None, process_set)
    queue.submit(operations.barrier(queue.peers, called)).synchronize()


def poll(handle: Handle) -> bool:
    """Whether the operation has ended, so that `synchronize` will not wait."""
    return _checked(handle).poll()


def synchronize(handle: Handle) -> Any:
    """Waits for an operation and returns its result; Ctrl-C interrupts it."""
    return _checked(handle).synchronize()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise UsageError(
            f"{handle!r} is no handle: pass what an operation with _async in its name returned"
        )
    return handle


def _tensor(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value

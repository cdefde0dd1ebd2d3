# SPDX-License-Identifier: Apache-2.0
"""Eager collectives, under Horovod's names.

Ranks match operations by name, so ranks may submit them in different orders. The n-th unnamed
operation of a kind meets the n-th of that kind on the other ranks. Do not change inputs, nor read
in-place results, before the operation has been synchronized. The blocking functions support
autograd. With `process_set=`, "all ranks" means the ranks of the set; only they take part, and
"rank order" is theirs. Names of different sets do not collide.

All functions raise `UsageError`, a ValueError, before `init`, for tensors that they cannot handle,
and if an operation of the same name is in flight on this rank. They raise `MismatchError` on every
rank if the ranks disagree about shape, dtype, op or root, and `FaultError` if the job has failed.
The asynchronous functions raise these two when they are synchronized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from usbyte.errors import UsageError
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
        tensor: Dtype and all dimensions but the first are equal on all ranks. A scalar counts as
            one row.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `allgather` of this rank meets the n-th on the other ranks.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A new tensor with the rows of all ranks, on the device of `tensor`. Supports autograd.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: The ranks disagree about shape or dtype; raised on every rank.
        FaultError: The job has failed.

    Examples:
        >>> import torch
        >>> import usbyte.torch as ub
        >>> ub.init()
        >>> ub.allgather(torch.tensor([1, 2]))  # of a single rank
        tensor([1, 2])
    """
    queue, called = queue_of("allgather", name, process_set, tensor)
    return _tensor(autograd.Allgather.apply(queue, called, tensor)[0])


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Handle:
    """Starts `allgather`, without autograd.

    Args:
        tensor: Dtype and all dimensions but the first are equal on all ranks. A scalar counts as
            one row.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `allgather` of this rank meets the n-th on the other ranks.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A handle; `synchronize` returns the rows of all ranks, as a new tensor.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: From `synchronize`: the ranks submitted different operations of this name.
        FaultError: From `synchronize`: the job has failed.
    """
    queue, called = queue_of("allgather", name, process_set, tensor)
    request = operations.allgather(queue.peers, called, [tensor])
    return queue.submit(first_of(first_of(request)))


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> list[torch.Tensor]:
    """Gathers several tensors as one operation, each as by `allgather`.

    Args:
        tensors: The same number on all ranks; each tensor as the `tensor` of `allgather`.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `grouped_allgather` of this rank meets the n-th on the other ranks.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        New tensors, in the order of `tensors`. Supports autograd.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: The ranks disagree about shapes or dtypes; raised on every rank.
        FaultError: The job has failed.
    """
    queue, called = queue_of("grouped_allgather", name, process_set, *tensors)
    return list(autograd.Allgather.apply(queue, called, *tensors))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts `grouped_allgather`, without autograd.

    Args:
        tensors: The same number on all ranks; each tensor as the `tensor` of `allgather`.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `grouped_allgather` of this rank meets the n-th on the other ranks.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A handle; `synchronize` returns the list of new tensors.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: From `synchronize`: the ranks submitted different operations of this name.
        FaultError: From `synchronize`: the job has failed.
    """
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
    """Returns the root rank's tensor on every rank, as a new tensor.

    Args:
        tensor: Shape and dtype are equal on all ranks.
        root_rank: The rank that sends; a rank of the whole job, also with `process_set`.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `broadcast` of this rank meets the n-th on the other ranks.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A tensor on the device of `tensor`. Supports autograd.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: The ranks disagree about shape, dtype or root; raised on every rank.
        FaultError: The job has failed.

    Examples:
        >>> import torch
        >>> import usbyte.torch as ub
        >>> ub.init()
        >>> ub.broadcast(torch.tensor([3.0]), root_rank=0)
        tensor([3.])
    """
    queue, called = queue_of("broadcast", name, process_set, tensor)
    return _tensor(autograd.Broadcast.apply(queue, called, root_rank, tensor))


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts `broadcast`, without autograd.

    Args:
        tensor: Shape and dtype are equal on all ranks.
        root_rank: The rank that sends; a rank of the whole job, also with `process_set`.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `broadcast` of this rank meets the n-th on the other ranks.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A handle; `synchronize` returns the new tensor.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: From `synchronize`: the ranks submitted different operations of this name.
        FaultError: From `synchronize`: the job has failed.
    """
    queue, called = queue_of("broadcast", name, process_set, tensor)
    return queue.submit(operations.broadcast(queue.peers, called, tensor, root_rank))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor:
    """Overwrites the tensor with that of the root rank, without autograd.

    Args:
        tensor: Shape and dtype are equal on all ranks.
        root_rank: The rank that sends; a rank of the whole job, also with `process_set`.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `broadcast` of this rank meets the n-th on the other ranks.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        `tensor`.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: The ranks disagree about shape, dtype or root; raised on every rank.
        FaultError: The job has failed.
    """
    return _tensor(broadcast_async_(tensor, root_rank, name, process_set).synchronize())


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts `broadcast_`, without autograd.

    Args:
        tensor: Shape and dtype are equal on all ranks. Do not read or change it before
            the operation has been synchronized.
        root_rank: The rank that sends; a rank of the whole job, also with `process_set`.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `broadcast` of this rank meets the n-th on the other ranks.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A handle; `synchronize` returns `tensor`.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: From `synchronize`: the ranks submitted different operations of this name.
        FaultError: From `synchronize`: the job has failed.
    """
    queue, called = queue_of("broadcast", name, process_set, tensor)
    return queue.submit(operations.broadcast(queue.peers, called, tensor, root_rank, in_place=True))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends consecutive rows to each rank and concatenates the received rows, in rank order.

    Args:
        tensor: Dtype and all dimensions but the first are equal on all ranks.
        splits: Number of rows for each rank, in rank order; their sum is the number of rows. By
            default all ranks get equally many rows.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `alltoall` of this rank meets the n-th on the other ranks.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        The received rows, as a new tensor. With `splits`, a pair of these and the number of rows
        from each rank: shape [size], int32, or the dtype and device of `splits` if that is a
        tensor. Supports autograd.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: The ranks disagree about shape or dtype; raised on every rank.
        FaultError: The job has failed.
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
    """Starts `alltoall`, without autograd.

    Args:
        tensor: Dtype and all dimensions but the first are equal on all ranks.
        splits: Number of rows for each rank, in rank order; their sum is the number of rows. By
            default all ranks get equally many rows.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `alltoall` of this rank meets the n-th on the other ranks.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A handle; `synchronize` returns a pair, as `alltoall` does with `splits`.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: From `synchronize`: the ranks submitted different operations of this name.
        FaultError: From `synchronize`: the job has failed.
    """
    queue, called = queue_of("alltoall", name, process_set, tensor)
    return queue.submit(operations.alltoall(queue.peers, called, tensor, splits))


def barrier(process_set: ProcessSetLike = global_process_set) -> None:
    """Blocks until every rank has called it: the n-th call meets the n-th call of the other ranks.

    Args:
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Raises:
        UsageError: Before `init`, or if this rank is not in `process_set`.
        FaultError: The job has failed.
    """
    queue, called = queue_of("barrier", None, process_set)
    queue.submit(operations.barrier(queue.peers, called)).synchronize()


def poll(handle: Handle) -> bool:
    """Returns whether the operation has ended, so that `synchronize` will not wait.

    Args:
        handle: What a function with `_async` in its name returned.

    Raises:
        UsageError: `handle` is not a handle.
    """
    return _checked(handle).poll()


def synchronize(handle: Handle) -> Any:
    """Waits for an operation and returns its result. Ctrl-C interrupts the wait.

    Args:
        handle: What a function with `_async` in its name returned.

    Raises:
        UsageError: `handle` is not a handle.
        MismatchError: The ranks submitted different operations of this name; raised on every rank.
        FaultError: The operation stalled, a rank is lost, or another rank reported a fault.
    """
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

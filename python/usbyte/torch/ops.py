"""The user's collectives, under Horovod's names.

Operations are matched across ranks by name, so they may be submitted in different orders; an
unnamed one is the n-th of its kind and meets the n-th on the other ranks. Inputs must not be
changed, nor in-place results read, before the operation has been synchronized. The blocking forms
support autograd.

All functions raise `UsageError`, a ValueError, before `init`, on tensors they cannot handle, and if
an operation of the same name is in flight on this rank; `MismatchError` on every rank if the ranks
disagree about shape, dtype, op or root; and `FaultError` if the job has failed. The asynchronous
ones raise the last two when synchronized.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from usbyte.errors import UsageError
from usbyte.torch import context, gradients, operations
from usbyte.torch.eager import EagerQueue
from usbyte.torch.handles import Handle, Request
from usbyte.torch.reduction import ReduceOp

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

Splits = Sequence[int] | torch.Tensor | None


class Compressor(Protocol):
    """Makes a tensor smaller for its journey."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns what travels, and what `decompress` needs besides."""

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Inverse of `compress`."""


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces a tensor over all ranks into a new one.

    Args:
        tensor: Of equal shape and dtype on all ranks.
        average: Deprecated; True stands for op=Average, False for op=Sum.
        name: What the ranks match it by.
        compression: Applied before and undone after; lossy ones change the result.
        op: Average (default), Sum, Min, Max or Product. Averages of integers are truncated toward
            zero.
        prescale_factor: Multiplied before the reduction.
        postscale_factor: Multiplied after it.
    """
    factors = (prescale_factor, postscale_factor)
    return _reduced([tensor], average, name, compression, op, factors, "allreduce")[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts `allreduce`; `synchronize` returns the new tensor. Without autograd."""
    factors = (prescale_factor, postscale_factor)
    return _reduce([tensor], average, name, op, factors, "allreduce", in_place=False)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces a tensor over all ranks in place, and returns it. Without autograd."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor)
    return _tensor(synchronize(handle))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts `allreduce_`; `synchronize` returns the tensor."""
    factors = (prescale_factor, postscale_factor)
    return _reduce([tensor], average, name, op, factors, "allreduce", in_place=True)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduces several tensors as one operation; those of one dtype travel together.

    Arguments as for `allreduce`; shapes and dtypes may differ within the group, but not across
    ranks.
    """
    factors = (prescale_factor, postscale_factor)
    return _reduced(tensors, average, name, compression, op, factors, "grouped_allreduce")


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts `grouped_allreduce`; `synchronize` returns the new tensors. Without autograd."""
    factors = (prescale_factor, postscale_factor)
    return _reduce(tensors, average, name, op, factors, "grouped_allreduce", in_place=False)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduces several tensors as one operation in place, and returns them. Without autograd."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor)
    return list(synchronize(handle))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts `grouped_allreduce_`; `synchronize` returns the list of tensors."""
    factors = (prescale_factor, postscale_factor)
    return _reduce(tensors, average, name, op, factors, "grouped_allreduce", in_place=True)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenates the tensors of all ranks along the first dimension, in rank order.

    Args:
        tensor: Of equal dtype on all ranks, and equal shape but for the first dimension; a scalar
            counts as one row.
        name: What the ranks match it by.
    """
    queue = _queue()
    return _tensor(gradients.Allgather.apply(queue, name or queue.auto_name("allgather"), tensor))


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """Starts `allgather`; `synchronize` returns the new tensor. Without autograd."""
    queue = _queue()
    request = operations.allgather(queue.peers, name or queue.auto_name("allgather"), tensor)
    return queue.submit(_first(request))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Returns the root rank's tensor as a new one on every rank.

    Args:
        tensor: Of equal shape and dtype on all ranks.
        root_rank: The rank whose values are sent.
        name: What the ranks match it by.
    """
    queue = _queue()
    return _tensor(
        gradients.Broadcast.apply(queue, name or queue.auto_name("broadcast"), root_rank, tensor)
    )


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Starts `broadcast`; `synchronize` returns the new tensor. Without autograd."""
    return _broadcast(tensor, root_rank, name, in_place=False)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrites the tensor with the root rank's, and returns it. Without autograd."""
    return _tensor(synchronize(broadcast_async_(tensor, root_rank, name)))


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Starts `broadcast_`; `synchronize` returns the tensor."""
    return _broadcast(tensor, root_rank, name, in_place=True)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces a tensor over all ranks; each rank gets its share of the first dimension.

    The first `rows % size` ranks get one row more than the others, who may get none.
    Arguments as for `allreduce`.
    """
    queue = _queue()
    packed, ctx = compression.compress(tensor) if compression else (tensor, None)
    share = _tensor(
        gradients.Reducescatter.apply(
            queue,
            name or queue.auto_name("reducescatter"),
            op,
            (prescale_factor, postscale_factor),
            packed,
        )
    )
    return compression.decompress(share, ctx) if compression else share


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts `reducescatter`; `synchronize` returns this rank's share. Without autograd."""
    queue = _queue()
    name = name or queue.auto_name("reducescatter")
    factors = (prescale_factor, postscale_factor)
    return queue.submit(operations.reducescatter(queue.peers, name, tensor, op, factors))


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends a run of rows to each rank, and concatenates the runs that arrive, in rank order.

    Args:
        tensor: Of equal dtype on all ranks, and equal shape but for the first dimension.
        splits: How many rows go to each rank; evenly if None.
        name: What the ranks match it by.

    Returns:
        The rows received; with `splits`, also how many came from each rank, 1-d, int32 or like
        `splits`.
    """
    queue = _queue()
    name = name or queue.auto_name("alltoall")
    rows, received = gradients.Alltoall.apply(queue, name, splits, tensor)
    return rows if splits is None else (rows, received)


def alltoall_async(tensor: torch.Tensor, splits: Splits = None, name: str | None = None) -> Handle:
    """Starts `alltoall`; `synchronize` returns a pair, as with `splits`. Without autograd."""
    queue = _queue()
    name = name or queue.auto_name("alltoall")
    return queue.submit(operations.alltoall(queue.peers, name, tensor, splits))


def barrier() -> None:
    """Blocks until every rank has come to its n-th barrier."""
    queue = _queue()
    queue.barrier(queue.auto_name("barrier"))


def poll(handle: Handle) -> bool:
    """Whether the operation has ended, so that `synchronize` will not wait."""
    return _queue().poll(handle)


def synchronize(handle: Handle) -> Any:
    """Waits for an operation and returns its result; Ctrl-C interrupts it."""
    return _queue().synchronize(handle)


def _queue() -> EagerQueue:
    return context.current().eager


def _resolve(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise UsageError("op and average are both given: give op only")
    warnings.warn("average= is deprecated: use op=Average or op=Sum", FutureWarning, stacklevel=3)
    return Average if average else Sum


def _reduced(
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    name: str | None,
    compression: Compressor | None,
    op: ReduceOp | None,
    factors: tuple[float, float],
    kind: str,
) -> list[torch.Tensor]:
    queue, op = _queue(), _resolve(op, average)
    name = name or queue.auto_name(kind)
    packed = [compression.compress(t) if compression else (t, None) for t in tensors]
    reduced = gradients.Allreduce.apply(queue, name, op, factors, *(t for t, _ in packed))
    if compression is None:
        return list(reduced)
    return [compression.decompress(t, ctx) for t, (_, ctx) in zip(reduced, packed, strict=True)]


def _reduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    factors: tuple[float, float],
    kind: str,
    in_place: bool,
) -> Handle:
    queue, op = _queue(), _resolve(op, average)
    name = name or queue.auto_name(kind)
    request = operations.allreduce(queue.peers, name, tensors, op, factors, in_place)
    return queue.submit(_first(request) if kind == "allreduce" else request)


def _broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, in_place: bool) -> Handle:
    queue = _queue()
    name = name or queue.auto_name("broadcast")
    return queue.submit(operations.broadcast(queue.peers, name, tensor, root_rank, in_place))


def _first(request: Request) -> Request:
    """The same operation with only the first part of its result."""
    return replace(request, finish=lambda value: request.finish(value)[0])


def _tensor(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value

"""The user's reductions, under Horovod's names; `ops` tells what holds for all operations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from usbyte.errors import UsageError
from usbyte.torch.api.submission import Compressor, compressed, decompressed, first_of, queue_of
from usbyte.torch.compression.codecs import Compression
from usbyte.torch.eager import autograd, operations
from usbyte.torch.eager.operation_names import OperationName
from usbyte.torch.eager.operations import Factors
from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.eager.request import Handle
from usbyte.torch.reduce_op import Average, Max, Min, Product, ReduceOp, Sum
from usbyte.torch.world.process_sets import ProcessSetLike, global_process_set

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor | None = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor over all ranks into a new one.

    Args:
        tensor: Of equal shape and dtype on all ranks. A sparse COO tensor is added up as
            `sparse_allreduce_async` does it, without autograd.
        average: Deprecated; True stands for op=Average, False for op=Sum.
        name: What the ranks match it by.
        compression: Applied before and undone after; lossy ones change the result.
        op: Average (default), Sum, Min, Max or Product; see `ReduceOp` for how each is rounded.
        prescale_factor: Multiplied before the reduction.
        postscale_factor: Multiplied after it.
        process_set: The ranks that take part; see `usbyte.torch.world.process_sets.ProcessSetLike`.
    """
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("allreduce", name, process_set, tensor)
    return _reduced(queue, [tensor], average, called, compression, op, factors)[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts `allreduce`; `synchronize` returns the new tensor. Without autograd."""
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("allreduce", name, process_set, tensor)
    return _reduce_one(queue, tensor, average, called, op, factors, in_place=False)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor over all ranks in place, and returns it. Without autograd."""
    reduced: torch.Tensor = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ).synchronize()
    return reduced


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts `allreduce_`; `synchronize` returns the tensor."""
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("allreduce", name, process_set, tensor)
    return _reduce_one(queue, tensor, average, called, op, factors, in_place=True)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor | None = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> list[torch.Tensor]:
    """Reduces several tensors as one operation; those of one dtype travel together.

    Arguments as for `allreduce`; shapes and dtypes may differ within the group, but not across
    ranks.
    """
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("grouped_allreduce", name, process_set, *tensors)
    return _reduced(queue, tensors, average, called, compression, op, factors)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts `grouped_allreduce`; `synchronize` returns the new tensors. Without autograd."""
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("grouped_allreduce", name, process_set, *tensors)
    return _reduce(queue, tensors, average, called, op, factors, in_place=False)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> list[torch.Tensor]:
    """Reduces several tensors as one operation in place, and returns them. Without autograd."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return list(handle.synchronize())


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts `grouped_allreduce_`; `synchronize` returns the list of tensors."""
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("grouped_allreduce", name, process_set, *tensors)
    return _reduce(queue, tensors, average, called, op, factors, in_place=True)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts adding up a sparse COO tensor, by gathering indices and values of all ranks.

    `synchronize`, or calling the handle, returns a new sparse tensor, not coalesced. Without
    autograd.

    Args:
        tensor: Of equal shape and dtype on all ranks; each has its own places.
        name: What the ranks match it by.
        op: Average (default) or Sum.
        process_set: The ranks that take part.
    """
    queue, called = queue_of("sparse_allreduce", name, process_set, tensor)
    return queue.submit(operations.sparse_allreduce(queue.peers, called, tensor, _resolve(op)))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor | None = Compression.none,
    op: ReduceOp | None = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces a tensor over all ranks; each rank gets its share of the first dimension.

    The first `rows % size` ranks get one row more than the others, who may get none.
    Arguments as for `allreduce`.
    """
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("reducescatter", name, process_set, tensor)
    return _scattered(queue, [tensor], called, compression, op, factors)[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | None = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts `reducescatter`; `synchronize` returns this rank's share. Without autograd."""
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("reducescatter", name, process_set, tensor)
    request = operations.reducescatter(queue.peers, called, [tensor], _resolve(op), factors)
    return queue.submit(first_of(request))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor | None = Compression.none,
    op: ReduceOp | None = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduces and scatters several tensors as one operation, as `reducescatter` does each."""
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("grouped_reducescatter", name, process_set, *tensors)
    return _scattered(queue, tensors, called, compression, op, factors)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp | None = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts `grouped_reducescatter`; `synchronize` returns the shares. Without autograd."""
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("grouped_reducescatter", name, process_set, *tensors)
    return queue.submit(
        operations.reducescatter(queue.peers, called, tensors, _resolve(op), factors)
    )


def _factors(before: Any, after: Any) -> Factors:
    """As Python's numbers, whatever they are."""
    for factor in (before, after):
        if not hasattr(factor, "__float__"):
            raise UsageError(f"a prescale or postscale factor must be a number, not {factor!r}")
    return float(before), float(after)


def _resolve(op: ReduceOp | None, average: bool | None = None) -> ReduceOp:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise UsageError("op and average are both given: give op only")
    warnings.warn("average= is deprecated: use op=Average or op=Sum", FutureWarning, stacklevel=4)
    return Average if average else Sum


def _reduced(
    queue: EagerQueue,
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    name: OperationName,
    compression: Compressor | None,
    op: ReduceOp | None,
    factors: Factors,
) -> list[torch.Tensor]:
    op = _resolve(op, average)
    packed, contexts = compressed(compression, list(tensors))
    if len(packed) == 1 and packed[0].is_sparse:
        request = operations.sparse_allreduce(queue.peers, name, packed[0], op, factors)
        reduced = [queue.submit(request).synchronize()]
    else:
        reduced = list(autograd.Allreduce.apply(queue, name, op, factors, *packed))
    return decompressed(compression, reduced, contexts)


def _reduce_one(
    queue: EagerQueue,
    tensor: torch.Tensor,
    average: bool | None,
    name: OperationName,
    op: ReduceOp | None,
    factors: Factors,
    in_place: bool,
) -> Handle:
    op = _resolve(op, average)
    if tensor.is_sparse and not in_place:
        return queue.submit(operations.sparse_allreduce(queue.peers, name, tensor, op, factors))
    request = operations.allreduce(queue.peers, name, [tensor], op, factors, in_place)
    return queue.submit(first_of(request))


def _reduce(
    queue: EagerQueue,
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    name: OperationName,
    op: ReduceOp | None,
    factors: Factors,
    in_place: bool,
) -> Handle:
    op = _resolve(op, average)
    return queue.submit(operations.allreduce(queue.peers, name, tensors, op, factors, in_place))


def _scattered(
    queue: EagerQueue,
    tensors: Sequence[torch.Tensor],
    name: OperationName,
    compression: Compressor | None,
    op: ReduceOp | None,
    factors: Factors,
) -> list[torch.Tensor]:
    packed, contexts = compressed(compression, list(tensors))
    shares = autograd.Reducescatter.apply(queue, name, _resolve(op), factors, *packed)
    return decompressed(compression, list(shares), contexts)

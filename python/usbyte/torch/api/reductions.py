# SPDX-License-Identifier: Apache-2.0
"""Reductions of eager collectives, under Horovod's names.

The docstring of `usbyte.torch.api.collectives` states the rules that hold for all operations.
"""

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
    """Reduces a tensor over all ranks and returns the result as a new tensor.

    Args:
        tensor: Any shape and dtype that the reduction supports, equal on all ranks. A sparse COO
            tensor is reduced as by `sparse_allreduce_async`, without autograd.
        average: Deprecated; True stands for op=Average, False for op=Sum. Do not pass `op` as well.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `allreduce` of this rank meets the n-th on the other ranks.
        compression: `Compression.none` (default), `.fp16` or `.bf16`, or an object with
            `compress` and `decompress`. The tensor is reduced and sent in the compressed dtype.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A tensor of the shape, dtype and device of `tensor`. Supports autograd.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: The ranks disagree about shape, dtype, op or factors; raised on every rank.
        FaultError: The job has failed.

    Example:
        >>> import torch
        >>> import usbyte.torch as ub
        >>> ub.init()
        >>> ub.allreduce(torch.tensor([1.0, 2.0]), op=ub.Sum)  # of a single rank
        tensor([1., 2.])
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
    """Starts to reduce a tensor over all ranks, without autograd.

    Args:
        tensor: Any shape and dtype that the reduction supports, equal on all ranks; or a sparse COO
            tensor. Do not change it before the operation has been synchronized.
        average: Deprecated; True stands for op=Average, False for op=Sum. Do not pass `op` as well.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `allreduce` of this rank meets the n-th on the other ranks.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A handle; `synchronize` returns the result as a new tensor.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: From `synchronize`: the ranks submitted different operations of this name.
        FaultError: From `synchronize`: the job has failed.
    """
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
    """Reduces a tensor over all ranks in place, without autograd.

    Args:
        tensor: Any shape and dtype that the reduction supports, equal on all ranks.
        average: Deprecated; True stands for op=Average, False for op=Sum. Do not pass `op` as well.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `allreduce` of this rank meets the n-th on the other ranks.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        `tensor`.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: The ranks disagree about shape, dtype, op or factors; raised on every rank.
        FaultError: The job has failed.
    """
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
    """Starts to reduce a tensor over all ranks in place, without autograd.

    Args:
        tensor: Any shape and dtype that the reduction supports, equal on all ranks. Do not read or
            change it before the operation has been synchronized.
        average: Deprecated; True stands for op=Average, False for op=Sum. Do not pass `op` as well.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `allreduce` of this rank meets the n-th on the other ranks.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.
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
    """Reduces several tensors over all ranks as one operation.

    Tensors of one dtype are sent together.

    Args:
        tensors: Shapes and dtypes may differ within the list; the list has the same ones on all
            ranks.
        average: Deprecated; True stands for op=Average, False for op=Sum. Do not pass `op` as well.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `grouped_allreduce` of this rank meets the n-th on the other ranks.
        compression: `Compression.none` (default), `.fp16` or `.bf16`, or an object with
            `compress` and `decompress`. Tensors are reduced and sent in the compressed dtype.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        New tensors, in the order of `tensors`. Supports autograd.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: The ranks disagree about shape, dtype, op or factors; raised on every rank.
        FaultError: The job has failed.
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
    """Starts to reduce several tensors as one operation, without autograd.

    Tensors of one dtype are sent together.

    Args:
        tensors: Shapes and dtypes may differ within the list; the list has the same ones on all
            ranks.
        average: Deprecated; True stands for op=Average, False for op=Sum. Do not pass `op` as well.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `grouped_allreduce` of this rank meets the n-th on the other ranks.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A handle; `synchronize` returns the results as a list of new tensors.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: From `synchronize`: the ranks submitted different operations of this name.
        FaultError: From `synchronize`: the job has failed.
    """
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
    """Reduces several tensors in place as one operation, without autograd.

    Tensors of one dtype are sent together.

    Args:
        tensors: Shapes and dtypes may differ within the list; the list has the same ones on all
            ranks.
        average: Deprecated; True stands for op=Average, False for op=Sum. Do not pass `op` as well.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `grouped_allreduce` of this rank meets the n-th on the other ranks.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        `tensors` as a list.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: The ranks disagree about shape, dtype, op or factors; raised on every rank.
        FaultError: The job has failed.
    """
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
    """Starts to reduce several tensors in place as one operation, without autograd.

    Tensors of one dtype are sent together.

    Args:
        tensors: Shapes and dtypes may differ within the list; the list has the same ones on all
            ranks.
        average: Deprecated; True stands for op=Average, False for op=Sum. Do not pass `op` as well.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `grouped_allreduce` of this rank meets the n-th on the other ranks.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A handle; `synchronize` returns `tensors` as a list.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: From `synchronize`: the ranks submitted different operations of this name.
        FaultError: From `synchronize`: the job has failed.
    """
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("grouped_allreduce", name, process_set, *tensors)
    return _reduce(queue, tensors, average, called, op, factors, in_place=True)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Handle:
    """Starts to sum a sparse COO tensor over all ranks, without autograd.

    The indices and values of all ranks are gathered.

    Args:
        tensor: A sparse COO tensor of equal shape and dtype on all ranks. Each rank may have other
            indices. Dense tensors are refused.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `sparse_allreduce` of this rank meets the n-th on the other ranks.
        op: `Average` (default; floating-point or complex only) or `Sum`.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        A handle; `synchronize(handle)`, or calling the handle, returns a new sparse tensor that is
        not coalesced.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: From `synchronize`: the ranks submitted different operations of this name.
        FaultError: From `synchronize`: the job has failed.
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
    """Reduces a tensor over all ranks and returns this rank's rows of the result.

    Of `rows` in the first dimension each rank gets `rows // size`; the first `rows % size` ranks
    get one more. A rank may thus get none.

    Args:
        tensor: At least one dimension; shape and dtype are equal on all ranks.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `reducescatter` of this rank meets the n-th on the other ranks.
        compression: `Compression.none` (default), `.fp16` or `.bf16`, or an object with
            `compress` and `decompress`. The tensor is reduced and sent in the compressed dtype.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.

    Returns:
        This rank's rows, as a new tensor. Supports autograd.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: The ranks disagree about shape, dtype, op or factors; raised on every rank.
        FaultError: The job has failed.
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
    """Starts `reducescatter`, without autograd.

    Of `rows` in the first dimension each rank gets `rows // size`; the first `rows % size` ranks
    get one more. A rank may thus get none.

    Args:
        tensor: At least one dimension; shape and dtype are equal on all ranks.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `reducescatter` of this rank meets the n-th on the other ranks.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.

    Returns:
        A handle; `synchronize` returns this rank's rows, as a new tensor.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: From `synchronize`: the ranks submitted different operations of this name.
        FaultError: From `synchronize`: the job has failed.
    """
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
    """Reduces and scatters several tensors as one operation.

    Args:
        tensors: At least one dimension each. Shapes and dtypes may differ within the list; the list
            has the same ones on all ranks.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `grouped_reducescatter` of this rank meets the n-th on the other ranks.
        compression: `Compression.none` (default), `.fp16` or `.bf16`, or an object with
            `compress` and `decompress`. Tensors are reduced and sent in the compressed dtype.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.

    Returns:
        This rank's rows of each tensor, as by `reducescatter`. Supports autograd.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: The ranks disagree about shape, dtype, op or factors; raised on every rank.
        FaultError: The job has failed.
    """
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
    """Starts `grouped_reducescatter`, without autograd.

    Args:
        tensors: At least one dimension each. Shapes and dtypes may differ within the list; the list
            has the same ones on all ranks.
        name: Matches the operation across ranks; at most 4096 bytes of UTF-8. By default the n-th
            unnamed `grouped_reducescatter` of this rank meets the n-th on the other ranks.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`; `ReduceOp` defines the rounding.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.
        prescale_factor: Multiplier before the reduction; default 1.
        postscale_factor: Multiplier after the reduction; default 1.

    Returns:
        A handle; `synchronize` returns the list of this rank's rows of each tensor.

    Raises:
        UsageError: Before `init`, for arguments that cannot be used, or if an operation of this
            name is in flight on this rank.
        MismatchError: From `synchronize`: the ranks submitted different operations of this name.
        FaultError: From `synchronize`: the job has failed.
    """
    factors = _factors(prescale_factor, postscale_factor)
    queue, called = queue_of("grouped_reducescatter", name, process_set, *tensors)
    return queue.submit(
        operations.reducescatter(queue.peers, called, tensors, _resolve(op), factors)
    )


def _factors(before: Any, after: Any) -> Factors:
    """Returns both factors as Python floats, from any type of number."""
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

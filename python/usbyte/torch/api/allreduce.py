# SPDX-License-Identifier: Apache-2.0
"""Eager all-reduces, under Horovod's names.

The docstring of `usbyte.torch.api.collectives` states the rules that hold for all operations.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from usbyte.errors import UsageError
from usbyte.torch.api.submission import (
    Compressor,
    as_factors,
    compressed,
    decompressed,
    first_of,
    queue_of,
)
from usbyte.torch.compression.codecs import Compression
from usbyte.torch.eager import autograd, operations
from usbyte.torch.eager.request import Handle
from usbyte.torch.eager.sparse_operations import sparse_allreduce
from usbyte.torch.reduce_op import Average, ReduceOp, Sum
from usbyte.torch.world.process_sets import ProcessSetLike, global_process_set

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
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

    Examples:
        >>> import torch
        >>> import usbyte.torch as ub
        >>> ub.init()
        >>> ub.allreduce(torch.tensor([1.0, 2.0]), op=ub.Sum)  # of a single rank
        tensor([1., 2.])
    """
    return _reduced(
        "allreduce", [tensor], average, name, compression, op,
        (prescale_factor, postscale_factor), process_set,
    )[0]  # fmt: skip


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
    return _start(
        "allreduce", [tensor], average, name, op, (prescale_factor, postscale_factor),
        process_set, in_place=False,
    )  # fmt: skip


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
    handle = _start(
        "allreduce", [tensor], average, name, op, (prescale_factor, postscale_factor),
        process_set, in_place=True,
    )  # fmt: skip
    reduced: torch.Tensor = handle.synchronize()
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
    return _start(
        "allreduce", [tensor], average, name, op, (prescale_factor, postscale_factor),
        process_set, in_place=True,
    )  # fmt: skip


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
    return _reduced(
        "grouped_allreduce", tensors, average, name, compression, op,
        (prescale_factor, postscale_factor), process_set,
    )  # fmt: skip


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
    return _start(
        "grouped_allreduce", tensors, average, name, op, (prescale_factor, postscale_factor),
        process_set, in_place=False,
    )  # fmt: skip


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
    handle = _start(
        "grouped_allreduce", tensors, average, name, op, (prescale_factor, postscale_factor),
        process_set, in_place=True,
    )  # fmt: skip
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
    return _start(
        "grouped_allreduce", tensors, average, name, op, (prescale_factor, postscale_factor),
        process_set, in_place=True,
    )  # fmt: skip


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
    request = sparse_allreduce(queue.peers, called, tensor, _reduction(op, None))
    return queue.submit(request)


def _reduced(
    kind: str,
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    name: str | None,
    compression: Compressor | None,
    op: ReduceOp | None,
    factors: tuple[object, object],
    process_set: ProcessSetLike,
) -> list[torch.Tensor]:
    """Reduces tensors as one operation, with autograd unless they are sparse."""
    queue, called = queue_of(kind, name, process_set, *tensors)
    op, scales = _reduction(op, average), as_factors(*factors)
    packed, contexts = compressed(compression, list(tensors))
    if len(packed) == 1 and packed[0].is_sparse:
        request = sparse_allreduce(queue.peers, called, packed[0], op, scales)
        reduced = [queue.submit(request).synchronize()]
    else:
        reduced = list(autograd.Allreduce.apply(queue, called, op, scales, *packed))
    return decompressed(compression, reduced, contexts)


def _start(
    kind: str,
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    factors: tuple[object, object],
    process_set: ProcessSetLike,
    in_place: bool,
) -> Handle:
    """Starts to reduce tensors; the result is a list, or a tensor if `kind` is "allreduce"."""
    queue, called = queue_of(kind, name, process_set, *tensors)
    op, scales = _reduction(op, average), as_factors(*factors)
    alone = kind == "allreduce"
    if alone and tensors[0].is_sparse and not in_place:
        return queue.submit(sparse_allreduce(queue.peers, called, tensors[0], op, scales))
    request = operations.allreduce(queue.peers, called, tensors, op, scales, in_place)
    return queue.submit(first_of(request) if alone else request)


def _reduction(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Returns the reduction that `op`, or the deprecated `average`, stands for."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise UsageError("op and average are both given: give op only")
    # The public function is called by the user's code, and calls a function that calls this.
    warnings.warn("average= is deprecated: use op=Average or op=Sum", FutureWarning, stacklevel=4)
    return Average if average else Sum

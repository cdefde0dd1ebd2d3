# SPDX-License-Identifier: Apache-2.0
"""Eager reduce-scatters, under Horovod's names.

The docstring of `usbyte.torch.api.collectives` states the rules that hold for all operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
from usbyte.torch.reduce_op import Average, ReduceOp
from usbyte.torch.world.process_sets import ProcessSetLike, global_process_set

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


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
    return _scattered(
        "reducescatter",
        [tensor],
        name,
        compression,
        op,
        process_set,
        (prescale_factor, postscale_factor),
    )[0]


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
    return _start(
        "reducescatter", [tensor], name, op, process_set, (prescale_factor, postscale_factor)
    )


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
    return _scattered(
        "grouped_reducescatter",
        tensors,
        name,
        compression,
        op,
        process_set,
        (prescale_factor, postscale_factor),
    )


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
    return _start(
        "grouped_reducescatter", tensors, name, op, process_set, (prescale_factor, postscale_factor)
    )


def _scattered(
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    compression: Compressor | None,
    op: ReduceOp | None,
    process_set: ProcessSetLike,
    factors: tuple[object, object],
) -> list[torch.Tensor]:
    """Reduces and scatters tensors as one operation, with autograd."""
    queue, called = queue_of(kind, name, process_set, *tensors)
    op, scales = Average if op is None else op, as_factors(*factors)
    packed, contexts = compressed(compression, list(tensors))
    shares = autograd.Reducescatter.apply(queue, called, op, scales, *packed)
    return decompressed(compression, list(shares), contexts)


def _start(
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp | None,
    process_set: ProcessSetLike,
    factors: tuple[object, object],
) -> Handle:
    """Starts a reduce-scatter; the result is a list, or a tensor if `kind` is "reducescatter"."""
    queue, called = queue_of(kind, name, process_set, *tensors)
    op, scales = Average if op is None else op, as_factors(*factors)
    request = operations.reducescatter(queue.peers, called, tensors, op, scales)
    return queue.submit(first_of(request) if kind == "reducescatter" else request)

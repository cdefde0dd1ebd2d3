# SPDX-License-Identifier: Apache-2.0
"""Builds the requests of eager collectives: the descriptor and the code that runs.

Every function here returns a `Request`. Its docstring describes the result of the request. Inputs
are read when the operation runs, so they must not be changed before it has been synchronized.
Tensors that are not contiguous or not on the CPU are staged through a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from usbyte.errors import UsageError
from usbyte.torch.eager.descriptors import Descriptor, MatchResult
from usbyte.torch.eager.operation_names import OperationName
from usbyte.torch.eager.rank_group_ops import RankGroupOps
from usbyte.torch.eager.request import Request
from usbyte.torch.eager.staging import (
    bump_version,
    bytes_of,
    bytes_tensor,
    check_writable,
    deliver,
    flat_view,
    row_bytes,
    stage,
)
from usbyte.torch.eager.transfers import (
    TAG,
    broadcast_flat,
    gather_bytes,
    gather_rows,
    rows_by_tensor,
    shares,
)
from usbyte.torch.reduce_op import ReduceOp, check_reducible, reduce_flat
from usbyte.torch.runtime.ring import all_gather_ranges, ring_reduce_scatter
from usbyte.torch.runtime.tensor_checks import check_plain

Factors = tuple[float, float]


def index(what: str, number: Any) -> int:
    """Converts any integer type to int.

    Args:
        what: Names the argument; the error message begins with it.
        number: An object with `__index__`.

    Raises:
        UsageError: `number` is not an integer.
    """
    try:
        return int(operator.index(number))
    except TypeError:
        raise UsageError(f"{what} must be a whole number, not {number!r}") from None


def allreduce(
    peers: RankGroupOps,
    name: OperationName,
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    factors: Factors = (1.0, 1.0),
    in_place: bool = False,
) -> Request:
    """Reduces tensors elementwise across ranks; tensors of one dtype share one collective.

    The result is a list of tensors, in the order of `tensors`.

    Args:
        peers: The ranks.
        name: Name of the operation.
        tensors: Dense tensors; the same shapes and dtypes on every rank.
        op: The reduction.
        factors: Multiplied into the values before and after the reduction.
        in_place: Write the results into `tensors` and return these.

    Raises:
        UsageError: A tensor has no memory of its own, its dtype does not suit `op`, or it cannot
            be written to with `in_place`.
    """
    what = f"allreduce '{name}'"
    for tensor in tensors:
        check_plain(what, tensor)
        check_reducible(what, tensor.dtype, op)
        if in_place:
            check_writable(what, tensor)
    staged = [stage(t, copy=not in_place) for t in tensors]

    def reduce(flat: torch.Tensor) -> None:
        def collective(numbers: torch.Tensor, kind: dist.ReduceOp.RedOpType) -> None:
            if peers.size == 1 or not numbers.numel():
                return
            if numbers.is_floating_point() and op in (ReduceOp.MIN, ReduceOp.MAX):
                # Gloo's own Min and Max propagate or drop a NaN, depending on which rank has it.
                ranges = shares(numbers.numel(), peers.size)
                ring_reduce_scatter(numbers, ranges, peers.group, kind, TAG)
                all_gather_ranges(numbers, ranges, peers.group, TAG)
            else:
                peers.all_reduce(numbers, kind)

        reduce_flat(flat, op, factors, peers.size, collective)

    def execute(_: MatchResult) -> None:
        # Inference tensors can only be written to in inference mode. That mode is per thread, and
        # this runs in the queue's thread.
        with torch.inference_mode(any(t.is_inference() for t in staged)):
            for dtype in dict.fromkeys(t.dtype for t in staged):
                reduce_alike([t for t in staged if t.dtype == dtype])

    def reduce_alike(alike: list[torch.Tensor]) -> None:
        if len(alike) == 1:
            return reduce(flat_view(alike[0]))
        flat = torch.cat([flat_view(t) for t in alike])
        reduce(flat)
        for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def finish(_: None) -> list[torch.Tensor]:
        if not in_place:
            return [s.to(t.device) for s, t in zip(staged, tensors, strict=True)]
        return [deliver(s, t) for s, t in zip(staged, tensors, strict=True)]

    return Request(
        name,
        Descriptor.of(peers.name, "allreduce", tensors, op=op.value, factors=factors),
        execute,
        finish,
    )


def join_with_zeros(peers: RankGroupOps, name: OperationName, descriptor: Descriptor) -> Request:
    """Contributes zeros to the allreduce that `descriptor` describes. The result is None."""

    def execute(match_result: MatchResult) -> None:
        zeros = [
            torch.zeros(list(shape), dtype=getattr(torch, dtype), device="cpu")
            for shape, dtype in zip(descriptor.shapes, descriptor.dtypes, strict=True)
        ]
        before, after = descriptor.factors
        op = ReduceOp(descriptor.op)
        allreduce(peers, name, zeros, op, (before, after), in_place=True).execute(match_result)

    return Request(name, descriptor, execute)


def allgather(peers: RankGroupOps, name: OperationName, tensors: Sequence[torch.Tensor]) -> Request:
    """Concatenates each tensor along its first dimension, whose length may differ by rank.

    A scalar counts as one row. The result is a list with a pair for each tensor: the rows of all
    ranks in rank order, and a list of the row counts by rank.
    """
    for tensor in tensors:
        check_plain(f"allgather '{name}'", tensor)
    rows = [t.reshape(1) if t.dim() == 0 else t for t in tensors]
    staged = [stage(t, copy=False) for t in rows]

    def execute(match_result: MatchResult) -> list[tuple[torch.Tensor, list[int]]]:
        return [
            (gather_rows(peers, tensor, counts), list(counts))
            for tensor, counts in zip(staged, rows_by_tensor(match_result, peers.size), strict=True)
        ]

    def finish(value: list[tuple[torch.Tensor, list[int]]]) -> list[tuple[torch.Tensor, list[int]]]:
        return [(out.to(t.device), counts) for (out, counts), t in zip(value, tensors, strict=True)]

    return Request(name, Descriptor.of(peers.name, "allgather", rows), execute, finish)


def broadcast(
    peers: RankGroupOps,
    name: OperationName,
    tensor: torch.Tensor,
    root: int,
    in_place: bool = False,
) -> Request:
    """Copies the root's tensor to every rank. The result is a tensor.

    Args:
        peers: The ranks.
        name: Name of the operation.
        tensor: Dense tensor; the same shape and dtype on every rank.
        root: Global rank whose tensor is sent.
        in_place: Write the result into `tensor` and return it.

    Raises:
        UsageError: `root` is not one of the ranks, the tensor has no memory of its own, or it
            cannot be written to with `in_place`.
    """
    what = f"broadcast '{name}'"
    root = index(f"{what}: root rank", root)
    source = peers.position(what, root)
    check_plain(what, tensor)
    if in_place:
        check_writable(what, tensor)
    staged = stage(tensor, copy=not in_place)

    def execute(_: MatchResult) -> torch.Tensor:
        broadcast_flat(peers, bytes_of(staged), source)
        return staged

    def finish(value: torch.Tensor) -> torch.Tensor:
        if not in_place:
            return value.to(tensor.device)
        # The root's values do not change. Its version counter is bumped all the same, so that a
        # backward that needs the previous values raises the same error on all ranks.
        return bump_version(tensor) if peers.rank == source else deliver(value, tensor)

    return Request(
        name, Descriptor.of(peers.name, "broadcast", [tensor], root=root), execute, finish
    )


def reducescatter(
    peers: RankGroupOps,
    name: OperationName,
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    factors: Factors = (1.0, 1.0),
) -> Request:
    """Reduces tensors elementwise and scatters the rows; tensors of one dtype go together.

    The result is a list of tensors: this rank's rows of each, as `shares` splits them.

    Args:
        peers: The ranks.
        name: Name of the operation.
        tensors: Dense tensors of at least one dimension; equal shapes and dtypes on every rank.
        op: The reduction.
        factors: Multiplied into the values before and after the reduction.

    Raises:
        UsageError: A tensor has no memory of its own or no dimension, or its dtype does not suit
            `op`.
    """
    what = f"reducescatter '{name}'"
    for tensor in tensors:
        check_plain(what, tensor)
        check_reducible(what, tensor.dtype, op)
        if tensor.dim() == 0:
            raise UsageError(f"{what} needs a first dimension to scatter; the tensor has none")
    staged = [stage(t, copy=False) for t in tensors]  # torch.cat copies below
    rows = [shares(t.shape[0], peers.size) for t in tensors]

    def reduced(alike: list[int]) -> list[torch.Tensor]:
        """Returns this rank's reduced rows of tensors of one dtype, given their indices."""
        # The rows of one rank, of all tensors, must be one range of the flat tensor.
        parts = [[staged[i][slice(*rows[i][r])] for i in alike] for r in range(peers.size)]
        counts = [[part.numel() for part in of_rank] for of_rank in parts]
        flat = torch.cat([flat_view(part) for of_rank in parts for part in of_rank])
        bounds = list(pairwise(accumulate((sum(of_rank) for of_rank in counts), initial=0)))

        def collective(numbers: torch.Tensor, kind: dist.ReduceOp.RedOpType) -> None:
            if peers.size > 1 and numbers.numel():
                each = numbers.numel() // flat.numel()  # 2 for complex elements
                ranges = [(begin * each, end * each) for begin, end in bounds]
                ring_reduce_scatter(numbers, ranges, peers.group, kind, TAG)

        reduce_flat(flat, op, factors, peers.size, collective)
        own = flat[slice(*bounds[peers.rank])].split(counts[peers.rank])
        return [
            part.view(like.shape).clone() for part, like in zip(own, parts[peers.rank], strict=True)
        ]

    def execute(_: MatchResult) -> list[torch.Tensor]:
        out = list(staged)
        for dtype in dict.fromkeys(t.dtype for t in staged):
            alike = [i for i, t in enumerate(staged) if t.dtype == dtype]
            for i, share in zip(alike, reduced(alike), strict=True):
                out[i] = share
        return out

    def finish(value: list[torch.Tensor]) -> list[torch.Tensor]:
        return [share.to(t.device) for share, t in zip(value, tensors, strict=True)]

    return Request(
        name,
        Descriptor.of(peers.name, "reducescatter", tensors, op=op.value, factors=factors),
        execute,
        finish,
    )


def alltoall(
    peers: RankGroupOps,
    name: OperationName,
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None,
) -> Request:
    """Sends the first `splits[0]` rows to rank 0, the next `splits[1]` rows to rank 1, and so on.

    The result is a pair: the rows received in rank order, and an int32 tensor with the number of
    rows from each rank. If `splits` is a tensor, the second has its dtype and device.

    Args:
        peers: The ranks.
        name: Name of the operation.
        tensor: Dense tensor of at least one dimension.
        splits: For each rank, the number of rows to send to it; they add up to the tensor's rows.
            None splits the rows evenly.

    Raises:
        UsageError: The tensor has no memory of its own or no dimension, or `splits` does not fit.
    """
    what = f"alltoall '{name}'"
    check_plain(what, tensor)
    sent = _checked_splits(what, tensor, splits, peers.size)
    staged = stage(tensor, copy=False)

    def execute(match_result: MatchResult) -> tuple[torch.Tensor, torch.Tensor]:
        out = staged.new_empty(sum(match_result.sizes), *tensor.shape[1:])
        row = row_bytes(tensor)
        if peers.size > 1:
            received = [n * row for n in match_result.sizes]
            peers.all_to_all(bytes_of(out), bytes_of(staged), received, [n * row for n in sent])
        else:
            out.copy_(staged)
        return out, torch.tensor(match_result.sizes, dtype=torch.int32, device="cpu")

    def finish(value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, received = value
        if isinstance(splits, torch.Tensor):
            received = received.to(splits)
        return rows.to(tensor.device), received

    return Request(
        name, Descriptor.of(peers.name, "alltoall", [tensor], splits=sent), execute, finish
    )


def barrier(peers: RankGroupOps, name: OperationName) -> Request:
    """Waits until every rank has submitted it. The result is None."""

    def execute(_: MatchResult) -> None:
        # The match result alone shows that all ranks came. A rank that exits after the barrier may
        # end the store, so the all-reduce waits until all ranks have read their match results.
        if peers.size > 1:
            nothing = torch.zeros(1, dtype=torch.float32, device="cpu")
            peers.all_reduce(nothing, dist.ReduceOp.SUM)

    return Request(name, Descriptor(peers.name, "barrier"), execute)


def allgather_bytes(peers: RankGroupOps, name: OperationName, payload: bytes) -> Request:
    """Gathers a byte string from every rank. The result is a list of bytes, in rank order."""
    local = bytes_tensor(payload)

    def execute(match_result: MatchResult) -> list[bytes]:
        out = local.new_empty(sum(match_result.sizes))
        gather_bytes(peers, local, out, 1, match_result.sizes)
        return [part.numpy().tobytes() for part in out.split(list(match_result.sizes))]

    return Request(name, Descriptor.of(peers.name, "allgather", [local]), execute)


def broadcast_bytes(peers: RankGroupOps, name: OperationName, payload: bytes, root: int) -> Request:
    """Copies the root's byte string to every rank; the payloads of other ranks are ignored."""
    root = index(f"broadcast '{name}': root rank", root)
    source = peers.position(f"broadcast '{name}'", root)
    local = bytes_tensor(payload)

    def execute(match_result: MatchResult) -> bytes:
        flat = local if peers.rank == source else local.new_empty(match_result.sizes[0])
        broadcast_flat(peers, flat, source)
        return flat.numpy().tobytes()

    return Request(name, Descriptor.of(peers.name, "broadcast_bytes", [local], root=root), execute)


def _checked_splits(
    what: str, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, size: int
) -> list[int]:
    if tensor.dim() == 0:
        raise UsageError(f"{what} needs a first dimension to split; the tensor has none")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise UsageError(
                f"{what}: {rows} rows do not split evenly over {size} ranks: pass splits"
            )
        return [rows // size] * size
    if isinstance(splits, torch.Tensor) and splits.dim() != 1:
        raise UsageError(f"{what}: splits must have one dimension, not shape {tuple(splits.shape)}")
    counts = [index(f"{what}: a split", n) for n in splits]
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise UsageError(
            f"{what}: splits {counts} must be {size} numbers, one for each rank, that add up to "
            f"the tensor's {rows} rows"
        )
    return counts

# SPDX-License-Identifier: Apache-2.0
"""Builds the request of a sparse all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from usbyte.errors import UsageError
from usbyte.torch.eager.descriptors import Descriptor, MatchResult
from usbyte.torch.eager.operation_names import OperationName
from usbyte.torch.eager.operations import Factors
from usbyte.torch.eager.rank_group_ops import RankGroupOps
from usbyte.torch.eager.request import Request
from usbyte.torch.eager.staging import flat_view, stage
from usbyte.torch.eager.transfers import gather_rows, rows_by_tensor
from usbyte.torch.reduce_op import ReduceOp, check_reducible, reduce_flat
from usbyte.torch.runtime.tensor_checks import check_plain


def sparse_allreduce(
    peers: RankGroupOps,
    name: OperationName,
    tensor: torch.Tensor,
    op: ReduceOp,
    factors: Factors = (1.0, 1.0),
) -> Request:
    """Reduces a sparse COO tensor by gathering every rank's indices and values.

    The result is a sparse tensor that is not coalesced: an index that several ranks have occurs
    several times. If a rank's indices are outside of the tensor's shape, every rank raises
    UsageError.

    Args:
        peers: The ranks.
        name: Name of the operation.
        tensor: Sparse COO tensor; the same shape and dtype on every rank.
        op: Sum, or Average for floating-point and complex tensors.
        factors: Multiplied into the values before and after the reduction.

    Raises:
        UsageError: The tensor is not a sparse COO tensor, or its dtype does not suit `op`.
    """
    what = f"allreduce '{name}'"
    check_plain(what, tensor, or_sparse=True)
    if tensor.layout != torch.sparse_coo:
        raise UsageError(f"{what} needs a sparse COO tensor, not layout {tensor.layout}")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise UsageError(f"{what} of a sparse tensor needs Sum or Average, not {op!r}")
    check_reducible(what, tensor.dtype, op)
    if op is ReduceOp.AVERAGE and not (tensor.is_floating_point() or tensor.is_complex()):
        # Each value would be divided, and so truncated, before the values are added.
        raise UsageError(f"{what} cannot average a sparse tensor of {tensor.dtype}: use Sum")
    plain = tensor.detach()
    indices, values = plain._indices().t(), plain._values()
    for part in (indices, values):
        check_plain(what, part)
    staged = [stage(t, copy=False) for t in (indices, values)]

    def execute(match_result: MatchResult) -> tuple[list[torch.Tensor], Sequence[int]]:
        by_tensor = rows_by_tensor(match_result, peers.size)
        parts = zip(staged, by_tensor, strict=True)
        return [gather_rows(peers, part, counts) for part, counts in parts], by_tensor[0]

    def finish(value: tuple[list[torch.Tensor], Sequence[int]]) -> torch.Tensor:
        (places, numbers), counts = value
        _check_places(what, places, counts, peers.members, tensor.shape)
        reduce_flat(flat_view(numbers), op, factors, peers.size, lambda *_: None)
        # Descriptors have shown that all ranks' tensors have this shape.
        whole = torch.sparse_coo_tensor(
            places.t(), numbers, tensor.shape, check_invariants=False, device=numbers.device
        )
        return whole.to(tensor.device)

    described = Descriptor.of(
        peers.name,
        "sparse_allreduce",
        [indices, values],
        op=op.value,
        factors=factors,
        whole=list(tensor.shape),
    )
    return Request(name, described, execute, finish)


def _check_places(
    what: str,
    places: torch.Tensor,
    counts: Sequence[int],
    ranks: Sequence[int],
    shape: Sequence[int],
) -> None:
    """Raises UsageError if a gathered index is outside of a sparse tensor of shape `shape`.

    Rank `ranks[i]` sent `counts[i]` rows of `places` ([nnz, sparse dimensions]). All ranks check
    the same gathered indices, so all of them raise, or none does.
    """
    if not places.numel():
        return
    bounds = torch.tensor(list(shape[: places.shape[1]]), dtype=torch.int64, device="cpu")
    wrong = ((places < 0) | (places >= bounds)).any(1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        rank = next(r for r, end in zip(ranks, accumulate(counts), strict=True) if row < end)
        raise UsageError(
            f"{what}: rank {rank} has the index {places[row].tolist()}, which is outside of the "
            f"sparse tensor's shape {list(shape)}: make the tensor with check_invariants=True to "
            "see where it comes from"
        )

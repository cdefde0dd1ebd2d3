# SPDX-License-Identifier: Apache-2.0
"""Descriptors of eager collectives, and the check that all ranks submitted the same one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from usbyte.torch.eager.operation_names import OperationName
from usbyte.torch.reduce_op import ReduceOp
from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.runtime.messages import read, unreadable

_NEUTRAL_ZERO = (ReduceOp.SUM.value, ReduceOp.AVERAGE.value)
_KINDS = frozenset(
    {
        "allreduce", "sparse_allreduce", "allgather", "broadcast", "reducescatter", "alltoall",
        "barrier", "broadcast_bytes",
    }
)  # fmt: skip
_REDUCING = frozenset({"allreduce", "sparse_allreduce", "reducescatter"})
_WITH_ROWS = frozenset({"sparse_allreduce", "allgather", "reducescatter", "alltoall"})
_NUMBER_OF_TENSORS = {
    "barrier": 0, "broadcast": 1, "broadcast_bytes": 1, "alltoall": 1, "sparse_allreduce": 2,
}  # fmt: skip
_REDUCTIONS = frozenset(op.value for op in ReduceOp)
_DTYPES = frozenset(
    str(found).removeprefix("torch.")
    for found in vars(torch).values()
    if isinstance(found, torch.dtype)
)


@dataclass(frozen=True)
class Descriptor:
    """The facts of an eager collective that one rank submitted.

    Attributes:
        rank: The rank that submitted the operation.
        kind: "allreduce", "sparse_allreduce", "allgather", "broadcast", "reducescatter",
            "alltoall", "barrier", or "broadcast_bytes". For "broadcast_bytes" only the root's shape
            counts.
        dtypes: Dtype of each tensor, as "float32" (without "torch.").
        shapes: Shape of each tensor.
        op: Name of the reduction; "" for kinds that reduce nothing.
        factors: Prescale and postscale factor of a reduction.
        root: Rank that broadcasts; -1 for kinds without a root.
        splits: For "alltoall", how many rows of the first dimension go to each rank.
        whole: For "sparse_allreduce", the shape of the sparse tensor. `shapes` then has the shape
            of its indices ([nnz, sparse dimensions]) and of its values.
    """

    rank: int
    kind: str
    dtypes: Sequence[str] = ()
    shapes: Sequence[Sequence[int]] = ()
    op: str = ""
    factors: Sequence[float] = (1.0, 1.0)
    root: int = -1
    splits: Sequence[int] = ()
    whole: Sequence[int] = ()

    @classmethod
    def of(cls, rank: int, kind: str, tensors: Sequence[torch.Tensor], **more: Any) -> Descriptor:
        """Returns the descriptor of an operation on tensors, given the fields that do not follow.

        Args:
            rank: The rank that submits the operation.
            kind: As the attribute.
            tensors: The tensors, for dtypes and shapes.
            more: The other attributes that the kind needs.
        """
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors]
        return cls(rank, kind, dtypes, [list(t.shape) for t in tensors], **more)

    def to_json(self) -> str:
        """Returns the descriptor as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes | str, sender: str = "a rank's part of an operation") -> Descriptor:
        """Parses and checks a descriptor that `to_json` made on another rank.

        Args:
            text: One JSON object.
            sender: Names the message and its sender; the error message begins with it.

        Raises:
            MismatchError: The text is not a descriptor of this version of usbyte.
        """
        found: Descriptor = read(sender, text, Descriptor)
        if flaw := _flaw(found):
            raise unreadable(sender, flaw)
        return found


@dataclass(frozen=True)
class MatchResult:
    """What one rank learns when all ranks have submitted an operation.

    Attributes:
        name: Key of the operation's name (`OperationName.key`).
        error: Why the operation cannot run; None if it can.
        sizes: For "allgather" and "sparse_allreduce", the rows of each rank's first tensor, then
            of each rank's second tensor, and so on. For "alltoall", the rows that this rank
            receives from each rank. For "broadcast_bytes", the length of the root's payload in
            bytes. Empty for other kinds.
        join_with_zeros: Set only for a rank that has called `join`: the operation to which it
            contributes zeros, if `error` is None.
    """

    name: str
    error: str | None = None
    sizes: Sequence[int] = ()
    join_with_zeros: Descriptor | None = None

    def to_json(self) -> str:
        """Returns the match result as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes | str, sender: str = "the outcome of an operation") -> MatchResult:
        """Parses and checks a match result that `to_json` made on another rank.

        Args:
            text: One JSON object.
            sender: Names the message and its sender; the error message begins with it.

        Raises:
            MismatchError: The text is not a match result of this version of usbyte.
        """
        found: MatchResult = read(sender, text, MatchResult)
        flaw = "negative sizes" if any(size < 0 for size in found.sizes) else ""
        if found.join_with_zeros is not None and found.error is None:
            flaw = flaw or _flaw(found.join_with_zeros)
            if not flaw and not _takes_zeros(found.join_with_zeros):
                joined = found.join_with_zeros
                flaw = f"zeros cannot replace a contribution to {joined.kind} {joined.op}"
        if flaw:
            raise unreadable(sender, flaw)
        return found


def _flaw(descriptor: Descriptor) -> str:
    """Returns why usbyte cannot have sent this descriptor; "" if it is valid."""
    kind, shapes = descriptor.kind, descriptor.shapes
    if kind not in _KINDS:
        return f"'{kind:.80}' is no kind of operation"
    if len(shapes) != len(descriptor.dtypes):
        return f"{len(shapes)} shapes with {len(descriptor.dtypes)} dtypes"
    if len(shapes) != _NUMBER_OF_TENSORS.get(kind, len(shapes)):
        return f"{kind} of {len(shapes)} tensors"
    if unknown := [dtype for dtype in descriptor.dtypes if dtype not in _DTYPES]:
        return f"'{unknown[0]:.80}' is no dtype"
    if any(n < 0 for shape in (*shapes, descriptor.whole) for n in shape):
        return "a negative size"
    if kind in _WITH_ROWS and not all(shapes):
        return f"{kind} of a tensor without dimensions"
    if descriptor.op not in (_REDUCTIONS if kind in _REDUCING else ("",)):
        return f"{kind} with the reduction '{descriptor.op:.80}'"
    if len(descriptor.factors) != 2:
        return f"{len(descriptor.factors)} factors"
    if kind == "alltoall" and (
        min(descriptor.splits, default=0) < 0 or sum(descriptor.splits) != shapes[0][0]
    ):
        return "splits that do not add up to the rows"
    if kind == "broadcast_bytes" and len(shapes[0]) != 1:
        return "bytes that have no length"
    return ""


def match(
    name: str, descriptors: Sequence[Descriptor], joined: Sequence[int] = ()
) -> list[MatchResult]:
    """Checks that all ranks submitted the same operation under one name.

    Args:
        name: Key of the operation's name (`OperationName.key`).
        descriptors: One descriptor for each rank that submitted the operation, in any order; at
            least one.
        joined: All other ranks of the operation. They have called `join`.

    Returns:
        One match result for each rank, by ascending rank. Either all or none of them have an
        error.
    """
    ordered = sorted(descriptors, key=lambda d: d.rank)
    ranks = sorted([*(d.rank for d in ordered), *joined])
    label = OperationName.from_key(name).label
    error = (
        _disagreement(label, ordered)
        or _unanswered(label, ordered[0], joined)
        or _impossible(label, ordered, ranks)
    )
    if error is not None or joined:
        zeros = {rank: replace(ordered[0], rank=rank) for rank in joined}
        return [MatchResult(name, error, join_with_zeros=zeros.get(rank)) for rank in ranks]
    return [MatchResult(name, sizes=_sizes(ordered, position)) for position in range(len(ranks))]


def _sizes(ordered: Sequence[Descriptor], rank: int) -> list[int]:
    kind = ordered[0].kind
    if kind in ("allgather", "sparse_allreduce"):
        return [d.shapes[i][0] for i in range(len(ordered[0].shapes)) for d in ordered]
    if kind == "alltoall":
        return [d.splits[rank] for d in ordered]
    if kind == "broadcast_bytes":
        return [next(d.shapes[0][0] for d in ordered if d.rank == d.root)]
    return []


def _unanswered(name: str, descriptor: Descriptor, joined: Sequence[int]) -> str | None:
    """Returns why the ranks that joined cannot contribute zeros; None if they can."""
    if not joined or _takes_zeros(descriptor):
        return None
    which = f"{descriptor.kind} '{name}'"
    if descriptor.op:
        which += f" with {ReduceOp(descriptor.op)}"
    return (
        f"{which}: {name_ranks(joined)} ran out of data and called join(). From then on only "
        "allreduce with Sum or Average can run; the joined ranks contribute zeros to it. Submit "
        "other operations before a rank calls join() or after all ranks have."
    )


def _takes_zeros(descriptor: Descriptor) -> bool:
    """Whether a rank that has joined can contribute zeros to this operation."""
    return descriptor.kind == "allreduce" and descriptor.op in _NEUTRAL_ZERO


def _impossible(name: str, ordered: Sequence[Descriptor], ranks: Sequence[int]) -> str | None:
    """Returns why the operation cannot run although the descriptors agree; None if it can."""
    first = ordered[0]
    if first.kind in ("broadcast", "broadcast_bytes") and first.root not in ranks:
        return f"{first.kind} '{name}': root rank {first.root} is not one of {name_ranks(ranks)}"
    if first.kind == "alltoall":
        for descriptor in ordered:
            if len(descriptor.splits) != len(ranks):
                return (
                    f"alltoall '{name}': rank {descriptor.rank} has {len(descriptor.splits)} "
                    f"splits for {len(ranks)} ranks: pass one number for each rank"
                )
    return None


def _disagreement(name: str, ordered: Sequence[Descriptor]) -> str | None:
    for label, values in _compared(ordered):
        holders: dict[str, list[int]] = {}
        for descriptor, value in zip(ordered, values, strict=True):
            holders.setdefault(str(value), []).append(descriptor.rank)
        if len(holders) > 1:
            found = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in holders.items())
            return (
                f"{ordered[0].kind} '{name}': the ranks disagree about the {label}: {found}. "
                "Make it equal on every rank, or give different operations different names."
            )
    return None


def _compared(ordered: Sequence[Descriptor]) -> Iterator[tuple[str, list[Any]]]:
    """Yields each fact that must be equal, as its name and one value for each rank.

    The most telling facts come first, because the error names the first difference. Each fact may
    only be read if all facts before it are equal: a dtype of tensor i needs equal tensor counts.
    """
    kind, count = ordered[0].kind, len(ordered[0].shapes)
    yield "kind of operation", [d.kind for d in ordered]
    yield "number of tensors", [len(d.shapes) for d in ordered]
    yield "shape of the sparse tensor", [list(d.whole) for d in ordered]
    for i in range(count):
        of_which = f" of tensor {i}" if count > 1 else ""
        yield f"dtype{of_which}", [d.dtypes[i] for d in ordered]
        if kind in ("allgather", "alltoall", "sparse_allreduce"):
            yield f"number of dimensions{of_which}", [len(d.shapes[i]) for d in ordered]
            beyond = [list(d.shapes[i][1:]) for d in ordered]
            yield f"shape beyond the first dimension{of_which}", beyond
        elif kind != "broadcast_bytes":
            yield f"shape{of_which}", [list(d.shapes[i]) for d in ordered]
    yield "reduction", [d.op for d in ordered]
    yield "root rank", [d.root for d in ordered]
    yield "prescale and postscale factors", [list(d.factors) for d in ordered]

"""What ranks tell each other about an eager operation, and how it is checked."""

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
    """One rank's side of an operation.

    Attributes:
        rank: The rank that submitted it.
        kind: "allreduce", "sparse_allreduce", "allgather", "broadcast", "reducescatter",
            "alltoall", "barrier", or "broadcast_bytes", for which only the root's shape counts.
        dtypes: Of each tensor, without "torch.".
        shapes: Of each tensor.
        op: Name of the reduction; "" where nothing is reduced.
        factors: Prescale and postscale factor of a reduction.
        root: Rank that broadcasts; -1 where there is none.
        splits: For alltoall, the rows of the first dimension for each rank.
        whole: For sparse_allreduce, the shape of the tensor of which `shapes` has those of indices
            (as rows) and values.
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

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes | str, sender: str = "a rank's part of an operation") -> Descriptor:
        """Inverse of `to_json`.

        Args:
            text: What another rank has sent.
            sender: Who has sent what, for the error message.

        Raises:
            MismatchError: It is no descriptor that this version of usbyte sends.
        """
        found: Descriptor = read(sender, text, Descriptor)
        if flaw := _flaw(found):
            raise unreadable(sender, flaw)
        return found


@dataclass(frozen=True)
class MatchResult:
    """What one rank learns when all ranks have submitted an operation.

    Attributes:
        name: Of the operation.
        error: Why it cannot run, or None.
        sizes: For allgather and sparse_allreduce the rows that each rank contributes, of one tensor
            after the other; for alltoall the rows that come from each rank, for broadcast_bytes the
            root's bytes; else empty.
        join_with_zeros: What a rank that has called `join` contributes zeros to, if there is no
            error.
    """

    name: str
    error: str | None = None
    sizes: Sequence[int] = ()
    join_with_zeros: Descriptor | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes | str, sender: str = "the outcome of an operation") -> MatchResult:
        """Inverse of `to_json`; see `Descriptor.from_json`."""
        found: MatchResult = read(sender, text, MatchResult)
        flaw = "negative sizes" if any(size < 0 for size in found.sizes) else ""
        if found.join_with_zeros is not None and found.error is None:
            flaw = flaw or _flaw(found.join_with_zeros)
            if not flaw and not _takes_zeros(found.join_with_zeros):
                joined = found.join_with_zeros
                flaw = f"zeros cannot stand in for {joined.kind} {joined.op}"
        if flaw:
            raise unreadable(sender, flaw)
        return found


def _flaw(descriptor: Descriptor) -> str:
    """Why a descriptor is none that usbyte sends; "" if it is one."""
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
    """Checks that the ranks mean the same operation.

    Args:
        name: The operation's key; see `OperationName`.
        descriptors: One for each rank that has submitted it, in any order; at least one.
        joined: The other ranks, which have joined.

    Returns:
        One verdict for each rank, by ascending rank; either all or none of them carry an error.
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
    """Why ranks that have joined cannot take part with zeros."""
    if not joined or _takes_zeros(descriptor):
        return None
    which = f"{descriptor.kind} '{name}'"
    if descriptor.op:
        which += f" with {ReduceOp(descriptor.op)}"
    return (
        f"{which}: {name_ranks(joined)} ran out of data and called join(). What is answered then "
        "is allreduce with Sum or Average, as zeros. Submit anything else before a rank joins or "
        "after all have."
    )


def _takes_zeros(descriptor: Descriptor) -> bool:
    """Whether a rank that has joined can take part with zeros."""
    return descriptor.kind == "allreduce" and descriptor.op in _NEUTRAL_ZERO


def _impossible(name: str, ordered: Sequence[Descriptor], ranks: Sequence[int]) -> str | None:
    """Why these ranks cannot run an operation that they agree on."""
    first = ordered[0]
    if first.kind in ("broadcast", "broadcast_bytes") and first.root not in ranks:
        return f"{first.kind} '{name}': root rank {first.root} is not one of {name_ranks(ranks)}"
    if first.kind == "alltoall":
        for descriptor in ordered:
            if len(descriptor.splits) != len(ranks):
                return (
                    f"alltoall '{name}': rank {descriptor.rank} has {len(descriptor.splits)} "
                    f"splits for {len(ranks)} ranks"
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
    """Everything that must be equal, the most telling first: what it is, and each rank's value.

    Each pair presumes that the ones before it were equal.
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

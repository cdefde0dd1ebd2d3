"""What ranks tell each other about an eager operation, and how it is checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_SHOWN_RANKS = 8  # of a long list of ranks in a message


@dataclass(frozen=True)
class Descriptor:
    """One rank's side of an operation.

    Attributes:
        rank: The rank that submitted it.
        kind: "allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "barrier", or
            "broadcast_bytes", for which only the root's shape counts.
        dtypes: Of each tensor, without "torch.".
        shapes: Of each tensor.
        op: Name of the reduction; "" where nothing is reduced.
        factors: Prescale and postscale factor of a reduction.
        root: Rank that broadcasts; -1 where there is none.
        splits: For alltoall, the rows of the first dimension for each rank.
    """

    rank: int
    kind: str
    dtypes: Sequence[str] = ()
    shapes: Sequence[Sequence[int]] = ()
    op: str = ""
    factors: Sequence[float] = (1.0, 1.0)
    root: int = -1
    splits: Sequence[int] = ()

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Descriptor:
        """Inverse of `to_json`."""
        return Descriptor(**json.loads(text))


@dataclass(frozen=True)
class Verdict:
    """What one rank learns when all ranks have submitted an operation.

    Attributes:
        name: Of the operation.
        error: Why it cannot run, or None.
        sizes: For allgather the rows that each rank contributes, for alltoall the rows that come
            from each rank, for broadcast_bytes the root's bytes; else empty.
    """

    name: str
    error: str | None = None
    sizes: Sequence[int] = ()

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Verdict:
        """Inverse of `to_json`."""
        return Verdict(**json.loads(text))


def match(name: str, descriptors: Sequence[Descriptor]) -> list[Verdict]:
    """Checks that the ranks mean the same operation.

    Args:
        name: Of the operation.
        descriptors: One for each rank, in any order.

    Returns:
        One verdict for each rank; either all or none of them carry an error.
    """
    ordered = sorted(descriptors, key=lambda d: d.rank)
    error = _disagreement(name, ordered)
    return [
        Verdict(name, error, () if error else _sizes(ordered, rank)) for rank in range(len(ordered))
    ]


def name_ranks(ranks: Sequence[int]) -> str:
    """For messages: "rank 3", "ranks 0, 2", or the first few of many."""
    listed = ", ".join(str(rank) for rank in ranks[:_SHOWN_RANKS])
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def _sizes(ordered: Sequence[Descriptor], rank: int) -> list[int]:
    kind = ordered[0].kind
    if kind == "allgather":
        return [d.shapes[0][0] for d in ordered]
    if kind == "alltoall":
        return [d.splits[rank] for d in ordered]
    if kind == "broadcast_bytes":
        return [ordered[ordered[0].root].shapes[0][0]]
    return []


def _disagreement(name: str, ordered: Sequence[Descriptor]) -> str | None:
    for label, read in _checks(ordered[0]):
        holders: dict[str, list[int]] = {}
        for d in ordered:
            holders.setdefault(str(read(d)), []).append(d.rank)
        if len(holders) > 1:
            values = "; ".join(f"{value} on {name_ranks(r)}" for value, r in holders.items())
            return (
                f"{ordered[0].kind} '{name}': the ranks disagree about the {label}: {values}. "
                "Make it equal on every rank, or give different operations different names."
            )
    return None


def _checks(first: Descriptor) -> list[tuple[str, Callable[[Descriptor], Any]]]:
    """Label and value of everything that must be equal, the most telling first."""
    checks: list[tuple[str, Callable[[Descriptor], Any]]] = [
        ("kind of operation", lambda d: d.kind),
        ("number of tensors", lambda d: len(d.shapes)),
    ]
    grouped = len(first.shapes) > 1
    for i in range(len(first.shapes)):
        of_which = f" of tensor {i}" if grouped else ""
        checks.append((f"dtype{of_which}", lambda d, i=i: d.dtypes[i]))
        if first.kind in ("allgather", "alltoall"):
            label = "number of dimensions"
            checks.append((label, lambda d, i=i: len(d.shapes[i])))
            label = "shape beyond the first dimension"
            checks.append((label, lambda d, i=i: list(d.shapes[i][1:])))
        elif first.kind != "broadcast_bytes":
            checks.append((f"shape{of_which}", lambda d, i=i: list(d.shapes[i])))
    return [
        *checks,
        ("reduction", lambda d: d.op),
        ("root rank", lambda d: d.root),
        ("prescale and postscale factors", lambda d: list(d.factors)),
    ]

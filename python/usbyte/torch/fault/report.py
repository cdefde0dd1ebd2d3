# SPDX-License-Identifier: Apache-2.0
"""Describes how far each rank has come, for stall warnings, fault verdicts and the fault log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from usbyte.errors import MismatchError
from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.runtime.messages import check, read

#: State of one rank. "optimizers" has, by label, the result of `Engine.status`, or {} if nothing is
#: sent. "eager" lists the eager operations in flight. In the phase "averaging" (DASO), "step"
#: counts node averagings.
State = Mapping[str, Any]


@dataclass(frozen=True)
class _State:
    optimizers: dict[str, dict[str, Any]]
    eager: list[str]


@dataclass(frozen=True)
class _Operation:
    step: int
    op: str
    launched_s: float
    took_s: float | None


# Fields of an optimizer's status that this module reads. There may be others.
_STATUS: Mapping[str, Any] = {
    "step": int,
    "phase": str,
    "launched": int,
    "completed": int,
    "ops": int,
    "awaited": list[str],
}

_MOST_RANKS = 16  # that are listed
_MOST_OPERATIONS = 6  # that are listed for each rank


def read_state(rank: int, text: bytes | str) -> State:
    """Parses the state that a rank has sent.

    An unreadable state must not stop the diagnosis of a fault. It becomes a state without
    optimizers whose "eager" text says that it cannot be read.

    Args:
        rank: Rank that sent the state.
        text: JSON.
    """
    sender = f"the answer of rank {rank}"
    try:
        state: dict[str, Any] = asdict(read(sender, text, _State))
        for status in filter(None, state["optimizers"].values()):
            _check_status(status)
    except (MismatchError, ValueError) as error:
        return {"optimizers": {}, "eager": [f"not known: {sender} cannot be read: {error}"]}
    return state


def _check_status(status: dict[str, Any]) -> None:
    """Raises ValueError if a status lacks a field that is read here, or has one of another type."""
    required = {"step", "phase"}
    if status.get("phase") == "backward":
        required.add("awaited")
    if status.get("awaits_release"):
        required.add("launched")
    if "ops" in status:
        required.add("completed")
    if missing := required - status.keys():
        raise ValueError(f"it has no '{min(missing)}'")
    for field in status.keys() & _STATUS.keys():
        status[field] = check(status[field], _STATUS[field])
    for row in check(status.get("last", []), list[dict[str, Any]]):
        check({f.name: row[f.name] for f in fields(_Operation) if f.name in row}, _Operation)


def behind(states: Mapping[int, State]) -> list[str]:
    """Describes the ranks that are behind the others, one text for each.

    Args:
        states: State of each rank that has answered, by rank.
    """
    found_behind, late = [], []
    for label in sorted({label for state in states.values() for label in state["optimizers"]}):
        at = {r: found for r, s in states.items() if (found := s["optimizers"].get(label))}
        latest = max((s["step"] for s in at.values()), default=0)
        first = [s for s in at.values() if s["step"] == latest]
        left = any(s["phase"] != "backward" for s in first)
        launched = max((s.get("launched", 0) for s in first), default=0)
        for rank, s in sorted(at.items()):
            if s["step"] < latest and s["phase"] == "averaging":
                late.append(f"rank {rank} has not begun node averaging {latest}")
            elif s["step"] < latest:
                found_behind.append(f"rank {rank} has not begun backward of step {latest}")
                if eager := states[rank]["eager"]:
                    found_behind[-1] += (
                        f" and has {eager[0]} in flight, which all ranks must call: if rank {rank} "
                        "had fewer batches, call ub.join() after the last one"
                    )
            elif left and s["phase"] == "backward":
                names = ", ".join(s["awaited"])
                found_behind.append(
                    f"rank {rank} is still in backward of step {latest}, without the gradients of "
                    f"{names}"
                )
            elif s.get("awaits_release") and s["launched"] < launched:
                found_behind.append(f"rank {rank} has not updated its shards in step {latest}")
    # A rank that waits for a rank of its own node is late for exchanges, too, but is no culprit.
    return found_behind or late


def last_operations(states: Mapping[int, State], silent: Sequence[int]) -> str:
    """Lists the last operations of each rank, the rank that is furthest behind first.

    Args:
        states: State of each rank that has answered, by rank.
        silent: Ranks that have not answered.

    Returns:
        Text of several lines, for the log.
    """
    order = sorted(states, key=lambda rank: (_progress(states[rank]), rank))
    lines = ["the last operations of each rank:"]
    if silent:
        lines.append(f"{name_ranks(silent)}: no answer")
    for rank in order[:_MOST_RANKS]:
        lines += _rank(rank, states[rank])
    if len(order) > _MOST_RANKS:
        lines.append(f"and {len(order) - _MOST_RANKS} ranks that have come further")
    return "\n".join(lines)


def _progress(state: State) -> tuple[tuple[int, int], ...]:
    return tuple((s["step"], s.get("completed", 0)) for s in state["optimizers"].values() if s)


def _rank(rank: int, state: State) -> list[str]:
    lines = []
    for label, status in state["optimizers"].items():
        if not status:
            continue
        if status["phase"] == "averaging":
            if status["step"] >= 0:
                lines.append(f"rank {rank}: node averaging {status['step']} begun")
            continue
        which = f", {label}" if len(state["optimizers"]) > 1 else ""
        done = f", {status['completed']} of {status['ops']} done" if "ops" in status else ""
        lines.append(f"rank {rank}{which}: step {status['step']}, {status['phase']}{done}")
        lines += [f"  {_operation(row)}" for row in status.get("last", [])[-_MOST_OPERATIONS:]]
    head = [] if lines else [f"rank {rank}:"]
    return head + lines + [f"  in flight: {text}" for text in state["eager"][:_MOST_OPERATIONS]]


def _operation(row: Mapping[str, Any]) -> str:
    took = row["took_s"]
    ending = "not completed" if took is None else f"took {took:.3g} s"
    return f"step {row['step']} {row['op']}: launched {row['launched_s']:.3g} s ago, {ending}"

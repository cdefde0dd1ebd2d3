# SPDX-License-Identifier: Apache-2.0
"""Reads one measured step from a Chrome trace that usbyte has written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from usbyte import _core
from usbyte.errors import Error, UsageError
from usbyte.report.chrome_trace import Span, not_a_trace, read_events, read_spans

#: Fields of a sparse op in the trace.
_SUMS = (
    "sum_rows", "density", "gamma", "skew", "push_imbalance", "pull_imbalance", "sent_bytes",
    "received_bytes",
)  # fmt: skip


@dataclass
class Measured:
    """One step of a trace. Times are seconds on the clock of the trace.

    Attributes:
        step: Number of the step.
        step_s: Median length of the trace's steps under this plan; None if there is only one.
        queued: For each op, when it was ready to be launched and when it was launched.
        flights: For each op, when it was launched and when it was done.
        waits: Waits for gradients: name of the tensor, start, end.
        updates: Updates: names of the tensors, start, end.
        sums: For each sparse op, its `_SUMS` by name.
        forwards: Start and end of each forward pass; none in a trace of an older version.
        backwards: Start and end of each backward pass; none in a trace of an older version.
        next_forwards: Start and end of each forward pass of the next step.
    """

    step: int
    step_s: float | None
    queued: dict[int, tuple[float, float]] = field(default_factory=dict)
    flights: dict[int, tuple[float, float]] = field(default_factory=dict)
    waits: list[tuple[str, float, float]] = field(default_factory=list)
    updates: list[tuple[str, float, float]] = field(default_factory=list)
    sums: dict[int, dict[str, float]] = field(default_factory=dict)
    forwards: list[tuple[float, float]] = field(default_factory=list)
    backwards: list[tuple[float, float]] = field(default_factory=list)
    next_forwards: list[tuple[float, float]] = field(default_factory=list)

    def shifted(self, by_s: float) -> Measured:
        """Returns the step with all times `by_s` seconds later."""
        return Measured(
            self.step,
            self.step_s,
            {op: (a + by_s, b + by_s) for op, (a, b) in self.queued.items()},
            {op: (a + by_s, b + by_s) for op, (a, b) in self.flights.items()},
            [(name, a + by_s, b + by_s) for name, a, b in self.waits],
            [(name, a + by_s, b + by_s) for name, a, b in self.updates],
            self.sums,
            [(a + by_s, b + by_s) for a, b in self.forwards],
            [(a + by_s, b + by_s) for a, b in self.backwards],
            [(a + by_s, b + by_s) for a, b in self.next_forwards],
        )


class Described(NamedTuple):
    """A plan and what it was made from, as a timeline tells of them."""

    plan: _core.Plan
    profile: _core.Profile
    network: _core.NetworkModel
    overlap: str
    sharded: bool


def read_descriptions(path: Path) -> list[Described]:
    """Reads the plans of a timeline, with what they were made from, the last one first.

    Of several optimizers, they are those of the first.

    Raises:
        UsageError: The file is no timeline, or no plan was made while it was recorded.
    """
    events = read_events(path)
    try:
        told = [e["args"] for e in events if e.get("name") == "usbyte_decision"]
        found = [_described(e) for e in told if e["optimizer"] == told[0]["optimizer"]]
    except (ValueError, KeyError, TypeError, Error) as error:
        raise not_a_trace(path, error) from error
    if not found:
        raise UsageError(
            f"'{path}' does not tell of a plan: give the timeline of a run with two ranks or more "
            "that went on after its learning steps, or give PLAN and PROFILE"
        )
    return found[::-1]


def _described(told: Mapping[str, Any]) -> Described:
    decision = told["decision"]
    plan = _core.Plan.from_json(decision["plan"])
    profile = _core.Profile.from_json(decision["profile"])
    network = _core.NetworkModel.from_json(decision["network"])
    if plan.hash() != decision["hash"]:
        raise ValueError("its plan has another hash")
    return Described(plan, profile, network, decision["overlap"], told["sharded"])


def described_step(path: Path, step: int | None) -> tuple[Described, Measured]:
    """Reads one step of a timeline with the last plan that it follows.

    Args:
        path: The timeline.
        step: Number of the step; None for a step of median length under the last plan that
            recorded steps follow.

    Raises:
        UsageError: As `read_descriptions`, or no plan of the timeline has such a step.
    """
    failed: UsageError | None = None
    for described in read_descriptions(path):
        try:
            return described, read_trace(path, described.plan, step)
        except UsageError as error:
            failed = failed or error
    wanted = "whole step" if step is None else f"step {step}"
    raise UsageError(
        f"'{path}' has no {wanted} under any plan that it tells of; record more steps, such as "
        "USBYTE_TIMELINE_STEPS=100:110"
    ) from failed


def read_trace(path: Path, plan: _core.Plan, step: int | None = None) -> Measured:
    """Reads one step of a Chrome trace that usbyte has written, on the clock of the trace.

    Args:
        path: The trace.
        plan: The plan of the step.
        step: Number of the step; None for a step of median length.

    Raises:
        UsageError: The file is not such a trace, or does not have the step under this plan.
    """
    ops = {plan.describe(i): i for i in range(len(plan.ops))}
    found: dict[int, Measured] = {}
    try:
        for span in read_spans(path):
            _add(found.setdefault(span.step, Measured(span.step, None)), span, ops)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise not_a_trace(path, error) from error
    whole = {
        n: m for n, m in found.items() if m.queued and len(m.queued) == len(m.flights) == len(ops)
    }
    if step is not None and step not in whole:
        raise UsageError(
            f"step {step} of '{path}' does not follow this plan; those that do are "
            + (_ranges(sorted(whole)) or "none")
        )
    if not whole:
        raise UsageError(
            f"no step in '{path}' follows this plan ({plan.policy}, {len(ops)} ops); give the plan "
            "of that run (optimizer.plan.to_json()) and a trace of steps after the learning steps"
        )
    starts = {n: min(a for a, _ in m.queued.values()) for n, m in whole.items()}
    lengths = {n: starts[n + 1] - starts[n] for n in whole if n + 1 in starts}
    ranked = sorted(lengths, key=lambda n: lengths[n])
    usual = ranked[(len(ranked) - 1) // 2] if ranked else max(whole)
    chosen = whole[usual if step is None else step]
    chosen.step_s = lengths[usual] if ranked else None
    if (following := found.get(chosen.step + 1)) is not None:
        chosen.next_forwards = following.forwards
    return chosen


def _add(found: Measured, span: Span, ops: Mapping[str, int]) -> None:
    """Adds a bar of the trace to its step."""
    times = span.start_s, span.end_s
    if span.kind == "wait":
        found.waits.append((span.name, *times))
    elif span.kind == "update":
        found.updates.append((span.name, *times))
    elif span.kind == "compute" and span.name == "forward":
        found.forwards.append(times)
    elif span.kind == "compute" and span.name == "backward":
        found.backwards.append(times)
    elif span.name in ops and span.kind == "queue":
        found.queued[ops[span.name]] = times
    elif span.name in ops and span.kind == "communication":
        found.flights[ops[span.name]] = times
        if "sum_rows" in span.args:
            sums = {what: float(span.args[what]) for what in _SUMS}
            if not all(map(math.isfinite, sums.values())):
                raise ValueError(f"'{span.name}' has a statistic that is not finite")
            found.sums[ops[span.name]] = sums


def aligned(measured: Measured, plan: _core.Plan, profile: _core.Profile) -> Measured:
    """Moves a measured step to the clock of the prediction.

    On both clocks, the first op whose gradients are complete then has them at the same time.
    """
    ready_s = profile.ready_s
    complete = [max(ready_s[t] for t in plan.tensors_of(op)) for op in plan.ops]
    first = min(a for a, _ in measured.queued.values())
    return measured.shifted(min(complete) - first)


def _ranges(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:10]))
    return shown if len(numbers) <= 10 else f"{shown}, ... {numbers[-1]}"

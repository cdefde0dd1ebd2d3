"""What a report shows: lanes of bars, predicted and measured, on one time axis."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

from usbyte import _core
from usbyte.cli.report.trace import Measured

Kind = Literal["forward", "backward", "wait", "op", "update"]


@dataclass(frozen=True)
class Bar:
    """Something that takes time.

    Attributes:
        start_s: Since the forward pass began.
        end_s: Likewise.
        kind: What it is; decides the colour, but for ops.
        tip: Text for whoever points at it, of several lines.
        op: Position in the plan, for ops.
    """

    start_s: float
    end_s: float
    kind: Kind
    tip: str
    op: int | None = None


@dataclass(frozen=True)
class Lane:
    """Bars of one sort; those of one row do not overlap."""

    name: str
    measured: bool
    rows: list[list[Bar]]


@dataclass(frozen=True)
class Scene:
    """All that a report shows.

    Attributes:
        plan: What is executed.
        profile: With the plan's tensors, in its order.
        overlap: "forward" or "backward".
        sharded: Whether each rank updates a shard, and parameters are gathered.
        prediction: Of the plan under `network`.
        bound_s: A step that no order of sending goes below.
        network: What operations cost.
        measured: On the prediction's clock, if there is a trace.
    """

    plan: _core.Plan
    profile: _core.Profile
    overlap: str
    sharded: bool
    prediction: _core.Prediction
    bound_s: float
    network: _core.NetworkModel
    measured: Measured | None

    # The core converts all that it has whenever it is asked, so each is asked for once.

    @cached_property
    def ops(self) -> list[_core.Op]:
        """The plan's, in its order."""
        return self.plan.ops

    @cached_property
    def tensors(self) -> list[_core.TensorSpec]:
        """The plan's."""
        return self.plan.tensors

    @cached_property
    def spans(self) -> list[tuple[float, float]]:
        """By op, launched and done as predicted."""
        p = self.prediction
        return list(zip(p.launched_s, p.done_s, strict=True))

    @cached_property
    def _by_need(self) -> tuple[list[float], list[int], list[float]]:
        """When tensors are needed, ascending, and elements of all before each; need by tensor."""
        need_s = self.profile.need_s
        rows = sorted(zip(need_s, (t.numel for t in self.tensors), strict=True))
        before = list(accumulate((numel for _, numel in rows), initial=0))
        return [at_s for at_s, _ in rows], before, need_s

    @cached_property
    def lanes(self) -> list[Lane]:
        """From top to bottom; what can be compared is side by side."""
        lanes = [Lane("compute", False, [self._compute()])]
        predicted, measured = self._predicted(), self._measured()
        for name, bars in predicted.items():
            lanes.append(Lane(name, False, _rows(bars)))
            if self.measured is not None:
                lanes.append(Lane(name, True, _rows(measured[name])))
        return [lane for lane in lanes if lane.rows]

    @property
    def end_s(self) -> float:
        """Where the time axis ends."""
        ends = [bar.end_s for lane in self.lanes for row in lane.rows for bar in row]
        return max([*ends, self.prediction.step_s]) * 1.01

    def colour(self, op: int) -> str:
        """By how early forward needs what is in the op: from red, at the input, to blue."""
        what = self.ops[op]
        if what.sparse:  # as if it were where the dense gradients are that forward needs next
            ascending, before, need_s = self._by_need
            begin = before[bisect_left(ascending, need_s[what.sparse.tensor])]
        else:
            begin = min(begin for begin, _ in what.blocks)
        hue = (15 + 235 * begin / max(1, self.plan.numel)) / 360
        return "#" + "".join(f"{round(255 * c):02x}" for c in hls_to_rgb(hue, 0.45, 0.55))

    def op_tip(self, i: int) -> str:
        """Number, kind, bytes and tensors of an op."""
        op = self.ops[i]
        fence = ", fence" if op.fence else ""
        return (
            f"op {i}: {self.op_kind(i)}, {self.plan.bytes(op):,} bytes, "
            f"window {op.window_bytes:,} bytes{fence}\n{self.op_tensors(i)}"
        )

    def op_kind(self, i: int) -> str:
        """The collective, and what it travels by."""
        op = self.ops[i]
        return op.kind if op.codec == "none" else f"{op.kind} by {op.codec}"

    def op_tensors(self, i: int) -> str:
        """Names of the tensors in an op."""
        return _listed([self.tensors[t].name for t in self.plan.tensors_of(self.ops[i])])

    def _predicted(self) -> dict[str, list[Bar]]:
        tensors, p = self.tensors, self.prediction
        waits = [
            Bar(a, b, "wait", f"{self.overlap} waits for {tensors[t].name}\n{_span(a, b)}")
            for t, (a, b) in p.gates
        ]
        flights = [self._flight(i, a, b) for i, (a, b) in enumerate(self.spans)]
        updates = [
            Bar(a, b, "update", f"update\n{_listed([tensors[t].name for t in ts])}\n{_span(a, b)}")
            for ts, (a, b) in p.updates
        ]
        return {"waiting": waits, "in flight": flights, "updates": updates}

    def _measured(self) -> dict[str, list[Bar]]:
        m = self.measured
        if m is None:
            return {}
        waits = [Bar(a, b, "wait", f"waits for {name}\n{_span(a, b)}") for name, a, b in m.gates]
        flights = [self._flight(i, a, b) for i, (a, b) in sorted(m.flights.items())]
        updates = [
            Bar(a, b, "update", f"update\n{_listed(names.split(', '))}\n{_span(a, b)}")
            for names, a, b in m.updates
        ]
        return {"waiting": waits, "in flight": flights, "updates": updates}

    def _flight(self, i: int, start_s: float, end_s: float) -> Bar:
        return Bar(start_s, end_s, "op", f"{self.op_tip(i)}\n{_span(start_s, end_s)}", i)

    def _compute(self) -> list[Bar]:
        """Forward and backward of this step and, with forward overlap, the next forward."""
        names = [t.name for t in self.profile.tensors]
        needs = _grouped(zip(self.profile.need_s, names, strict=True))
        readies = _grouped(zip(self.profile.ready_s, names, strict=True))
        bars = []
        ends = [*(need for need, _ in needs[1:]), max(readies[0][0], needs[-1][0])]
        for (start, layer), end in zip(needs, ends, strict=True):
            bars.append(Bar(start, end, "forward", f"forward of\n{_listed(layer)}"))
        start = ends[-1]
        for end, layer in readies:
            if end > start:
                bars.append(Bar(start, end, "backward", f"backward up to\n{_listed(layer)}"))
                start = end
        return bars + self._next_forward()

    def _next_forward(self) -> list[Bar]:
        # Between a layer's update and what the next layer waits for, the layer computes.
        asked = {t: span[0] for t, span in self.prediction.gates}
        bars = []
        for (ts, (_, end)), (after, (passed, _)) in pairwise(self.prediction.updates):
            start = asked.get(after[0], passed)
            if start > end:
                name = self.tensors[ts[0]].name
                bars.append(Bar(end, start, "forward", f"next forward, after the gate of\n{name}"))
        return bars


def _grouped(rows: Iterable[tuple[float, str]]) -> list[tuple[float, list[str]]]:
    groups: dict[float, list[str]] = {}
    for time_s, name in rows:
        groups.setdefault(time_s, []).append(name)
    return sorted(groups.items())


def _rows(bars: Iterable[Bar]) -> list[list[Bar]]:
    """Each bar in the first row that is free."""
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        row = next((row for row in rows if row[-1].end_s <= bar.start_s), None)
        if row is None:
            rows.append(row := [])
        row.append(bar)
    return rows


def _span(start_s: float, end_s: float) -> str:
    return f"{start_s * 1e3:.3f} to {end_s * 1e3:.3f} ms ({(end_s - start_s) * 1e3:.3f} ms)"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"

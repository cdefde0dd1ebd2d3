# SPDX-License-Identifier: Apache-2.0
"""The content of a report: lanes of bars, predicted and measured, on one time axis."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

from usbyte import _core
from usbyte.planning import profiles
from usbyte.planning.whatif import best_ddp
from usbyte.report.trace import Measured, aligned, described_step

Kind = Literal["forward", "backward", "wait", "op", "update", "ddp"]
Side = Literal["predicted", "measured", "DDP"]


@dataclass(frozen=True)
class Bar:
    """One time interval of a lane.

    Attributes:
        start_s: Start, in seconds since the forward pass began.
        end_s: End, in seconds since the forward pass began.
        kind: Decides the colour, except for "op".
        tip: Tooltip, of several lines.
        op: Position of the op in the plan; None for other kinds.
    """

    start_s: float
    end_s: float
    kind: Kind
    tip: str
    op: int | None = None


@dataclass(frozen=True)
class Lane:
    """Bars of one sort, in rows; the bars of a row do not overlap.

    Attributes:
        name: What the bars show.
        side: Whose bars they are: the plan's, predicted or measured, or those predicted for DDP.
        rows: The bars.
    """

    name: str
    side: Side
    rows: list[list[Bar]]


@dataclass(frozen=True)
class Scene:
    """The data of a report.

    Attributes:
        plan: The plan.
        profile: The profile, with the plan's tensors in the plan's order.
        overlap: "forward" or "backward".
        sharded: Whether each rank updates only its shard of the parameters.
        prediction: Prediction of the plan under `network`.
        bound_s: The bound, in seconds.
        bytes_bound_s: The bound of bytes alone, without startups.
        network: The network model.
        measured: The measured step, on the clock of the prediction; None without a trace.
    """

    plan: _core.Plan
    profile: _core.Profile
    overlap: str
    sharded: bool
    prediction: _core.Prediction
    bound_s: float
    bytes_bound_s: float
    network: _core.NetworkModel
    measured: Measured | None

    @classmethod
    def predicted(
        cls,
        plan: _core.Plan,
        profile: _core.Profile,
        network: _core.NetworkModel,
        overlap: str,
        sharded: bool = False,
        costs: _core.CodecCosts | None = None,
        measured: Measured | None = None,
    ) -> Scene:
        """Predicts a plan.

        Args:
            plan: The plan.
            profile: The profile, with the plan's tensors in the plan's order.
            network: The network model.
            overlap: "forward" or "backward".
            sharded: Whether each rank updates only its shard of the parameters.
            costs: Costs of codecs; None: coding takes no time.
            measured: A measured step; None for none.
        """
        costs = costs or _core.CodecCosts()
        return cls(
            plan=plan,
            profile=profile,
            overlap=overlap,
            sharded=sharded,
            prediction=_core.simulate(plan, profile, network, overlap, sharded, costs),
            bound_s=_core.bound_s(profile, network, overlap, sharded),
            bytes_bound_s=_core.bytes_bound_s(profile, network, overlap, sharded),
            network=network,
            measured=measured,
        )

    @classmethod
    def of_timeline(
        cls, path: Path, step: int | None = None, costs: _core.CodecCosts | None = None
    ) -> Scene:
        """Predicts the last plan that steps of a timeline follow, with one of these steps measured.

        Args:
            path: The timeline.
            step: Number of the step; None for a step of median length.
            costs: Costs of codecs; None: coding takes no time.

        Raises:
            UsageError: The file is no timeline, or has no such step under a plan that it tells of.
        """
        described, measured = described_step(path, step)
        plan, whole, network, overlap, sharded = described
        job = profiles.matched(whole, plan)
        shown = aligned(measured, plan, job)
        return cls.predicted(plan, job, network, overlap, sharded, costs, shown)

    # Cached, because each access of these attributes of the C++ core converts the whole list.

    @cached_property
    def ops(self) -> list[_core.Op]:
        """The ops of the plan."""
        return self.plan.ops

    @cached_property
    def tensors(self) -> list[_core.TensorSpec]:
        """The tensors of the plan."""
        return self.plan.tensors

    @cached_property
    def spans(self) -> list[tuple[float, float]]:
        """For each op, the predicted times at which it is launched and done."""
        p = self.prediction
        return list(zip(p.launched_s, p.done_s, strict=True))

    @cached_property
    def _by_need(self) -> tuple[list[float], list[int], list[float]]:
        """Returns need times ascending, elements before each of them, and need times by tensor."""
        need_s = self.profile.need_s
        rows = sorted(zip(need_s, (t.numel for t in self.tensors), strict=True))
        before = list(accumulate((numel for _, numel in rows), initial=0))
        return [at_s for at_s, _ in rows], before, need_s

    @cached_property
    def lanes(self) -> list[Lane]:
        """The lanes from top to bottom; each measured lane is below its prediction."""
        lanes = [
            Lane("compute", "predicted", [self._compute()]),
            Lane("compute", "measured", _rows(self._measured_passes())),
        ]
        predicted, measured, ddp = self._predicted(), self._measured(), self._baseline_bars()
        for name, bars in predicted.items():
            lanes.append(Lane(name, "DDP", _rows(ddp.get(name, []))))
            lanes.append(Lane(name, "predicted", _rows(bars)))
            lanes.append(Lane(name, "measured", _rows(measured.get(name, []))))
        return [lane for lane in lanes if lane.rows]

    @cached_property
    def baseline(self) -> Scene | None:
        """DDP with its best bucket size; None with sparse gradients, for which it has no plan."""
        if any(tensor.sparse for tensor in self.profile.tensors):
            return None
        plan, _ = best_ddp(self.profile, self.network)
        return Scene.predicted(plan, self.profile, self.network, "backward")

    @property
    def span_s(self) -> tuple[float, float]:
        """Start and end of the time axis, in seconds. A measured pass may begin before time 0."""
        bars = [bar for lane in self.lanes for row in lane.rows for bar in row]
        begin = min([0.0, *(bar.start_s for bar in bars)])
        end = max([self.prediction.step_s, *(bar.end_s for bar in bars)])
        return begin, end + 0.01 * (end - begin)

    def colour(self, op: int) -> str:
        """Returns the colour of an op: red if forward needs it first, to blue for the last."""
        shown = self.ops[op]
        if shown.sparse:  # Its place is that of the dense gradients which forward needs next.
            ascending, before, need_s = self._by_need
            begin = before[bisect_left(ascending, need_s[shown.sparse.tensor])]
        else:
            begin = min(begin for begin, _ in shown.blocks)
        hue = (15 + 235 * begin / max(1, self.plan.numel)) / 360
        return "#" + "".join(f"{round(255 * c):02x}" for c in hls_to_rgb(hue, 0.45, 0.55))

    def op_tip(self, i: int) -> str:
        """Returns the tooltip of an op: number, kind, bytes, window and tensors."""
        op = self.ops[i]
        fence = ", fence" if op.fence else ""
        return (
            f"op {i}: {self.op_kind(i)}, {self.plan.bytes(op):,} bytes, "
            f"window {op.window_bytes:,} bytes{fence}\n{self.op_tensors(i)}"
        )

    def op_kind(self, i: int) -> str:
        """Returns the collective of an op, and its codec."""
        op = self.ops[i]
        return op.kind if op.codec == "none" else f"{op.kind} by {op.codec}"

    def op_tensors(self, i: int) -> str:
        """Returns the names of the tensors in an op, at most eight."""
        return _listed([self.tensors[t].name for t in self.plan.tensors_of(self.ops[i])])

    def _predicted(self) -> dict[str, list[Bar]]:
        tensors, p = self.tensors, self.prediction
        waits = [
            Bar(a, b, "wait", f"{self.overlap} waits for {_listed(names)}\n{_span(a, b)}")
            for names, a, b in _one_at_a_time((tensors[t].name, a, b) for t, (a, b) in p.waits)
        ]
        flights = [self._flight(i, a, b) for i, (a, b) in enumerate(self.spans)]
        updates = [
            Bar(a, b, "update", f"update\n{_listed([tensors[t].name for t in ts])}\n{_span(a, b)}")
            for ts, (a, b) in p.updates
        ]
        return {"waiting": waits, "in flight": flights, "updates": updates}

    def _baseline_bars(self) -> dict[str, list[Bar]]:
        """Returns what is predicted for DDP; its compute is that of the plan."""
        if self.baseline is None:
            return {}
        bars = self.baseline._predicted()
        flights = [
            replace(bar, kind="ddp", op=None, tip=f"DDP\n{bar.tip}") for bar in bars["in flight"]
        ]
        return {"waiting": bars["waiting"], "in flight": flights}

    def _measured(self) -> dict[str, list[Bar]]:
        m = self.measured
        if m is None:
            return {}
        waits = [
            Bar(a, b, "wait", f"waits for {_listed(names)}\n{_span(a, b)}")
            for names, a, b in _one_at_a_time(m.waits)
        ]
        flights = [self._flight(i, a, b) for i, (a, b) in sorted(m.flights.items())]
        updates = [
            Bar(a, b, "update", f"update\n{_listed(names.split(', '))}\n{_span(a, b)}")
            for names, a, b in m.updates
        ]
        return {"waiting": waits, "in flight": flights, "updates": updates}

    def _measured_passes(self) -> list[Bar]:
        """Returns the measured passes, and the next forward with that overlap."""
        m = self.measured
        if m is None:
            return []
        forwards = m.forwards + (m.next_forwards if self.overlap == "forward" else [])
        passes: list[tuple[Kind, float, float]] = [("forward", *times) for times in forwards]
        passes += [("backward", *times) for times in m.backwards]
        return [Bar(a, b, kind, f"{kind}\n{_span(a, b)}") for kind, a, b in passes]

    def _flight(self, i: int, start_s: float, end_s: float) -> Bar:
        return Bar(start_s, end_s, "op", f"{self.op_tip(i)}\n{_span(start_s, end_s)}", i)

    def _compute(self) -> list[Bar]:
        """Returns forward and backward of this step, and the next forward with that overlap."""
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
        # A layer computes from the end of its update until the next layer begins to wait.
        waits_from = {t: span[0] for t, span in self.prediction.waits}
        bars = []
        for (ts, (_, end)), (after, (passed, _)) in pairwise(self.prediction.updates):
            start = waits_from.get(after[0], passed)
            if start > end:
                name = self.tensors[ts[0]].name
                bars.append(Bar(end, start, "forward", f"next forward, after the wait for\n{name}"))
        return bars


def _grouped(rows: Iterable[tuple[float, str]]) -> list[tuple[float, list[str]]]:
    groups: dict[float, list[str]] = {}
    for time_s, name in rows:
        groups.setdefault(time_s, []).append(name)
    return sorted(groups.items())


def _one_at_a_time(
    waits: Iterable[tuple[str, float, float]],
) -> list[tuple[list[str], float, float]]:
    """Joins waits that overlap in time: a training thread waits for several gradients at once."""
    found: list[tuple[list[str], float, float]] = []
    for name, start_s, end_s in sorted(waits, key=lambda wait: wait[1]):
        if found and start_s < found[-1][2]:
            names, begin_s, last_s = found[-1]
            found[-1] = ([*names, name], begin_s, max(last_s, end_s))
        else:
            found.append(([name], start_s, end_s))
    return found


def _rows(bars: Iterable[Bar]) -> list[list[Bar]]:
    """Puts each bar into the first row that is free at its start."""
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

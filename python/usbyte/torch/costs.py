"""From timed collectives to what they cost: lines, and how well they fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from usbyte import _core

#: Kind of a measurement: a small all_reduce that was posted right behind a large one.
BUSY = "busy"


@dataclass(frozen=True)
class Measured:
    """Groups of operations, each group posted when the one before has ended.

    Attributes:
        kind: "all_reduce", "reduce_scatter" or "all_gather"; or `BUSY`, the small one alone.
        window: Operations in a group.
        bytes: Payload of a group.
        seconds: Mean time of a group.
    """

    kind: str
    window: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """All measurements of one size.

    Attributes:
        bytes: Payload of a group.
        seconds: Median.
        low_s: The 10th percentile.
        high_s: The 90th percentile.
        residual: What the line says beyond the median, as a part of the median.
    """

    bytes: int
    seconds: float
    low_s: float
    high_s: float
    residual: float


@dataclass(frozen=True)
class Line:
    """What one collective costs with `window` operations in flight.

    Attributes:
        kind: The collective.
        window: Operations in flight.
        cost: The line.
        residual: Median over sizes of the points' residuals without sign.
        points: What was measured, by size.
    """

    kind: str
    window: int
    cost: _core.AlphaBeta
    residual: float
    points: Sequence[Point]


def fit_lines(rows: Sequence[Measured]) -> list[Line]:
    """A line for each collective and window, in order of measurement; see `_core.fit_cost`."""
    samples: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.kind != BUSY:
            samples[row.kind, row.window][row.bytes].append(row.seconds)
    lines = []
    for (kind, window), by_size in samples.items():
        cost, residual = _core.fit_cost([(b, s) for b, times in by_size.items() for s in times])
        points = [_point(size, by_size[size], cost) for size in sorted(by_size)]
        lines.append(Line(kind, window, cost, residual, points))
    return lines


def busy_alpha_s(rows: Sequence[Measured]) -> float:
    """How long a small operation takes beside a large one: the median, s; 0 if not measured."""
    times = [row.seconds for row in rows if row.kind == BUSY]
    return float(np.median(times)) if times else 0.0


def fit(ranks: int, rows: Sequence[Measured]) -> _core.NetworkModel:
    """What the measurements say; a window that was not measured costs what the next does."""
    by_kind: dict[str, dict[int, _core.AlphaBeta]] = defaultdict(dict)
    for line in fit_lines(rows):
        by_kind[line.kind][line.window] = line.cost
    costs = {
        kind: [by_window[min(w for w in by_window if w >= k)] for k in range(1, max(by_window) + 1)]
        for kind, by_window in by_kind.items()
    }
    return _core.NetworkModel(
        ranks,
        costs["all_reduce"],
        costs.get("reduce_scatter", []),
        costs.get("all_gather", []),
        busy_alpha_s=busy_alpha_s(rows),
    )


def _point(size: int, times: Sequence[float], cost: _core.AlphaBeta) -> Point:
    low, middle, high = (float(t) for t in np.percentile(times, [10, 50, 90]))
    return Point(size, middle, low, high, cost.time_s(size) / max(middle, 1e-12) - 1)

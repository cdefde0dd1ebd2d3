"""From timed collectives to what they cost: lines, and how well they fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from usbyte import _core

#: Kinds of measurements: a small all_reduce that was posted right behind large ones; two blocks
#: that were packed into one message and put back; an all_reduce of one shot, several that were
#: posted together, and one that was posted right behind a large one.
BUSY, PACKED = "busy", "packed"
ONE_SHOT, SHOTS, SHOT_BUSY = "one_shot", "one_shot_together", "one_shot_busy"

# Of the time that large operations take together. With slots of their own beside them, small ones
# wait for messages only.
_WAITS_FOR_THEM = 0.75
_LONG = 4  # startups that large operations must take for that to show


@dataclass(frozen=True)
class Measured:
    """Groups of operations, each group posted when the one before has ended.

    Attributes:
        kind: "all_reduce", "reduce_scatter" or "all_gather"; or one of the kinds above.
        window: Operations in a group; if `SHOT_BUSY`, without the large one.
        bytes: Payload of a group; if `BUSY`, of the large ones; if `SHOT_BUSY`, of the small one.
        seconds: Mean time of a group; if `BUSY` or `SHOT_BUSY`, of the small one; if `PACKED`, of
            the copies.
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
        if row.kind not in (BUSY, PACKED, ONE_SHOT, SHOTS, SHOT_BUSY):
            samples[row.kind, row.window][row.bytes].append(row.seconds)
    lines = []
    for (kind, window), by_size in samples.items():
        cost, residual = _core.fit_cost([(b, s) for b, times in by_size.items() for s in times])
        points = [_point(size, by_size[size], cost) for size in sorted(by_size)]
        lines.append(Line(kind, window, cost, residual, points))
    return lines


def concurrent(rows: Sequence[Measured]) -> int | None:
    """How many operations run at once; 0 if as many as were tried, None if it cannot be told.

    Behind so many large ones a small one waits until one of them has ended.
    """
    by_size: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        if row.kind == BUSY:
            by_size[row.window, row.bytes].append(row.seconds)
    if not by_size:
        return None
    costs = [line.cost for line in fit_lines(rows) if line.kind == "all_reduce"]
    alpha = max(cost.alpha_s for cost in costs)
    beta = min(cost.beta_s_per_byte for cost in costs)
    for (window, size), seconds in sorted(by_size.items()):
        if beta * size < _LONG * alpha:
            return None
        if float(np.median(seconds)) > _WAITS_FOR_THEM * beta * size:
            return window - 1
    return 0


def fit(ranks: int, rows: Sequence[Measured]) -> _core.NetworkModel:
    """What the measurements say; a window that was not measured costs what the next does."""
    by_kind: dict[str, dict[int, _core.AlphaBeta]] = defaultdict(dict)
    for line in fit_lines(rows):
        by_kind[line.kind][line.window] = line.cost
    costs = {
        kind: [by_window[min(w for w in by_window if w >= k)] for k in range(1, max(by_window) + 1)]
        for kind, by_window in by_kind.items()
    }
    together = concurrent(rows)
    beside = [row.seconds for row in rows if row.kind == BUSY and row.window == 2]
    packing = [row.seconds / row.bytes for row in rows if row.kind == PACKED]
    return _core.NetworkModel(
        ranks,
        costs["all_reduce"],
        costs.get("reduce_scatter", []),
        costs.get("all_gather", []),
        together or 0,
        float(np.median(beside)) if together not in (None, 1) else 0.0,
        float(np.median(packing)) if packing else 0.0,
        _one_shot(rows),
    )


def _one_shot(rows: Sequence[Measured]) -> _core.OneShot:
    seconds: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        seconds[row.kind].append(row.seconds)
    if not seconds[ONE_SHOT]:
        return _core.OneShot()
    first_s, all_s, busy_s = (
        float(np.median(seconds[kind])) for kind in (ONE_SHOT, SHOTS, SHOT_BUSY)
    )
    [most_bytes] = {row.bytes for row in rows if row.kind == ONE_SHOT}
    [together] = {row.window for row in rows if row.kind == SHOTS}
    gap_s = max(all_s - first_s, 0.0) / (together - 1)
    return _core.OneShot(most_bytes, first_s, gap_s, busy_s)


def _point(size: int, times: Sequence[float], cost: _core.AlphaBeta) -> Point:
    low, middle, high = (float(t) for t in np.percentile(times, [10, 50, 90]))
    return Point(size, middle, low, high, cost.time_s(size) / max(middle, 1e-12) - 1)

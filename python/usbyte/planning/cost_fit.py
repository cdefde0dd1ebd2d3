# SPDX-License-Identifier: Apache-2.0
"""Fits cost lines to timed collectives, and tells how well the lines fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from usbyte import _core

#: Kinds of measurements besides the collectives. `BUSY`: a small all_reduce posted right behind
#: large ones. `PACKED`: copies of two blocks into one message and back.
BUSY, PACKED = "busy", "packed"
#: Kinds for the direct all-reduce: a single one, several posted together, and one posted right
#: behind a large all_reduce.
ONE_SHOT, SHOTS, SHOT_BUSY = "one_shot", "one_shot_together", "one_shot_busy"

# A small op behind large ones that takes more than this share of their common time waited until one
# of them had ended. If all of them can run at once, it waits for single messages only.
_WAITS_FOR_THEM = 0.75
_LONG = 4  # The large ops must take at least this many startups for the wait to show.


@dataclass(frozen=True)
class Measured:
    """The mean time of a batch of ops. A batch is posted when the one before it has ended.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather" or one of the kinds above.
        window: Ops in a batch. `SHOT_BUSY`: without the large one.
        bytes: Payload of a batch. `BUSY`: of the large ops. `SHOT_BUSY`: of the small op.
        seconds: Mean time of a batch. `BUSY` and `SHOT_BUSY`: of the small op. `PACKED`: of the
            copies.
    """

    kind: str
    window: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """The measurements of one payload size.

    Attributes:
        bytes: Payload of a batch.
        seconds: Median time of a batch.
        low_s: 10th percentile of the time.
        high_s: 90th percentile of the time.
        residual: (time on the cost line - median) / median; negative where the line is below.
    """

    bytes: int
    seconds: float
    low_s: float
    high_s: float
    residual: float


@dataclass(frozen=True)
class Line:
    """The cost line of one collective with `window` ops in flight.

    Attributes:
        kind: The collective.
        window: Ops in flight.
        cost: The cost line.
        residual: Median over the sizes of the absolute residuals.
        points: The measurements, by ascending size.
    """

    kind: str
    window: int
    cost: _core.AlphaBeta
    residual: float
    points: Sequence[Point]


def fit_lines(rows: Sequence[Measured]) -> list[Line]:
    """Fits a cost line to each collective and window, in order of measurement."""
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
    """Returns how many ops the network runs at the same time.

    A small op that is posted behind n large ones tells: if n is the limit, it waits until one of
    them has ended.

    Returns:
        The limit; 0 if all ops that were tried ran at once; None if the measurements cannot tell,
        since there are none of kind `BUSY` or their large ops are too short.
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
    """Fits a network model to the measurements.

    A window that was not measured gets the cost of the next larger window that was.

    Args:
        ranks: Ranks of the network.
        rows: Measurements; all_reduce must be among them, other kinds may be absent.
    """
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

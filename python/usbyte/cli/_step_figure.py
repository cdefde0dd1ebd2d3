# SPDX-License-Identifier: Apache-2.0
"""The picture of `usbyte simulate`: steps of the policies over workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from usbyte._util import units
from usbyte.cli._figures import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from usbyte.cli._case import Case

_BOUND = "bound"
_OTHERS = 2  # More names than these, the bound, auto and DDP would not be told apart.
_GAP = 0.075  # Least distance of two names, as a share of a panel's height.
_GREY = "#c4c4c4"


class _Line(NamedTuple):
    """One line of a panel: its name, and milliseconds of a step by workers."""

    name: str
    steps_ms: Mapping[int, float]

    @property
    def end_ms(self) -> float:
        """The value at the right end."""
        return self.steps_ms[max(self.steps_ms)]


def steps_by_workers(cases: Sequence[Case]) -> Figure:
    """Draws steps over workers, with a row of panels for each model and a column per bandwidth.

    Of each panel, the bound, auto, DDP and the two best other policies have names. They determine
    the range of the step axis. All others are grey, and those that are too slow leave the panel.
    """
    models = list(dict.fromkeys(case.model for case in cases))
    rates = list(dict.fromkeys(case.bandwidth_bytes_per_s for case in cases))
    figure = Figure(figsize=(5.6 * len(rates), 3.4 * len(models) + 0.3), layout="constrained")
    panels = figure.subplots(len(models), len(rates), squeeze=False)
    colours: dict[str, str] = {}
    greys = 0
    for row, model in zip(panels, models, strict=True):
        for panel, rate in zip(row, rates, strict=True):
            here = [c for c in cases if c.model == model and c.bandwidth_bytes_per_s == rate]
            greys = _draw(panel, here, colours)
            by = "" if here[0].codec == "none" else f" by {here[0].codec}"
            panel.set_title(f"{model}{by}, {units.format_rate(rate)}", parse_math=False)
    caption = []
    if greys:
        caption.append(f"grey: all other policies ({greys}), as far as the axis reaches")
    if any(case.spec == "backward:ddp" for case in cases):
        caption.append("backward:ddp is PyTorch DDP")
    figure.supxlabel("; ".join(caption), fontsize=8, color="#707070")
    return figure


def _draw(panel: Axes, cases: Sequence[Case], colours: dict[str, str]) -> int:
    """Draws one panel; returns the number of its grey lines.

    Args:
        panel: The panel.
        cases: Its predictions.
        colours: Colours of names in all panels, to which new names are added.
    """
    workers = sorted({case.workers for case in cases})
    bound = _Line(
        _BOUND, {n: 1e3 * min(c.bound_s for c in cases if c.workers == n) for n in workers}
    )
    lines = [
        _Line(spec, {c.workers: 1e3 * c.step_s for c in cases if c.spec == spec})
        for spec in dict.fromkeys(case.spec for case in cases)
    ]
    auto, ddp = _of(cases, "auto", "auto"), _of(cases, "ddp", "backward:ddp")
    others = [line for line in lines if line.name not in (auto, ddp)]
    others.sort(key=lambda line: _above(line, bound))  # Of equal ones, the first in the table.
    named = [line for line in lines if line.name in (auto, ddp)] + others[:_OTHERS]
    for line in others[_OTHERS:]:
        panel.plot(workers, _values(line, workers), color=_GREY, lw=0.8, zorder=1)
    for line in named:
        colour = colours.setdefault(line.name, f"C{len(colours) % 10}")
        # The line of auto is wide and below the others, so that none of two equal ones is hidden.
        width, zorder = (4, 2) if line.name == auto else (1.5, 3)
        panel.plot(
            workers, _values(line, workers), marker="o", ms=width + 2, lw=width, color=colour,
            zorder=zorder, label=line.name,
        )  # fmt: skip
    panel.plot(
        workers, _values(bound, workers), ":", marker=".", ms=4, color="black", lw=1.5, zorder=4,
        label=_BOUND,
    )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_xticks(workers, [str(n) for n in workers])
    panel.ticklabel_format(axis="y", useOffset=False)
    panel.set_xlabel("workers")
    panel.set_ylabel("ms of a step")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)
    _cut(panel, [*named, bound])
    _name(panel, [*named, bound], colours, auto)
    return len(others[_OTHERS:])


def _of(cases: Sequence[Case], policy: str, preferred: str) -> str:
    """Returns the spec of a policy, the preferred one if there are several, or ""."""
    specs = dict.fromkeys(case.spec for case in cases if case.policy == policy)
    return min(specs, key=lambda spec: spec != preferred, default="")


def _above(line: _Line, bound: _Line) -> float:
    """Returns the mean over the workers of log(step / bound)."""
    return fmean(math.log(step_ms / bound.steps_ms[n]) for n, step_ms in line.steps_ms.items())


def _values(line: _Line, workers: Sequence[int]) -> list[float]:
    return [line.steps_ms[n] for n in workers]


def _cut(panel: Axes, named: Sequence[_Line]) -> None:
    """Lets the lines with names fill the step axis."""
    values = [step_ms for line in named for step_ms in line.steps_ms.values()]
    low, high = min(values), max(values)
    margin = 0.06 * max(high - low, 1e-3 * high)  # Of equal lines, no rounding error is shown.
    panel.set_ylim(low - margin, high + margin)


def _name(panel: Axes, named: Sequence[_Line], colours: Mapping[str, str], auto: str) -> None:
    """Writes the names behind the lines' ends, as near to them as they do not overlap."""
    low, high = panel.get_ylim()
    # Of equal ends, the bound is the lowest.
    lines = sorted(named, key=lambda line: (line.end_ms, line.name != _BOUND))
    heights = _apart([(line.end_ms - low) / (high - low) for line in lines])
    for line, height in zip(lines, heights, strict=True):
        colour = colours.get(line.name, "black")
        panel.annotate(
            line.name, (max(line.steps_ms), line.end_ms), (1.03, height),
            textcoords="axes fraction", va="center", fontsize=9, color=colour, parse_math=False,
            fontweight="bold" if line.name == auto else "normal",
            arrowprops={
                "arrowstyle": "-", "color": colour, "lw": 0.6, "relpos": (0, 0.5), "shrinkA": 1,
                "shrinkB": 4,
            },
        )  # fmt: skip


def _apart(heights: Sequence[float]) -> list[float]:
    """Returns the nearest heights, by least squares, that are `_GAP` apart and from 0 to 1.

    Args:
        heights: Ascending heights, few enough for one panel.
    """
    # Less the gaps below them, the heights need only ascend: adjacent ones that do not are pooled.
    pools: list[list[float]] = []
    for i, height in enumerate(heights):
        pools.append([height - i * _GAP])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    highest = 1 - (len(heights) - 1) * _GAP
    free = [min(max(fmean(pool), 0.0), highest) for pool in pools for _ in pool]
    return [height + i * _GAP for i, height in enumerate(free)]

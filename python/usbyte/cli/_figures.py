# SPDX-License-Identifier: Apache-2.0
"""Pictures of the commands, drawn by matplotlib without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import click

from usbyte._util import files, units

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter
except ImportError as missing:
    raise click.ClickException(
        f"pictures need matplotlib ({missing}); install it with: pip install 'usbyte[plot]'"
    ) from missing

if TYPE_CHECKING:
    from usbyte.planning.cost_fit import Line
    from usbyte.planning.whatif import Outcome, Point


def check_format(path: Path) -> None:
    """Raises ClickException if matplotlib cannot write the format; call it before long work."""
    known = ["html", *Figure().canvas.get_supported_filetypes()]
    if _format(path) not in known:
        raise click.ClickException(
            f"cannot write '{path}': unknown picture format; name a file that ends "
            f"with one of {', '.join(f'.{kind}' for kind in sorted(known))}"
        )


def _format(path: Path) -> str:
    return path.suffix[1:].lower() or "png"


def save(figure: Figure, path: Path) -> None:
    """Writes the picture in the format of the file name's suffix; .html is a page with an SVG."""
    drawn = io.BytesIO()
    try:
        if _format(path) == "html":
            figure.savefig(drawn, format="svg")
            page = f'<!doctype html>\n<meta charset="utf-8">\n<title>{escape(path.stem)}</title>\n'
            picture = page.encode() + drawn.getvalue()[drawn.getvalue().index(b"<svg") :]
        else:
            figure.savefig(drawn, dpi=150, format=_format(path))
            picture = drawn.getvalue()
        files.write_bytes(path, picture)
    except (OSError, ValueError) as error:
        raise click.ClickException(
            f"cannot write '{path}': {error}; name a file such as picture.png in a folder that is "
            "writable"
        ) from error


def scaling_by_bandwidth(found: Sequence[tuple[str, Sequence[Point]]]) -> Figure:
    """Draws scaling factors, and below them the ratios that the target needs.

    There is a column for each model. An infinite ratio has no point.
    """
    figure = Figure(figsize=(4.6 * len(found) + 1.8, 6.4), layout="constrained")
    panels = figure.subplots(2, len(found), squeeze=False, sharex="col", sharey="row")
    names = {"ddp": ("DDP", "--"), "plan": ("auto", "-"), "bound": ("bound", ":")}
    for (upper, lower), (model, points) in zip(panels.T, found, strict=True):
        for k, ranks in enumerate(dict.fromkeys(point.ranks for point in points)):
            here = sorted(
                (point for point in points if point.ranks == ranks),
                key=lambda point: point.bandwidth_bytes_per_s,
            )
            rates = [point.bandwidth_bytes_per_s for point in here]
            for schedule, (name, style) in names.items():
                outcomes: list[Outcome] = [getattr(point, schedule) for point in here]
                look = {"marker": "o", "ms": 3, "color": f"C{k}", "label": f"{name}, {ranks} ranks"}
                upper.plot(rates, [outcome.scaling for outcome in outcomes], style, **look)
                lower.plot(rates, [outcome.ratio for outcome in outcomes], style, **look)
        goal = f"{points[0].target:g} of linear"
        upper.axhline(points[0].target, color="grey", lw=0.8)
        upper.set_ylim(0, 1.03)
        title = f"{model}\nscaling; grey: the target, {goal}"
        upper.set_title(title, parse_math=False, fontsize=10)
        lower.set_title(f"needed: how many times fewer bytes reach {goal}", fontsize=10)
        lower.set_xscale("log")
        lower.set_yscale("log", base=2)
        lower.yaxis.set_major_formatter("{x:g}")
        # By name, as the same rate on other numbers of ranks may differ by a rounding error.
        ticks = {point.rate: point.bandwidth_bytes_per_s for point in points}
        lower.set_xticks(list(ticks.values()), list(ticks), rotation=30)
        lower.set_xticks([], minor=True)
        upper.grid(alpha=0.3)
        lower.grid(alpha=0.3)
    panels[0][0].set_ylabel("step without communication / step")
    panels[1][0].set_ylabel("times fewer bytes needed, at least")
    outcomes = [o for _, points in found for p in points for o in (p.ddp, p.plan, p.bound)]
    if any(outcome.ratio == math.inf for outcome in outcomes):
        caption = "no point: no compression is enough, as the startups alone take too long"
        figure.supxlabel(caption, fontsize=8, color="#707070")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    return figure


def costs(lines: Sequence[Line]) -> Figure:
    """Draws measured times with their spread and the cost lines, in one panel per collective."""
    kinds = list(dict.fromkeys(line.kind for line in lines))
    figure = Figure(figsize=(4.2 * len(kinds) + 0.6, 3.8), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        for k, line in enumerate(line for line in lines if line.kind == kind):
            sizes = [p.bytes for p in line.points]
            middle = [p.seconds * 1e3 for p in line.points]
            below = [(p.seconds - p.low_s) * 1e3 for p in line.points]
            above = [(p.high_s - p.seconds) * 1e3 for p in line.points]
            panel.errorbar(
                sizes, middle, yerr=(below, above), fmt="o", ms=4, capsize=2, color=f"C{k}",
                label=f"{line.window} in flight, residual {line.residual:.0%}",
            )  # fmt: skip
            fitted = [(size, line.cost.time_s(size) * 1e3) for size in _between(sizes)]
            panel.plot(*zip(*fitted, strict=True), color=f"C{k}", lw=1)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_locator(LogLocator(4))
        panel.xaxis.set_major_formatter(lambda size, _: units.format_bytes(size))
        panel.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g} ms")
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.tick_params(labelsize=8)
        panel.set_title(kind)
        panel.set_xlabel("size of all operations in flight")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("time: median, 10th to 90th percentile, fit")
    return figure


def _between(sizes: Sequence[int]) -> list[int]:
    """Returns 61 sizes from the least to the largest, for a smooth curve."""
    ratio = max(sizes) / min(sizes)
    return [round(min(sizes) * ratio ** (k / 60)) for k in range(61)]

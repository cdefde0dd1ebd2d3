# SPDX-License-Identifier: Apache-2.0
"""The timeline of a plan as a picture, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from usbyte._util import units
from usbyte.report.scene import Bar, Scene

_COLOURS = {"forward": "#8fb8de", "backward": "#4f81b5", "wait": "#d64545", "update": "#3d9a68"}
_IN_FLIGHT = "#8b9099"
_LEGEND = {
    "forward": _COLOURS["forward"],
    "backward": _COLOURS["backward"],
    "waiting for the network": _COLOURS["wait"],
    "collective in flight": _IN_FLIGHT,
}


def timeline(scene: Scene) -> Figure:
    """Draws the lanes of a report, one below the other."""
    lanes = scene.lanes
    rows = sum(len(lane.rows) + 1 for lane in lanes)
    figure = Figure(figsize=(12.0, 1.6 + 0.2 * rows), layout="constrained")
    panel = figure.subplots()
    names, middles, top = [], [], 0.0
    for lane in lanes:
        for row in lane.rows:
            colours = [
                _COLOURS.get(b.kind, _IN_FLIGHT) if b.op is None else scene.colour(b.op)
                for b in row
            ]
            # A minimum length, since matplotlib does not draw a bar of length 0.
            spans = [(b.start_s * 1e3, max(b.end_s - b.start_s, 1e-5) * 1e3) for b in row]
            panel.broken_barh(spans, (top, 0.85), color=colours, edgecolor="white", linewidth=0.3)
            top += 1
        names.append(f"{lane.name}, {lane.side}")
        middles.append(top - len(lane.rows) / 2)
        top += 1
    panel.axvline(scene.profile.backward_end_s * 1e3, color="grey", linestyle=":")
    panel.set_ylim(top, -0.5)
    panel.set_yticks(middles, names)
    panel.set_xlim(*(time_s * 1e3 for time_s in scene.span_s))
    panel.set_xlabel("ms since the forward pass began; the dotted line is the end of backward")
    measured = scene.measured.step_s if scene.measured is not None else None
    text = f"{scene.profile.model or 'job'}, {scene.plan.policy}: step predicted "
    text += f"{scene.prediction.step_s * 1e3:.2f} ms"
    text += f", measured {measured * 1e3:.2f} ms" if measured is not None else ""
    text += f", bound {scene.bound_s * 1e3:.2f} ms"
    panel.set_title(text, loc="left", fontsize=10, parse_math=False)  # Names may have dollars.
    return figure


def comparison(baseline: Scene, scene: Scene, title: str) -> Figure:
    """Draws the predicted steps of DDP and of a plan, one below the other on one time axis."""
    figure = Figure(figsize=(9.0, 3.9), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    ddp_s, step_s = baseline.prediction.step_s, scene.prediction.step_s
    names = (
        f"PyTorch DDP: {units.format_seconds(ddp_s)} a step",
        f"usbyte: {units.format_seconds(step_s)} a step, {ddp_s / step_s:.2f} times as fast",
    )
    for panel, shown, name in zip(panels, (baseline, scene), names, strict=True):
        _two_rows(panel, shown)
        panel.set_title(name, loc="left", fontsize=11, fontweight="bold")
    # Shows some of the next forward pass in both.
    panels[-1].set_xlim(0, max(1.15 * ddp_s, scene.span_s[1]) * 1e3)
    panels[-1].set_xlabel("ms")
    figure.suptitle(title, fontsize=9, parse_math=False)
    patches = [Patch(color=colour, label=label) for label, colour in _LEGEND.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _two_rows(panel: Axes, scene: Scene) -> None:
    """Draws what the accelerator and the network do."""
    rows: dict[str, list[Bar]] = {"compute": [], "network": []}
    for lane in scene.lanes:
        for bar in (bar for row in lane.rows for bar in row if lane.side == "predicted"):
            rows["network" if bar.kind == "op" else "compute"].append(bar)
    if scene.overlap == "backward":  # The next forward pass begins with the next step.
        step_s = scene.prediction.step_s
        rows["compute"] += [
            replace(bar, start_s=bar.start_s + step_s, end_s=bar.end_s + step_s)
            for bar in rows["compute"]
            if bar.kind == "forward"
        ]
    for place, bars in enumerate(rows.values()):
        # Waits last, so that nothing hides them.
        for kind in ("forward", "backward", "op", "wait"):
            colour = _IN_FLIGHT if kind == "op" else _COLOURS[kind]
            spans = _merged((b.start_s, b.end_s) for b in bars if b.kind == kind)
            panel.broken_barh(spans, (place, 0.8), color=colour, linewidth=0)
    panel.set_yticks([0.4, 1.4], list(rows))
    panel.set_ylim(1.9, -0.1)
    panel.tick_params(left=False)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns start and length, in ms, of the union of the spans (start and end in s)."""
    found: list[list[float]] = []
    for start_s, end_s in sorted(spans):
        if found and start_s <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end_s)
        else:
            found.append([start_s, end_s])
    return [(start_s * 1e3, (end_s - start_s) * 1e3) for start_s, end_s in found]

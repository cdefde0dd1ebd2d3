# SPDX-License-Identifier: Apache-2.0
"""The timeline of a plan as a picture, drawn by matplotlib."""

from __future__ import annotations

from matplotlib.figure import Figure

from usbyte.cli.report.scene import Scene

_COLOURS = {"forward": "#8fb8de", "backward": "#4f81b5", "wait": "#d64545", "update": "#3d9a68"}


def timeline(scene: Scene) -> Figure:
    """Draws the lanes of a report, one below the other."""
    lanes = scene.lanes
    rows = sum(len(lane.rows) + 1 for lane in lanes)
    figure = Figure(figsize=(12.0, 1.6 + 0.2 * rows), layout="constrained")
    panel = figure.subplots()
    names, middles, top = [], [], 0.0
    for lane in lanes:
        for row in lane.rows:
            colours = [_COLOURS[b.kind] if b.op is None else scene.colour(b.op) for b in row]
            # A minimum length, since matplotlib does not draw a bar of length 0.
            spans = [(b.start_s * 1e3, max(b.end_s - b.start_s, 1e-5) * 1e3) for b in row]
            panel.broken_barh(spans, (top, 0.85), color=colours, edgecolor="white", linewidth=0.3)
            top += 1
        names.append(f"{lane.name}, {'measured' if lane.measured else 'predicted'}")
        middles.append(top - len(lane.rows) / 2)
        top += 1
    panel.axvline(scene.profile.backward_end_s * 1e3, color="grey", linestyle=":")
    panel.set_ylim(top, -0.5)
    panel.set_yticks(middles, names)
    panel.set_xlim(0, scene.end_s * 1e3)
    panel.set_xlabel("ms since the forward pass began; the dotted line is the end of backward")
    measured = scene.measured.step_s if scene.measured is not None else None
    text = f"{scene.profile.model or 'job'}, {scene.plan.policy}: step predicted "
    text += f"{scene.prediction.step_s * 1e3:.2f} ms"
    text += f", measured {measured * 1e3:.2f} ms" if measured is not None else ""
    text += f", bound {scene.bound_s * 1e3:.2f} ms"
    panel.set_title(text, loc="left", fontsize=10, parse_math=False)  # Names may have dollars.
    return figure

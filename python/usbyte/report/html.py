# SPDX-License-Identifier: Apache-2.0
"""Renders a report as one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from importlib import resources
from string import Template
from typing import NamedTuple

from usbyte._util.units import format_cost
from usbyte.report.scene import Bar, Lane, Scene

_ROW, _GAP, _AXIS = 18, 10, 26  # Heights in pixels: row, gap between lanes, axis at the top.
_NUMBERED = 0.012  # Bars wider than this share of the page show the number of their op.


def render(scene: Scene) -> str:
    """Returns the text of the page."""
    lanes = scene.lanes
    tops, height = [], _AXIS
    for lane in lanes:
        tops.append(height)
        height += _ROW * len(lane.rows) + _GAP
    source = resources.files("usbyte.report").joinpath("report.html")
    template = Template(source.read_text("utf-8"))
    return template.substitute(
        title=escape(f"{scene.profile.model or 'job'}: {scene.plan.policy}"),
        facts="\n".join(
            f'<div><dt>{escape(name)}</dt><dd id="{key}"{css}>{escape(value)}</dd></div>'
            for key, name, value, css in _facts(scene)
        ),
        note=escape(_note(scene)),
        names=_names(lanes, tops, height),
        drawing=_drawing(scene, lanes, tops, height),
        head=_head(scene),
        rows="\n".join(_table_row(scene, i) for i in range(len(scene.ops))),
        sparse=_sparse_table(scene),
    )


def _facts(scene: Scene) -> Iterator[tuple[str, str, str, str]]:
    line = scene.network.all_reduce[0]
    main = ' class="main"'
    yield "step", "predicted step", _ms(scene.prediction.step_s), main
    if scene.measured is not None and scene.measured.step_s is not None:
        yield "measured", "measured step", _ms(scene.measured.step_s), main
    yield "bound", "bound", _ms(scene.bound_s), main
    if scene.baseline is not None:
        ddp_s = scene.baseline.prediction.step_s
        yield "ddp", "DDP, best bucket size, predicted", _ms(ddp_s), ""
    yield "bytes-bound", "bound of bytes", _ms(scene.bytes_bound_s), ""
    yield "compute", "without communication", _ms(scene.profile.iteration_s), ""
    yield "overlap", "overlap", scene.overlap, ""
    if scene.sharded:
        yield "sharded", "optimizer", "sharded", ""
    yield "bytes", "gradients", f"{scene.profile.bytes / 1e6:.4g} MB", ""
    yield "ops-count", "operations", str(len(scene.ops)), ""
    yield "ranks", "ranks", str(scene.network.ranks), ""
    cost = format_cost(line.alpha_s, line.beta_s_per_byte, line.overlap_s)
    yield "network", "all_reduce", cost, ""


def _note(scene: Scene) -> str:
    text = (
        "Time runs from the beginning of a forward pass. Light blue is forward, dark blue "
        "backward, red waiting for the network. The colour of an operation says how early the "
        "forward pass needs it, from red to blue; operations of DDP are grey. The bound is the "
        "step time that no plan without codecs can beat; the bound of bytes leaves startups out."
    )
    if scene.measured is not None:
        text += (
            f" The measured step is step {scene.measured.step}, shifted so that the gradients of "
            "the first operation are complete at the predicted time."
        )
    return text


def _names(lanes: list[Lane], tops: list[int], height: int) -> str:
    parts = [f'<svg height="{height}">']
    for lane, top in zip(lanes, tops, strict=True):
        parts.append(f'<text x="8" y="{top + 13}">{lane.name}</text>')
        parts.append(f'<text class="side" x="80" y="{top + 13}">{lane.side}</text>')
    return "".join([*parts, "</svg>"])


def _drawing(scene: Scene, lanes: list[Lane], tops: list[int], height: int) -> str:
    axis = _Axis(*scene.span_s)
    parts = [f'<svg id="timeline" width="100%" height="{height}">']
    for i, (lane, top) in enumerate(zip(lanes, tops, strict=True)):
        if i % 2:
            tall = _ROW * len(lane.rows) + _GAP
            parts.append(
                f'<rect class="stripe" y="{top - _GAP / 2}" width="100%" height="{tall}"/>'
            )
    parts += _grid(scene, axis, height)
    for lane, top in zip(lanes, tops, strict=True):
        parts.append(f'<g class="lane {lane.name.replace(" ", "-")} {lane.side}">')
        for r, row in enumerate(lane.rows):
            for bar in row:
                parts += _bar(scene, bar, top + r * _ROW, axis)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


class _Axis(NamedTuple):
    """The time axis, from left to right."""

    begin_s: float
    end_s: float

    def percent(self, time_s: float) -> float:
        """Returns the place of a time, in percent of the width."""
        return 100 * (time_s - self.begin_s) / (self.end_s - self.begin_s)


def _grid(scene: Scene, axis: _Axis, height: int) -> Iterator[str]:
    step = _tick(axis.end_s - axis.begin_s)
    for k in range(math.ceil(axis.begin_s / step), math.floor(axis.end_s / step) + 1):
        place = axis.percent(k * step)
        x = f"{place:.4f}%"
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{_AXIS - 8}" y2="{height}"/>'
        if place < 95:  # A label further right would be cut off.
            yield f'<text class="tick" x="{x}" y="12" dx="3">{k * step * 1e3:g} ms</text>'
    x = f"{axis.percent(scene.profile.backward_end_s):.4f}%"
    yield f'<line class="mark" x1="{x}" x2="{x}" y1="{_AXIS - 8}" y2="{height}">'
    yield "<title>backward ends</title></line>"


def _tick(length_s: float) -> float:
    """Returns a round number of seconds, such that an axis of `length_s` has about ten ticks."""
    power = 1e-9
    while True:
        for digit in (1, 2, 5):
            if digit * power * 12 >= length_s:
                return digit * power
        power *= 10


def _bar(scene: Scene, bar: Bar, top: int, axis: _Axis) -> Iterator[str]:
    x = axis.percent(bar.start_s)
    width = axis.percent(bar.end_s) - x
    extra = "" if bar.op is None else f' data-op="{bar.op}" fill="{scene.colour(bar.op)}"'
    place = f'x="{x:.4f}%" y="{top}" width="{max(width, 0.02):.4f}%" height="{_ROW - 2}"'
    yield f'<rect class="bar {bar.kind}"{extra} {place}><title>{escape(bar.tip)}</title></rect>'
    if bar.op is not None and width > 100 * _NUMBERED:
        yield f'<text class="number" x="{x:.4f}%" y="{top + 12}" dx="3">{bar.op}</text>'


def _head(scene: Scene) -> str:
    columns = ["op", "kind", "MB", "launched ms", "done ms"]
    if scene.measured is not None:
        columns += ["measured launched", "done"]
    cells = "".join(f"<th>{column}</th>" for column in columns)
    return f'<tr>{cells}<th class="text">tensors</th></tr>'


def _table_row(scene: Scene, i: int) -> str:
    spans = [scene.spans[i]]
    spans += [scene.measured.flights[i]] if scene.measured is not None else []
    cells = [str(i), escape(scene.op_kind(i)), f"{scene.plan.bytes(scene.ops[i]) / 1e6:.3f}"]
    cells += [f"{time_s * 1e3:.2f}" for span in spans for time_s in span]
    names = scene.op_tensors(i)
    text = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr data-op="{i}">{text}<td class="text">{escape(names)}</td></tr>'


def _sparse_table(scene: Scene) -> str:
    """Returns a table about sparse gradients in the measured step; "" if there are none."""
    sums = scene.measured.sums if scene.measured is not None else {}
    if not sums:
        return ""
    columns = ["op", "scheme", "rows", "density %", "of the sum %", "gamma", "skew", "push", "pull"]
    columns += ["sent MB", "received MB"]
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = []
    for i, values in sorted(sums.items()):
        op, names = scene.ops[i], scene.op_tensors(i)
        if op.sparse:
            scheme, of = op.sparse.scheme, scene.tensors[op.sparse.tensor].rows
        else:
            scheme, of = op.scheme, sum(end - begin for begin, end in op.blocks)
        cells = [
            str(i), scheme, str(of), f"{100 * values['density']:.3g}",
            f"{100 * values['sum_rows'] / of:.3g}",
            *(f"{values[n]:.2f}" for n in ("gamma", "skew", "push_imbalance", "pull_imbalance")),
            *(f"{values[n] / 1e6:.3f}" for n in ("sent_bytes", "received_bytes")),
        ]  # fmt: skip
        text = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr data-op="{i}">{text}<td class="text">{escape(names)}</td></tr>')
    body = "\n".join(rows)
    return (
        "<h2>Sparse gradients, measured</h2>\n<p>Values of this rank. Density: share of its "
        "gradient's rows that are not zero. Gamma: density of the sum over all ranks, divided by "
        "that density. Skew: non-zero rows in the fullest of as many equal row ranges as there are "
        "ranks, divided by their mean. Push, pull: the largest share of one rank, times the number "
        "of ranks.</p>\n"
        f'<table id="sparse"><thead><tr>{head}<th class="text">tensor</th></tr></thead>\n'
        f"<tbody>{body}</tbody></table>"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"

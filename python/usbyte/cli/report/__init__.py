# SPDX-License-Identifier: Apache-2.0
"""`usbyte report`: draws a plan's timeline, predicted and measured, as a page or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from usbyte.cli._codec_options import costs_option, read_costs
from usbyte.cli._options import (
    check_writable,
    network,
    network_options,
    overlap_options,
    read_json,
    scale_options,
    write_text,
)

if TYPE_CHECKING:
    from usbyte import _core


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.argument("plan", type=click.Path(path_type=Path))
@click.argument("profile")
@scale_options
@network_options
@overlap_options
@costs_option
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(path_type=Path),
    help="Timeline of a run of this plan, written by USBYTE_TIMELINE.",
)
@click.option(
    "--step", type=int, show_default="a step of median length", help="Step of the trace to show."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default="report.html", help="HTML page."
)
@click.option("--png", type=click.Path(path_type=Path), help="Also draw a picture (matplotlib).")
def report(
    plan: Path,
    profile: str,
    scale_time: float,
    scale_bytes: float,
    network_path: Path | None,
    ring: _core.NetworkModel | None,
    overlap: str,
    sharded: bool,
    costs_path: Path | None,
    trace_path: Path | None,
    step: int | None,
    output: Path,
    png: Path | None,
) -> None:
    """Draw a plan's timeline, predicted and measured.

    PLAN is a file written by `usbyte plan -o`, PROFILE the profile that it was made from. Give the
    options that both commands have the same values. The page loads nothing from elsewhere. Without
    --trace, it shows only the prediction.
    """
    from usbyte import _core
    from usbyte.cli.report import html, trace
    from usbyte.cli.report.scene import Scene
    from usbyte.planning import profiles

    inputs = [plan, profiles.file_of(profile), network_path, costs_path, trace_path]
    check_writable(output, png, inputs=inputs)
    if png is not None:
        from usbyte.cli import _figures
        from usbyte.cli.report import picture

        _figures.check_format(png)
    if step is not None and trace_path is None:
        raise click.UsageError("--step chooses a step of --trace, which is missing")
    made = read_json(plan, "plan", _core.Plan.from_json)
    whole = profiles.scaled(profiles.load_whole(profile), scale_time, scale_bytes)
    job = profiles.matched(whole, made)
    net, costs = network(network_path, ring), read_costs(costs_path)
    measured = trace.read_trace(trace_path, made, step) if trace_path is not None else None
    aligned = trace.aligned(measured, made, job) if measured is not None else None
    shown = Scene.predicted(made, job, net, overlap, sharded, costs, aligned)
    write_text(output, html.render(shown))
    if png is not None:
        _figures.save(picture.timeline(shown), png)
    click.echo(f"wrote {output}" + (f" and {png}" if png else ""))

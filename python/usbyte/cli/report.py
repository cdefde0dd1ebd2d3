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
@click.argument("profile", required=False)
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
    profile: str | None,
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

    PLAN alone is the timeline of a job (USBYTE_TIMELINE), which tells of its last plan, profile and
    network. Otherwise PLAN is a file written by `usbyte plan -o`, PROFILE the profile that it was
    made from. Give the options that both commands have the same values; without --trace, the page
    shows only the prediction. The page loads nothing from elsewhere.
    """
    from usbyte import _core
    from usbyte.errors import UsageError
    from usbyte.planning import profiles
    from usbyte.report import html, trace
    from usbyte.report.scene import Scene

    named = profiles.file_of(profile) if profile is not None else None
    inputs = [plan, named, network_path, costs_path, trace_path]
    check_writable(output, png, inputs=inputs)
    if png is not None:
        from usbyte.cli import _figures
        from usbyte.report import picture

        _figures.check_format(png)
    costs = read_costs(costs_path)
    if profile is None:
        _refuse_what_the_timeline_tells(trace_path)
        try:
            shown = Scene.of_timeline(plan, step, costs)
        except UsageError as error:
            raise UsageError(f"{error}. For a file of usbyte plan, give PROFILE, too") from error
    else:
        if step is not None and trace_path is None:
            raise click.UsageError("--step chooses a step of --trace, which is missing")
        made = read_json(plan, "plan", _core.Plan.from_json)
        whole = profiles.scaled(profiles.load_whole(profile), scale_time, scale_bytes)
        job, net = profiles.matched(whole, made), network(network_path, ring)
        measured: trace.Measured | None = None
        if trace_path is not None:
            measured = trace.aligned(trace.read_trace(trace_path, made, step), made, job)
        shown = Scene.predicted(made, job, net, overlap, sharded, costs, measured)
    write_text(output, html.render(shown))
    if png is not None:
        _figures.save(picture.timeline(shown), png)
    click.echo(f"wrote {output}" + (f" and {png}" if png else ""))


def _refuse_what_the_timeline_tells(trace_path: Path | None) -> None:
    """Raises UsageError if options say what the timeline in place of a plan says, too."""
    source = click.get_current_context().get_parameter_source
    names = {
        "network_path": "--network", "ring": "--ring", "overlap": "--overlap",
        "sharded": "--shard-optimizer", "scale_time": "--scale-time",
        "scale_bytes": "--scale-bytes",
    }  # fmt: skip
    given = [
        option
        for name, option in names.items()
        if source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if trace_path is not None:
        given.append("--trace")
    if given:
        raise click.UsageError(
            f"a timeline alone tells of plan, profile and network: leave out {', '.join(given)}, "
            "or give PLAN and PROFILE"
        )

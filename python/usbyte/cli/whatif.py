# SPDX-License-Identifier: Apache-2.0
"""`usbyte whatif`: tells whether the network limits a job, and what would help."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from usbyte._util import units
from usbyte.cli._options import (
    SECONDS,
    SERIAL_HELP,
    Parsed,
    check_writable,
    listed,
    parse_workers,
    print_recorded,
    read_network,
    scale_options,
    write_text,
)
from usbyte.cli._tables import for_terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from usbyte import _core
    from usbyte.planning.whatif import Outcome, Point

_RANKS, _BANDWIDTHS, _LATENCY = "2,8,64", "1gbit,10gbit,25gbit,100gbit", "25us"

_NOTE = (
    "Comm.: time of all bytes, divided by that of a step without communication. Scaling: time of "
    "a step without communication, divided by the time of a step; DDP has buckets of 25 MiB. "
    "Gain: step of DDP with its best bucket size, divided by auto's. Bound: what no schedule "
    "beats; of bytes: the same without startups. Needs: how many times fewer bytes reach the "
    "target, if compression takes no time; in practice more is needed. Not by compression: the "
    "startups alone take too long. Bound by compute: DDP reaches the target; by software: the "
    "network could carry all bytes in time, but not in DDP's schedule; by latency: it could "
    "without startups; by network: no schedule reaches the target."
)

_EXAMPLES = """\b
Example:
  usbyte whatif resnet50 --scale-time 0.02 --bandwidth 10gbit,100gbit --ranks 8,64
  usbyte whatif profile.json --network network.json --bandwidth 1gbit,10gbit --plot scaling.svg
"""


@click.command(context_settings={"show_default": True, "max_content_width": 100}, epilog=_EXAMPLES)
@click.argument("profiles", nargs=-1, required=True)
@scale_options
@click.option(
    "--network", "network_path", type=click.Path(path_type=Path), metavar="NETWORK.json",
    help="A measured network; --bandwidth changes its bandwidth and not its startups. Without it, "
    "rings with ideal collectives.",
)  # fmt: skip
@click.option(
    "--ranks", type=Parsed("list", listed(parse_workers)), show_default=_RANKS,
    help="Ranks of the rings, separated by commas.",
)  # fmt: skip
@click.option(
    "--bandwidth", type=Parsed("list", listed(units.parse_rate)),
    show_default=f"the measured one, or {_BANDWIDTHS}",
    help="Bandwidths of a ring's links, separated by commas.",
)  # fmt: skip
@click.option(
    "--latency", type=SECONDS, show_default=_LATENCY, help="Latency of a message on the rings."
)
@click.option("--serial-startups", "serial", is_flag=True, help=f"For the rings. {SERIAL_HELP}")
@click.option("--target", default=0.95, help="The scaling factor to reach; 1 is linear.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path),
    help="Also write JSON; a ratio of null means: not by compression.",
)  # fmt: skip
@click.option(
    "--plot", type=click.Path(path_type=Path),
    help="Also draw a picture: .png, .svg, .html (matplotlib).",
)  # fmt: skip
def whatif(
    profiles: tuple[str, ...],
    scale_time: float,
    scale_bytes: float,
    network_path: Path | None,
    ranks: list[int] | None,
    bandwidth: list[float] | None,
    latency: float | None,
    serial: bool,
    target: float,
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """Tell whether the network is the bottleneck of a job, and what would help.

    PROFILES are as for `usbyte simulate`. For each network, the table has the scaling factors of
    DDP's buckets, of policy auto with overlap forward, and of two bounds, with the startups and of
    the bytes alone. It also has the factor by which DDP and auto would have to reduce the bytes for
    the target, and what limits the job.

    After Zhang et al., "Is Network the Bottleneck of Distributed Training?", 2020.
    """
    from rich.console import Console
    from rich.text import Text

    from usbyte.planning.profiles import file_of, load, scaled
    from usbyte.planning.whatif import advice, examine

    check_writable(json_path, plot, inputs=[*map(file_of, profiles), network_path])
    if plot is not None:
        from usbyte.cli import _figures

        _figures.check_format(plot)
    jobs = [(scaled(load(source), scale_time, scale_bytes), source) for source in profiles]
    networks = _networks(network_path, ranks, bandwidth, latency, serial)
    console = Console(highlight=False)
    found: list[tuple[str, list[Point]]] = []
    for job, source in jobs:
        model = job.model or Path(source).stem
        points: list[Point] = []
        for network in networks:
            with console.status(Text(f"{model}: {len(points)} of {len(networks)} networks")):
                points.append(examine(job, network, target))
        found.append((model, points))
        console.print(_table(model, points))
        console.print(f"{model}: {advice(points)}", markup=False, soft_wrap=True)
    console.print(_NOTE, style="dim")
    print_recorded(console, profiles, scale_time)
    if json_path is not None:
        write_text(json_path, _json(found))
    if plot is not None:
        _figures.save(_figures.scaling_by_bandwidth(found), plot)


def _networks(
    path: Path | None,
    ranks: list[int] | None,
    bandwidths: list[float] | None,
    latency_s: float | None,
    serial: bool,
) -> list[_core.NetworkModel]:
    from usbyte import _core
    from usbyte.planning.whatif import at_bandwidth

    if path is None:
        if latency_s is None:
            latency_s = units.parse_seconds(_LATENCY)
        return [
            _core.NetworkModel.ring(count, latency_s, rate, int(serial))
            for count in ranks or listed(parse_workers)(_RANKS)
            for rate in bandwidths or listed(units.parse_rate)(_BANDWIDTHS)
        ]
    if ranks is not None or latency_s is not None or serial:
        raise click.UsageError(
            "--ranks, --latency and --serial-startups are for rings; a measured network has its "
            "own, so give only --bandwidth with --network"
        )
    measured = read_network(path)
    return [at_bandwidth(measured, rate) for rate in bandwidths] if bandwidths else [measured]


def _table(model: str, points: Sequence[Point]) -> RenderableType:
    rows = [
        [
            str(point.ranks),
            point.rate,
            f"{point.communication:.2f}",
            *(
                f"{outcome.scaling:.3f}"
                for outcome in (point.ddp, point.plan, point.bound, point.bytes_bound)
            ),
            f"{point.gain:.2f}x",
            *(_needed(outcome) for outcome in (point.ddp, point.plan)),
            point.verdict.removesuffix(" bound"),
        ]
        for point in points
    ]
    first = points[0]
    title = (
        f"{model}: scaling, {units.format_seconds(first.compute_s)} without communication, target "
        f"{first.target:g}"
    )
    columns = [
        "ranks", "link", "comm.", "DDP", "auto", "bound", "of bytes", "gain", "DDP needs",
        "auto needs", "bound by",
    ]  # fmt: skip
    return for_terminal(title, columns, rows, ("bound by",))


def _needed(outcome: Outcome) -> str:
    from usbyte.planning.whatif import format_ratio

    if outcome.ratio == 1:
        return "none"
    return "not by compression" if outcome.ratio == math.inf else format_ratio(outcome.ratio)


def _json(found: Sequence[tuple[str, Sequence[Point]]]) -> str:
    from usbyte.planning.whatif import advice

    def row(point: Point) -> dict[str, Any]:
        values = asdict(point) | {"verdict": point.verdict}
        for schedule in ("ddp", "plan", "bound", "bytes_bound"):
            if values[schedule]["ratio"] == math.inf:
                values[schedule]["ratio"] = None  # JSON has no infinity.
        if values["communication"] == math.inf:
            values["communication"] = None
        return values

    root = [
        {"model": model, "advice": advice(points), "points": [row(point) for point in points]}
        for model, points in found
    ]
    return json.dumps(root, indent=1, allow_nan=False) + "\n"

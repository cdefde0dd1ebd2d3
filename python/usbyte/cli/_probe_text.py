# SPDX-License-Identifier: Apache-2.0
"""The tables and sentences by which `usbyte probe` tells of a network."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from usbyte._util import units

if TYPE_CHECKING:
    from rich.table import Table

    from usbyte import _core
    from usbyte.planning.cost_fit import Line

_EXAMPLE_BYTES = 100_000_000  # Gradients of 25 million parameters, about those of ResNet-50.


def in_words(network: _core.NetworkModel, json_path: Path | None) -> str:
    """Says what a network carries, what an all_reduce costs there, and what to do next.

    Args:
        network: The fitted network model.
        json_path: The file to which it was written; None if it was not.
    """
    from usbyte.planning.whatif import bus_bandwidth

    start = units.spoken_seconds(network.all_reduce[0].alpha_s)
    started = f"one all_reduce of {network.ranks} ranks takes {start} to start"
    if min(cost.beta_s_per_byte for cost in network.all_reduce) <= 0:
        return (
            "The bandwidth could not be measured, as large operations took no longer than small "
            f"ones; {started}. Measure again with a larger --largest."
        )
    rate = units.spoken_rate(bus_bandwidth(network))
    gradients_s = min(cost.time_s(_EXAMPLE_BYTES) for cost in network.all_reduce)
    path = shlex.quote(str(json_path or "NETWORK.json"))
    then = f"run `usbyte whatif PROFILE --network {path}`"
    if json_path is None:
        then = f"write the network with --json {path} and {then}"
    return (
        f"The network carries {rate} from each rank; {started}. Gradients of "
        f"{_EXAMPLE_BYTES / 1e6:.0f} MB take {units.spoken_seconds(gradients_s)}: compare that "
        f"with your step, or {then}."
    )


def together(concurrent: int | None, busy_alpha_s: float) -> str:
    """Says how many operations run at once, and what a small one takes beside a large one.

    Args:
        concurrent: The limit; 0 if all ran at once; None if it could not be measured.
        busy_alpha_s: Seconds of the small operation; 0 if unknown.
    """
    if concurrent is None:
        return "How many operations run at once could not be measured; use a larger --largest."
    most = {0: "Any number of operations run", 1: "One operation runs"}
    text = most.get(concurrent, f"{concurrent} operations run") + " at once."
    if busy_alpha_s > 0:
        busy = units.format_seconds(busy_alpha_s)
        text += f" A small all_reduce beside a large one takes {busy}."
    return text


def packing(s_per_byte: float) -> str:
    """Says what copies of several blocks into one message take."""
    return f"Packing an all_reduce of several blocks takes {s_per_byte * 1e9:.2f} ns/B."


def shots(one: _core.OneShot) -> str:
    """Says what a direct all_reduce takes."""
    return (
        f"A direct all_reduce, of up to {one.most_bytes} bytes, takes "
        f"{units.format_seconds(one.latency_s)}, beside a large one "
        f"{units.format_seconds(one.busy_latency_s)}; of several, one ends every "
        f"{units.format_seconds(one.gap_s)}."
    )


def costs_table(lines: Sequence[Line], ranks: int) -> Table:
    """Makes a table with one row for each cost line."""
    from rich.table import Table

    table = Table(title=f"{ranks} ranks")
    table.add_column("collective", no_wrap=True)
    for column in ("ops", "alpha", "overlap", "beta ns/B", "bus bandwidth", "residual"):
        table.add_column(column, justify="right")
    for line in lines:
        beta = line.cost.beta_s_per_byte
        # The share of the payload that each link of a ring carries.
        share = (2 if line.kind == "all_reduce" else 1) * (ranks - 1) / ranks
        table.add_row(
            line.kind,
            str(line.window),
            units.format_seconds(line.cost.alpha_s),
            units.format_seconds(line.cost.overlap_s),
            f"{beta * 1e9:.4f}",
            units.format_rate(float(f"{8 * share / beta:.3g}") / 8) if beta else "-",
            f"{line.residual:.1%}",
        )
    return table


def dimensions_table(topology: _core.Topology) -> Table:
    """Makes a table with one row for each dimension."""
    from rich.table import Table

    table = Table(title="dimensions of the network: reduce_scatters and all_gathers")
    table.add_column("dimension")
    for column in ("ranks", "startup", "a rank sends"):
        table.add_column(column, justify="right")
    for dimension in topology.dimensions:
        table.add_row(
            dimension.name,
            str(dimension.size),
            units.format_seconds(dimension.startup_s),
            units.format_rate(float(f"{8 * dimension.bytes_per_s:.3g}") / 8),
        )
    return table


def residuals_table(lines: Sequence[Line]) -> Table:
    """Makes a table of the residuals of each cost line, by size."""
    from rich.table import Table

    table = Table(title="residual by bytes of an operation: fit above measurement, in percent")
    table.add_column("collective")
    table.add_column("ops", justify="right")
    sizes = sorted({point.bytes // line.window for line in lines for point in line.points})
    for size in sizes:
        table.add_column(_size(size), justify="right")
    for line in lines:
        residuals = {p.bytes // line.window: f"{100 * p.residual:+.0f}" for p in line.points}
        table.add_row(line.kind, str(line.window), *(residuals.get(size, "") for size in sizes))
    return table


def _size(size: int) -> str:
    for power, prefix in ((2, "M"), (1, "k")):
        if size >= 1 << (10 * power):
            return f"{size / (1 << (10 * power)):.3g}{prefix}"
    return str(size)

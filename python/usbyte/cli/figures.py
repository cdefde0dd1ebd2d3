"""Pictures, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from usbyte import units

try:
    from matplotlib.figure import Figure
except ImportError as missing:
    raise click.ClickException(
        f"pictures need matplotlib ({missing}); install it with: pip install 'usbyte[plot]'"
    ) from missing

if TYPE_CHECKING:
    from usbyte.cli.simulate import Case


def save(figure: Figure, path: Path) -> None:
    """Writes the picture in the format that the name ends with."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise click.ClickException(
            f"cannot write '{path}': {error}; name a file such as picture.png in a folder that is "
            "writable"
        ) from error


def steps_by_workers(cases: Sequence[Case]) -> Figure:
    """How near each policy comes to the bound: a row for each model, a column for each bandwidth.

    In percent, since the steps of poor policies are longer by orders of magnitude.
    """
    models = list(dict.fromkeys(case.model for case in cases))
    rates = list(dict.fromkeys(case.bandwidth_bytes_per_s for case in cases))
    schemes = list(dict.fromkeys(case.scheme for case in cases))
    figure = Figure(figsize=(4.5 * len(rates) + 1.8, 3.4 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(rates), squeeze=False)
    for i, model in enumerate(models):
        for j, rate in enumerate(rates):
            panel = panels[i][j]
            here = [c for c in cases if c.model == model and c.bandwidth_bytes_per_s == rate]
            workers = sorted({c.workers for c in here})
            bounds = {n: min(c.bound_s for c in here if c.workers == n) for n in workers}
            for scheme in schemes:
                line = [(c.workers, c) for c in here if c.scheme == scheme]
                near = [100 * bounds[n] / c.step_s for n, c in line]
                panel.plot([n for n, _ in line], near, marker="o", markersize=3, label=scheme)
            panel.set_xscale("log", base=2)
            panel.set_xticks(workers, [str(n) for n in workers])
            panel.set_ylim(0, 103)
            panel.set_title(f"{model}, {units.format_rate(rate)}")
            panel.set_xlabel("workers")
            panel.set_ylabel("bound / step, %")
            panel.grid(alpha=0.3)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    return figure

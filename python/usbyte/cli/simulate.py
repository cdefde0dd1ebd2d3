# SPDX-License-Identifier: Apache-2.0
"""`usbyte simulate`: predicts step times of jobs for policies, worker counts and bandwidths."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from usbyte._util import units
from usbyte.cli._case import Case
from usbyte.cli._codec_options import codecs_for, coding_options, read_costs
from usbyte.cli._options import (
    SECONDS,
    SERIAL_HELP,
    Parsed,
    PolicySpec,
    all_policy_specs,
    check_writable,
    listed,
    parse_policy_spec,
    parse_workers,
    print_recorded,
    scale_options,
    write_text,
)
from usbyte.cli._tables import for_terminal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from usbyte import _core


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.argument("profiles", nargs=-1, required=True)
@scale_options
@click.option(
    "--policies",
    type=Parsed("list", listed(parse_policy_spec)),
    show_default="all untuned policies with overlap forward, and backward:ddp",
    help="Policies to compare, as POLICY or OVERLAP:POLICY, separated by commas.",
)
@click.option(
    "--shard-optimizer",
    "sharded",
    is_flag=True,
    help="Shard the optimizer: each rank updates a shard, and the next forward gathers the "
    "parameters. Without --policies, compare all untuned policies that support this. To mix, write "
    "sharded:POLICY in --policies.",
)
@click.option(
    "--workers", type=Parsed("list", listed(parse_workers)), default="4,16,64,256",
    help="Ranks of the ring, separated by commas.",
)  # fmt: skip
@click.option(
    "--bandwidth", type=Parsed("list", listed(units.parse_rate)), default="10gbit",
    help="Bandwidths of a link, separated by commas.",
)  # fmt: skip
@click.option("--latency", type=SECONDS, default="25us", help="Latency of a message.")
@coding_options
@click.option("--serial-startups", "serial", is_flag=True, help=SERIAL_HELP)
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Also write CSV.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw a picture (matplotlib).")
def simulate(
    profiles: tuple[str, ...],
    scale_time: float,
    scale_bytes: float,
    policies: list[PolicySpec] | None,
    sharded: bool,
    workers: list[int],
    bandwidth: list[float],
    latency: float,
    codec: str,
    costs_path: Path | None,
    serial: bool,
    csv_path: Path | None,
    plot: Path | None,
) -> None:
    """Predict step times with ring collectives.

    PROFILES are usbyte profiles, published traces, or names: vgg16, resnet50, bert-base and gpt2
    were recorded on a CPU, vgg16-half and vgg16-even are made up. Published traces have no forward
    times, so forward is set to half of backward. Times are milliseconds. The bound is the step time
    that no plan without codecs can beat; the bound of bytes leaves startups out. A star (*) marks
    the shortest step of each column.
    """
    from rich.console import Console
    from rich.text import Text

    from usbyte.planning.profiles import file_of, load, scaled

    check_writable(csv_path, plot, inputs=[*map(file_of, profiles), costs_path])
    if plot is not None:
        from usbyte.cli import _figures

        _figures.check_format(plot)
    jobs = [(scaled(load(source), scale_time, scale_bytes), source) for source in profiles]
    specs = _all_sharded(policies) if sharded else policies or all_policy_specs()
    console = Console(highlight=False)
    if not workers or not bandwidth:
        raise click.UsageError(
            "a network is missing: give at least one value to --workers and to --bandwidth, such "
            "as --workers 8 --bandwidth 10gbit"
        )
    costs = read_costs(costs_path)
    cases: list[Case] = []
    for job, source in jobs:
        model = job.model or Path(source).stem
        for rate in bandwidth:
            with console.status(Text(f"{model}, {units.format_rate(rate)}")):
                found = list(
                    _cases(job, model, specs, workers, rate, latency, serial, codec, costs)
                )
            console.print(_table(found))
            cases += found
    print_recorded(console, profiles, scale_time)
    if csv_path:
        write_text(csv_path, _csv(cases))
    if plot is not None:
        from usbyte.cli._step_figure import steps_by_workers

        _figures.save(steps_by_workers(cases), plot)


def _all_sharded(policies: Sequence[PolicySpec] | None) -> list[PolicySpec]:
    from usbyte.planning import tuning

    untuned = [policy for policy in tuning.SHARDING if policy not in tuning.TUNED]
    named = policies or [PolicySpec("forward", policy) for policy in untuned]
    try:
        if any(spec.mode == "backward" for spec in named):
            raise ValueError("a sharded optimizer needs overlap forward; leave out 'backward:'")
        return [parse_policy_spec(f"sharded:{spec.policy}") for spec in named]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--policies") from error


def _cases(
    job: _core.Profile,
    model: str,
    specs: Sequence[PolicySpec],
    workers: Sequence[int],
    rate: float,
    latency_s: float,
    serial: bool,
    codec: str,
    costs: _core.CodecCosts,
) -> Iterator[Case]:
    from usbyte import _core
    from usbyte.planning import tuning

    codecs = codecs_for(job, codec)
    for count in workers:
        network = _core.NetworkModel.ring(count, latency_s, rate, int(serial))
        for spec in specs:
            overlap, sharded = spec.overlap, spec.sharded
            plan = tuning.make_plan(spec.policy, job, network, {}, overlap, sharded, codecs, costs)
            step_s = _core.simulate(plan, job, network, overlap, sharded, costs).step_s
            bounds_s = (
                _core.bound_s(job, network, overlap, sharded),
                _core.bytes_bound_s(job, network, overlap, sharded),
            )
            yield Case(
                model, count, rate, latency_s, serial, overlap, sharded, spec.policy,
                len(plan.ops), step_s, *bounds_s, job.iteration_s, codec,
            )  # fmt: skip


def _table(cases: Sequence[Case]) -> RenderableType:
    """Makes a table with a row for each policy and a column for each number of workers."""
    first = cases[0]
    by = "" if first.codec == "none" else f" by {first.codec}"
    title = (
        f"{first.model}{by}, {units.format_rate(first.bandwidth_bytes_per_s)}, latency "
        f"{units.format_seconds(first.latency_s)}: ms of a step by workers, "
        f"{first.compute_s * 1e3:.1f} without communication; * marks the best"
    )
    counts = list(dict.fromkeys(case.workers for case in cases))
    best = {n: min(case.step_s for case in cases if case.workers == n) for n in counts}

    def least(attribute: str) -> list[str]:
        return [
            f"{min(getattr(case, attribute) for case in cases if case.workers == n) * 1e3:.1f}"
            for n in counts
        ]

    rows: list[list[RenderableType]] = [
        ["bound", *least("bound_s")],
        ["bound of bytes", *least("bytes_bound_s")],
    ]
    for spec in dict.fromkeys(case.spec for case in cases):
        row = {case.workers: case.step_s for case in cases if case.spec == spec}
        rows.append([spec, *(_cell(row[n], best[n]) for n in counts)])
    return for_terminal(title, ["policy", *map(str, counts)], rows, ("policy",))


def _cell(step_s: float, best_s: float) -> Text:
    from rich.text import Text

    shown, best = f"{step_s * 1e3:.1f}", f"{best_s * 1e3:.1f}"
    # Of two values that read the same, none may look better.
    return Text(f"* {shown}", "bold green") if shown == best else Text(shown)


def _csv(cases: Sequence[Case]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Case)])
    writer.writerows(astuple(case) for case in cases)
    return text.getvalue()

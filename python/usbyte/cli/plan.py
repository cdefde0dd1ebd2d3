# SPDX-License-Identifier: Apache-2.0
"""`usbyte plan`: makes a policy's plan for a profile and a network, and its prediction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from usbyte.cli._codec_options import codecs_for, coding_options, read_costs
from usbyte.cli._options import (
    BYTES,
    check_writable,
    network,
    network_options,
    overlap_options,
    print_recorded,
    scale_options,
    write_text,
)
from usbyte.cli._tables import for_terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from usbyte import _core

_MEGA = 1e6
_SHOWN = 500  # The most rows of the table; rich needs long for more.


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.argument("profile")
@scale_options
@network_options
@click.option(
    "--policy", default="auto", help="Policy; a tuned policy tunes the predicted step time."
)
@overlap_options
@coding_options
@click.option(
    "--partition", type=BYTES, help="bytescheduler: split tensors that are larger than this."
)
@click.option("--credit", type=BYTES, help="bytescheduler: the most bytes in flight.")
@click.option("--bucket", type=BYTES, help="ddp: bucket size.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the plan as JSON.")
@click.option(
    "--plot", type=click.Path(path_type=Path),
    help="Also draw the step below DDP's: .svg, .png, .html (matplotlib).",
)  # fmt: skip
def plan(
    profile: str,
    scale_time: float,
    scale_bytes: float,
    network_path: Path | None,
    ring: _core.NetworkModel | None,
    policy: str,
    overlap: str,
    sharded: bool,
    codec: str,
    costs_path: Path | None,
    partition: int | None,
    credit: int | None,
    bucket: int | None,
    output: Path | None,
    plot: Path | None,
) -> None:
    """Plan the communication of a profile.

    PROFILE is a usbyte profile, a published trace, or a name: vgg16, resnet50, bert-base and gpt2
    were recorded on a CPU, vgg16-half and vgg16-even are made up. Launched and done are seconds
    since the forward pass began. The bound is the step time that no plan without codecs can beat:
    with startups, and of bytes alone. The step is compared with that of DDP with the best of ten
    bucket sizes. Of more than 500 operations, only the first and the last 250 are shown.
    """
    from rich.console import Console

    from usbyte import _core
    from usbyte.planning import profiles, tuning
    from usbyte.planning.whatif import best_ddp

    check_writable(output, plot, inputs=[profiles.file_of(profile), network_path, costs_path])
    if plot is not None:
        from usbyte.cli import _figures

        _figures.check_format(plot)
    job = profiles.scaled(profiles.load(profile), scale_time, scale_bytes)
    net = network(network_path, ring)
    sizes = {"partition_bytes": partition, "credit_bytes": credit, "bucket_bytes": bucket}
    given = {name: size for name, size in sizes.items() if size is not None}
    costs, codecs = read_costs(costs_path), codecs_for(job, codec)
    made = tuning.make_plan(policy, job, net, given, overlap, sharded, codecs, costs)
    predicted = _core.simulate(made, job, net, overlap, sharded, costs)
    if output:
        write_text(output, made.to_json() + "\n")
    console = Console(highlight=False)
    console.print(_table(made, predicted))
    bytes_bound_s = _core.bytes_bound_s(job, net, overlap, sharded)
    bound_s = _core.bound_s(job, net, overlap, sharded)
    console.print(
        f"{job.model or profile}: {job.bytes / _MEGA:.1f} MB in {len(job.tensors)} tensors, "
        f"{net.ranks} ranks, overlap {overlap}{', sharded optimizer' if sharded else ''}",
        markup=False,
    )
    console.print(
        f"step {predicted.step_s:.6f} s, bound {bound_s:.6f} s, of bytes {bytes_bound_s:.6f} s, "
        f"without communication {job.iteration_s:.6f} s"
    )
    ddp, ddp_s = best_ddp(job, net)
    console.print(
        f"{ddp_s / predicted.step_s:.2f} times as fast as DDP with its best bucket size, "
        f"{ddp_s:.6f} s"
    )
    print_recorded(console, [profile], scale_time)
    if plot is not None:
        from usbyte.report import picture
        from usbyte.report.scene import Scene

        scenes = (
            Scene.predicted(ddp, job, net, "backward"),
            Scene.predicted(made, job, net, overlap, sharded, costs),
        )
        title = (
            f"{job.model or profile}, {net.ranks} ranks, predicted; DDP has its best bucket size"
        )
        _figures.save(picture.comparison(*scenes, title), plot)


def _table(plan: _core.Plan, predicted: _core.Prediction) -> RenderableType:
    """Makes a table with one row for each op."""
    from rich.text import Text

    rows: list[list[RenderableType]] = []
    # Each access of these attributes converts the whole list from C++.
    tensors, launched_s, done_s = plan.tensors, predicted.launched_s, predicted.done_s
    ops = list(enumerate(plan.ops))
    left_out = len(ops) - _SHOWN
    if left_out > 0:
        del ops[_SHOWN // 2 : -_SHOWN // 2]
    for i, op in ops:
        names = [tensors[t].name for t in plan.tensors_of(op)]
        fence = ", fence" if op.fence else ""
        size, window = f"{plan.bytes(op) / _MEGA:.3f}", _window(op.window_bytes, plan) + fence
        times = [f"{launched_s[i]:.6f}", f"{done_s[i]:.6f}"]
        kind = op.kind if op.codec == "none" else f"{op.kind} by {op.codec}"
        rows.append([str(i), kind, size, window, *times, Text(_shortened(names))])
    if left_out > 0:
        rows.insert(_SHOWN // 2, ["...", f"{left_out} more", *[""] * 5])
    columns = ("op", "kind", "MB", "window MB", "launched s", "done s", "tensors")
    title = f"{plan.policy}: {len(launched_s)} ops"
    return for_terminal(title, columns, rows, ("kind", "tensors"))


def _window(window_bytes: int, plan: _core.Plan) -> str:
    # A window as large as the flat buffer limits nothing.
    return "all" if window_bytes >= plan.flat_buffer_bytes else f"{window_bytes / _MEGA:.3f}"


def _shortened(names: list[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"

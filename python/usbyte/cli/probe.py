# SPDX-License-Identifier: Apache-2.0
"""`usbyte probe`: measures collectives between the ranks that it runs on, or codecs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from usbyte.cli import _codec_options as coding
from usbyte.cli import _probe_text as text
from usbyte.cli._options import BYTES, SECONDS, Parsed, check_writable, write_text
from usbyte.cluster_env import detect

if TYPE_CHECKING:
    from usbyte.planning.cost_fit import Line, Measured

_EXAMPLES = """\b
Example:
  usbyterun -np 4 -H a:1,b:1,c:1,d:1 usbyte probe --json network.json
  usbyte lab run -- usbyte probe --plot probe.png
  usbyterun -np 4 -H a:2,b:2 usbyte probe --dimensions --json network.json
  usbyte probe --codecs topk:0.01,fp16 --json codecs.json
  usbyte plan vgg16 --network network.json --codec topk:0.01 --codec-costs codecs.json
"""


@click.command(context_settings={"show_default": True, "max_content_width": 100}, epilog=_EXAMPLES)
@click.option(
    "--largest", type=BYTES, default="32M",
    help="Largest payload. Payloads grow until an operation takes about 0.05 s, and there are at "
    "least two sizes. Operations beside a small one, and packed ones, are up to four times as "
    "large.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu",
    help="Device of the payloads, and of the gradients for codecs. Use the device of the model.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(1), default=10, help="Measurements of each size.")
@click.option(
    "--codecs", type=Parsed("list", coding.parse_codecs), is_flag=False, flag_value="all",
    metavar="[SPEC,SPEC...]",
    help="Measure codecs instead of the network, on one CPU thread or on the GPU; without a list, "
    "all codecs.",
)  # fmt: skip
@click.option(
    "--codec-time", type=SECONDS, default="1s", help="Approximate time for each of --codecs."
)
@click.option(
    "--dimensions", is_flag=False, flag_value="hosts", metavar="[SIZES]",
    help="Also measure each dimension of the network: the ranks inside a host, and the hosts; or "
    "dimensions of given sizes such as 2x4, innermost first.",
)  # fmt: skip
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path),
    help="Write the network model, for usbyte plan --network; with --codecs, the costs, for usbyte "
    "plan --codec-costs.",
)  # fmt: skip
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Write every measurement.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw a picture (matplotlib).")
def probe(
    largest: int,
    device: str,
    repeats: int,
    codecs: list[str] | None,
    codec_time: float,
    dimensions: str | None,
    json_path: Path | None,
    csv_path: Path | None,
    plot: Path | None,
) -> None:
    """Measure the network between ranks, or codecs.

    Start it on every rank, like a training script; rank 0 prints the result. The first table has
    the fitted cost lines: k operations in flight with b bytes together take max(alpha, alpha -
    overlap + beta * b), as bytes already travel at the end of a startup. The bus bandwidth is that
    of a ring's links at that beta. The residual is the difference between the line and the median
    time of a size; the first table has its median over the sizes, the second table all of them. The
    last lines say in words what the network carries.

    With --codecs, one process is enough. Encoding and decoding take the least time shown, or the
    bytes of the gradients over the rate shown, if that is longer. Encoding includes error feedback.
    Decoding is that of one message. On a GPU, the gradients are there, and the codec runs as
    kernels or on the CPU, with copies and waits included. The error is the residual of the fit; the
    message is its share of the gradients' size.
    """
    if codecs is not None:
        if dimensions is not None:
            raise click.UsageError("--dimensions cannot be combined with --codecs")
        if csv_path is not None or plot is not None:
            raise click.UsageError("--csv and --plot cannot be combined with --codecs; use --json")
        _probe_codecs(codecs, codec_time, device, json_path)
        return
    cluster = detect()
    if cluster.size == 1:
        raise click.ClickException(
            "a network has several ranks; start this command on each of them, as in: "
            "usbyterun -np 4 usbyte probe"
        )
    if cluster.rank == 0:
        check_writable(json_path, csv_path, plot)
        if plot is not None:
            from usbyte.cli import _figures

            _figures.check_format(plot)
    import torch

    import usbyte.torch as ub
    from usbyte.planning.cost_fit import concurrent, fit, fit_lines
    from usbyte.torch.comm.probe_network import measure_apart
    from usbyte.torch.runtime.device import device_at
    from usbyte.torch.world.world import current

    ub.init()
    if device == "cuda":
        torch.cuda.set_device(ub.local_rank() % torch.cuda.device_count())
    place = device_at(torch.device(device))
    rows, topology = measure_apart(current(), place, dimensions, largest, repeats=repeats)
    if ub.rank() == 0:
        from rich.console import Console

        lines = fit_lines(rows)
        console = Console(highlight=False)
        console.print(text.costs_table(lines, ub.size()), text.residuals_table(lines))
        network = fit(ub.size(), rows).with_topology(topology)
        console.print(
            text.together(concurrent(rows), network.busy_alpha_s),
            text.packing(network.pack_s_per_byte),
        )
        if network.one_shot.most_bytes > 0:
            console.print(text.shots(network.one_shot))
        if dimensions is not None:
            table = text.dimensions_table(topology) if topology else None
            console.print(table or "The network has one dimension only.")
        console.print(text.in_words(network, json_path), markup=False, soft_wrap=True)
        if json_path is not None:
            write_text(json_path, network.to_json() + "\n")
        if csv_path is not None:
            write_text(csv_path, _csv(rows, lines))
        if plot is not None:
            _figures.save(_figures.costs(lines), plot)
    ub.shutdown()


def _probe_codecs(
    specs: Sequence[str], seconds: float, device: str, json_path: Path | None
) -> None:
    if seconds <= 0:
        raise click.BadParameter("write a time above 0", param_hint="--codec-time")
    if detect().rank != 0:  # Other ranks would only compete for the cores.
        return
    check_writable(json_path)
    from rich.console import Console

    from usbyte import _core

    cuda = _core.make_cuda(0) if device == "cuda" else None
    measured = coding.measure(specs, seconds, cuda)
    place = f"the {_core.cuda_info().devices[0].name}" if cuda else "one thread"
    Console(highlight=False).print(coding.table(measured, place))
    if json_path is not None:
        write_text(json_path, coding.costs_of(measured).to_json() + "\n")


def _csv(rows: Sequence[Measured], lines: Sequence[Line]) -> str:
    costs = {(line.kind, line.window): line.cost for line in lines}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["collective", "in_flight", "bytes", "seconds", "fitted_s"])
    for row in rows:
        cost = costs.get((row.kind, row.window))
        fitted = f"{cost.time_s(row.bytes):.9f}" if cost else ""
        writer.writerow([row.kind, row.window, row.bytes, f"{row.seconds:.9f}", fitted])
    return out.getvalue()

# SPDX-License-Identifier: Apache-2.0
"""All_reduces through the dimensions of a network: flat, in the fixed order, and by Themis' routes.

Run it on every rank of an emulated cluster of two dimensions:

    usbyte lab up --topology 2x2:100mbit,200mbit
    usbyte lab run -- python benchmarks/routes.py --topology 2x2

The dimensions of the mesh are measured first, as training does it. Then the ways take turns: an
all_reduce that knows nothing of dimensions; the innermost dimension first for every chunk, in the
number of chunks that is predicted to be best (a hierarchical all_reduce); and what policy themis
sends. Sums are checked in every round. A time is that of the slowest rank. Above each table stands
what it would take if all dimensions were busy all the time, without startups. Columns:

    chunks     that the vector is cut into
    ms         median of the rounds, and the least and the most
    predicted  by the simulator, from what the dimensions were measured to cost
    off        by how much that is more than what was measured
    x          the fixed order's time over this one's, as measured
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table

import usbyte.torch as ub
from usbyte import _core
from usbyte._util import units
from usbyte.cli._options import BYTES, Parsed
from usbyte.planning.cost_fit import fit
from usbyte.planning.layout import tensor_specs
from usbyte.torch.comm import factory
from usbyte.torch.comm.hierarchical import MeshCommunicator
from usbyte.torch.comm.probe import measure, measure_dimensions
from usbyte.torch.runtime.device import Device
from usbyte.torch.world.world import current


@dataclass
class Way:
    """One way to add up a vector.

    Attributes:
        name: For the table.
        route: Through the dimensions; None past them.
        predicted_s: What it should take.
        seconds: What it took, by round.
    """

    name: str
    route: _core.MeshSchedule | None
    predicted_s: float
    seconds: list[float] = field(default_factory=list)

    def run(self, mesh: MeshCommunicator, size: int) -> None:
        """Adds up vectors of so many bytes."""
        [tensor] = tensor_specs([("vector", size // 4, "float32")])
        plan = _core.Plan(
            "routes", [tensor], [_core.Op("all_reduce", [(0, tensor.numel)], route=self.route)]
        )
        buffer = torch.empty(plan.flat_buffer_bytes, dtype=torch.uint8)
        mesh.register(buffer)
        values = buffer.view(torch.float32)
        engine = _core.Engine(plan, buffer.data_ptr(), mesh.core)
        values.copy_(torch.arange(len(values)) % 97 + ub.rank())
        ub.barrier()
        engine.begin_step()
        engine.ready(0)
        engine.end_backward()
        engine.drain()
        [(begin, end)] = engine.op_times()
        engine.close()
        ranks = ub.size()
        expected = torch.arange(len(values)) % 97 * ranks + ranks * (ranks - 1) // 2
        if not torch.equal(values, expected.float()):
            raise click.ClickException(f"rank {ub.rank()}: {self.name} came to another sum")
        took = torch.tensor(end - begin, dtype=torch.float64)
        self.seconds.append(float(ub.allreduce(took, op=ub.Max)))


def _ways(network: _core.NetworkModel, size: int) -> list[Way]:
    topology = network.topology
    assert topology is not None
    fixed, best = _core.fixed_route(topology, size), _core.best_route(topology, size)
    return [
        Way("flat", None, network.all_reduce[0].time_s(size)),
        Way("fixed", fixed.schedule, fixed.seconds),
        Way(best.name, best.schedule, best.seconds),
    ]


def connect(topology: str, largest: int) -> tuple[MeshCommunicator, _core.NetworkModel]:
    """Communicators of a mesh and what they cost, which rank 0 prints. Collective.

    Args:
        topology: As of `DistributedOptimizer`.
        largest: Bytes of the probe's largest payload.

    Raises:
        ClickException: There is one dimension only.
    """
    context = current()
    mesh = factory.connect(context, Device(), topology)
    if not isinstance(mesh, MeshCommunicator):
        raise click.ClickException("this network has one dimension only")
    rows = measure(context, mesh, largest)
    found = measure_dimensions(context, mesh, largest)
    network = fit(ub.size(), rows).with_topology(found)
    network = _core.NetworkModel.from_json(
        context.eager.broadcast_bytes("routes.network", network.to_json().encode(), 0).decode()
    )
    assert network.topology is not None
    if ub.rank() == 0:
        for dimension in network.topology.dimensions:
            Console(width=110, highlight=False).print(
                f"{dimension.name}: {dimension.size} ranks, "
                f"{units.format_rate(dimension.bytes_per_s)}, startup "
                f"{units.format_seconds(dimension.startup_s)}"
            )
    return mesh, network


def _sizes(text: str) -> list[int]:
    return [units.parse_bytes(each) for each in text.split(",")]


@click.command(context_settings={"show_default": True})
@click.option("--topology", default="hosts", help="hosts, sizes such as 2x2, or a JSON file.")
@click.option("--sizes", type=Parsed("bytes", _sizes), default="4M,16M,64M", help="Of the vectors.")
@click.option("--rounds", default=5)
@click.option("--largest", type=BYTES, default="32M", help="Payload of the probe.")
def main(topology: str, sizes: Sequence[int], rounds: int, largest: int) -> None:
    """Prints what the dimensions cost, and a table for each size."""
    ub.init()
    mesh, network = connect(topology, largest)
    assert network.topology is not None
    console = Console(width=110, highlight=False)
    for size in sizes:
        ways = _ways(network, size)
        for turn in range(rounds + 1):
            for way in ways:
                way.run(mesh, size)
                if turn == 0:
                    way.seconds.clear()  # the first one makes connections
        if ub.rank() == 0:
            ideal_s = _core.ideal_s(network.topology, "all_reduce", size)
            console.print(_table(ways, size, ideal_s))
    mesh.close()
    ub.shutdown()


def _table(ways: Sequence[Way], size: int, ideal_s: float) -> Table:
    table = Table(title=f"{size / (1 << 20):.3g} MiB; ideal {ideal_s * 1e3:.1f} ms")
    for column in ("way", "chunks", "ms", "min", "max", "predicted", "off", "x"):
        table.add_column(column, justify="left" if column == "way" else "right")
    fixed_s = median(ways[1].seconds)
    for way in ways:
        middle = median(way.seconds)
        table.add_row(
            way.name, str(len(way.route.routes)) if way.route else "-", f"{middle * 1e3:.1f}",
            f"{min(way.seconds) * 1e3:.1f}", f"{max(way.seconds) * 1e3:.1f}",
            f"{way.predicted_s * 1e3:.1f}", f"{way.predicted_s / middle - 1:+.1%}",
            f"{fixed_s / middle:.2f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""All_reduces with a codec on a network of two dimensions: flat, and by every dimension path.

Run it on every rank of an emulated cluster of two dimensions:

    usbyte lab up --topology 2x2:400mbit,100mbit
    usbyte lab run -- python benchmarks/compressed_routes.py --topology 2x2 --codec topk:0.01

The dimensions and the codecs are measured first, as training does it. Then the ways take turns,
each with memory of its own: flat, with the codec and without, and what
`usbyte._core.dimension_paths` lists. In every round it
is checked, for 10,000 elements, that what arrived and what ranks remember is what they have
produced, so that codecs are casts and those with error feedback. A time is that of the slowest
rank, from gradients that are there to sums that are, coding included. Columns:

    way        the dimension that shards are added up in
    scatter, sum, gather
               codecs of the three steps
    ms         median of the rounds, and the least and the most
    predicted  by the simulator, from what dimensions and codecs were measured to cost
    off        by how much that is more than what was measured
    x          the flat way's time over this one's, as measured

The way that is predicted to be the fastest is marked with a star: a plan would have it, but that a
second loss must win 2 % of a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table

import usbyte.torch as ub
from routes import connect
from usbyte import _core
from usbyte.cli._options import BYTES
from usbyte.planning.layout import tensor_specs
from usbyte.torch.comm.hierarchical import MeshCommunicator
from usbyte.torch.plan.codec_selection import CodedPlans

_READY_S = 1e-6  # when the gradient of the profile is there
_CHECKED = 10_000  # elements


@dataclass
class Way:
    """One way to add up a vector.

    Attributes:
        plan: Of one all_reduce, or of the steps that it takes.
        codecs: Of scatter, sum and gather, for the table.
        where: Likewise, the dimension of the sum.
        predicted_s: What it should take.
        seconds: What it took, by round.
    """

    plan: _core.Plan
    codecs: tuple[str, str, str]
    where: str
    predicted_s: float
    seconds: list[float] = field(default_factory=list)

    def open(self, mesh: MeshCommunicator) -> None:
        """Makes room and an engine."""
        made = [_core.make_codec(op.codec) for op in self.plan.ops]
        rows = max([1, *(codec.state_rows for codec in made if codec is not None)])
        buffer = torch.empty(self.plan.flat_buffer_bytes, dtype=torch.uint8)
        mesh.register(buffer)
        self._values = buffer.view(torch.float32)
        self._memory = torch.zeros(rows, self.plan.numel)
        self._engine = _core.Engine(
            self.plan, buffer.data_ptr(), mesh.core, codec_state=self._memory.data_ptr()
        )

    def run(self, gradient: torch.Tensor, checked: torch.Tensor) -> None:
        """Adds up this rank's gradient and the others'."""
        before = self._memory[0, checked]
        self._values.copy_(gradient)
        ub.barrier()
        start = time.perf_counter()
        self._engine.begin_step()
        self._engine.ready(0)
        self._engine.end_backward()
        self._engine.drain()
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        self.seconds.append(float(ub.allreduce(took, op=ub.Max)))
        sent = ub.allreduce(gradient[checked] + before - self._memory[0, checked], op=ub.Sum)
        if not torch.allclose(self._values[checked], sent, rtol=1e-2, atol=1e-2):
            raise click.ClickException(f"rank {ub.rank()}: by {self.codecs} something is lost")

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()


def _ways(network: _core.NetworkModel, codec: str, numel: int) -> list[Way]:
    topology = network.topology
    assert topology is not None
    [tensor] = tensor_specs([("vector", numel, "float32")])
    profile = _core.Profile([tensor], [0.0], [_READY_S])
    flat = _core.Plan("t", [tensor], [_core.Op("all_reduce", [(0, numel)], codec=codec)])
    plans = CodedPlans("ways", {}, "backward", False, None)
    plans.measure(
        [codec, *_core.dimension_codecs(codec, topology)],
        lambda name, times: ub.allreduce(times, name=name, op=ub.Max),
    )

    def way(plan: _core.Plan, codecs: tuple[str, str, str], where: str) -> Way:
        return Way(plan, codecs, where, plans.step_s(plan, profile, network) - _READY_S)

    plain = _core.Plan("t", [tensor], [_core.Op("all_reduce", [(0, numel)])])
    ways = [
        way(plans.with_schemes(flat, network), ("-", codec, "-"), "flat"),
        way(plain, ("-", "none", "-"), "flat"),
    ]
    for each in _core.dimension_paths(flat.ops[0], topology):
        ways.append(
            way(
                _core.along_dimensions(flat, topology, [each]),
                (each.scatter, each.sum, each.gather),
                topology.dimensions[each.sum_dimension].name,
            )
        )
    return ways


@click.command(context_settings={"show_default": True})
@click.option("--topology", default="hosts", help="hosts, sizes such as 2x2, or a JSON file.")
@click.option("--codec", default="topk:0.01", help="A cast, or with error feedback.")
@click.option("--size", type=BYTES, default="16M", help="Of the vector of float32.")
@click.option("--rounds", default=5)
@click.option("--largest", type=BYTES, default="32M", help="Payload of the probe.")
def main(topology: str, codec: str, size: int, rounds: int, largest: int) -> None:
    """Prints what the dimensions cost, and a table of all ways."""
    ub.init()
    mesh, network = connect(topology, largest)
    generator = torch.Generator().manual_seed(ub.rank())
    gradient = torch.randn(size // 4, generator=generator)
    checked = torch.randint(0, len(gradient), (_CHECKED,), generator=torch.Generator())
    ways = _ways(network, codec, len(gradient))
    for way in ways:
        way.open(mesh)
    for turn in range(rounds + 1):
        for way in ways:
            way.run(gradient, checked)
            if turn == 0:
                way.seconds.clear()  # the first one makes connections
    if ub.rank() == 0:
        Console(width=120, highlight=False).print(_table(ways, size))
    for way in ways:
        way.close()
    mesh.close()
    ub.shutdown()


def _table(ways: list[Way], size: int) -> Table:
    table = Table(title=f"{size / (1 << 20):.3g} MiB of gradients")
    left = ("way", "scatter", "sum", "gather")
    for column in (*left, "ms", "min", "max", "predicted", "off", "x"):
        table.add_column(column, justify="left" if column in left else "right")
    best = min(ways, key=lambda way: way.predicted_s)
    flat_s = median(ways[0].seconds)
    for way in ways:
        middle = median(way.seconds)
        table.add_row(
            way.where + (" *" if way is best else ""),
            *(codec.replace(",feedback=off", "") for codec in way.codecs),
            f"{middle * 1e3:.1f}", f"{min(way.seconds) * 1e3:.1f}",
            f"{max(way.seconds) * 1e3:.1f}", f"{way.predicted_s * 1e3:.1f}",
            f"{way.predicted_s / middle - 1:+.1%}", f"{flat_s / middle:.2f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()

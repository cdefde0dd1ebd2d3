# SPDX-License-Identifier: Apache-2.0
"""All-reduces of a sparse gradient: every scheme, by density, in one run.

Run it on every rank of the emulated cluster of `usbyte lab`:

    usbyte lab up --hosts 4 --rate 1gbit
    usbyte lab run -- python benchmarks/sparse_schemes.py --rate 1gbit

Each rank draws words by Zipf's law until so many rows of an embedding have a gradient. Schemes take
turns; a time is the slowest rank's, from a barrier on. What they add up to is checked in every
round, against the first scheme of the list. Columns:

    d, gamma   share of all rows that a rank has; by what the sum of all ranks has more
    skew       rows in the fullest of as many equal ranges as ranks, over their mean
    ms         median of the rounds, and the least and the most
    MB         that the busiest rank sent or received
    formula    what the scheme's cost formula says
    link ms    what those bytes take a link alone
    push, pull the largest share of one rank, times the ranks

`bound` is what the busiest rank has to send or receive by any scheme, in values alone: of a row
that c of n ranks have, c - 1 messages until the first rank has its sum, and n - 1 more until all
have, shared evenly; and no rank gets by without all rows that another one has.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import usbyte.torch as ub
from usbyte import _core
from usbyte._util import units
from usbyte.torch.comm.sparse_exchange import TorchExchange
from usbyte.torch.world import world


def draw(rows: int, density: float, zipf: float, seed: int) -> np.ndarray:
    """Ids of a rank's rows: none twice, as many as the density says."""
    generator = np.random.default_rng(seed)
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -zipf)
    wanted = max(int(density * rows), 1)
    found = np.empty(0, np.int64)
    while len(found) < wanted:
        drawn = np.searchsorted(cumulative, generator.random(wanted) * cumulative[-1])
        both = np.concatenate([found, drawn])
        _, first = np.unique(both, return_index=True)
        found = both[np.sort(first)][:wanted]
    return found


@dataclass(frozen=True)
class Workload:
    """What all ranks together have to add up.

    Attributes:
        density: Shares of the rows that are in the sums of 1, 2, ... ranks.
        skew: Rank 0's rows in the fullest of as many equal ranges as ranks, over their mean.
        bound_rows: That the busiest rank has to send or receive at least.
    """

    density: list[float]
    skew: float
    bound_rows: float

    @classmethod
    def of(cls, rows: int, density: float, zipf: float, ranks: int) -> Workload:
        """As the ranks draw it."""
        drawn = [draw(rows, density, zipf, rank) for rank in range(ranks)]
        owners = np.zeros(rows, np.int64)
        shares = []
        for ids in drawn:
            owners[ids] += 1
            shares.append(float(np.count_nonzero(owners) / rows))
        in_sum = np.count_nonzero(owners)
        spread = in_sum * (ranks - 2) + owners.sum()
        missing = max(in_sum - np.count_nonzero(owners[ids] == 1) for ids in drawn)
        ranges = np.bincount(drawn[0] // -(-rows // ranks), minlength=ranks)
        return cls(
            shares,
            (ranges.max() * ranks / len(drawn[0])).item(),
            float(max(spread / ranks, missing)),
        )


class Contest:
    """One gradient, added up in every way."""

    def __init__(
        self, exchange: TorchExchange, rows: int, width: int, density: float, zipf: float
    ) -> None:
        self._exchange, self._rows, self._width = exchange, rows, width
        self._ids = torch.from_numpy(draw(rows, density, zipf, ub.rank()))
        generator = torch.Generator().manual_seed(ub.rank())
        # Of integers, so that sums do not depend on their order.
        self._values = torch.randint(1, 9, (len(self._ids), width), generator=generator).float()
        self.seconds: dict[str, list[float]] = {}
        self.traffic: dict[str, list[float]] = {}
        self._sum: tuple[np.ndarray, np.ndarray] | None = None

    def run(self, scheme: str) -> None:
        """Adds it up once."""
        ids, values = self._ids, self._values
        ub.barrier()
        begin = time.perf_counter()
        found, sums, traffic = _core.sparse_all_reduce(
            scheme, self._exchange.core, self._rows, self._width, "float32",
            ids.data_ptr(), len(ids), values.data_ptr(),
        )  # fmt: skip
        took = time.perf_counter() - begin
        if self._sum is None:
            self._sum = found, sums
        if not (np.array_equal(found, self._sum[0]) and np.array_equal(sums, self._sum[1])):
            raise click.ClickException(f"rank {ub.rank()}: {scheme} came to another sum")
        numbers = torch.tensor(
            [
                took,
                max(traffic.sent_bytes, traffic.received_bytes),
                traffic.push_imbalance,
                traffic.pull_imbalance,
            ],
            dtype=torch.float64,
        )
        took, *rest = ub.allreduce(numbers, op=ub.Max).tolist()
        self.seconds.setdefault(scheme, []).append(took)
        self.traffic[scheme] = rest


@click.command(context_settings={"show_default": True})
@click.option("--rows", default=400_000, help="Of the embedding.")
@click.option("--width", default=128, help="Elements of a row, float32.")
@click.option("--density", default="0.01,0.02,0.03", help="Shares of the rows that a rank has.")
@click.option("--zipf", default=1.0, help="Exponent of the law.")
@click.option("--schemes", default="", help="Which; all if left out.")
@click.option("--rounds", default=5)
@click.option("--rate", default="1gbit", help="Of the links, for what they take alone.")
def main(
    rows: int, width: int, density: str, zipf: float, schemes: str, rounds: int, rate: str
) -> None:
    """Prints a table for each density."""
    ub.init()
    exchange = TorchExchange(world.current().new_group())
    names = schemes.split(",") if schemes else _core.sparse_schemes()
    bytes_per_s = units.parse_rate(rate)
    for d in map(float, density.split(",")):
        contest = Contest(exchange, rows, width, d, zipf)
        for scheme in names * (rounds + 1):
            contest.run(scheme)
        if ub.rank() == 0:
            work = Workload.of(rows, d, zipf, ub.size())
            gamma = work.density[-1] / work.density[0]
            bound = work.bound_rows * 4 * width
            table = _table(contest, rows, width, work, bytes_per_s)
            table.title = (
                f"{ub.size()} ranks, {rows} x {width}, d {d:.2%}, gamma {gamma:.2f}, "
                f"skew {work.skew:.2f}; bound {bound / 1e6:.2f} MB, "
                f"{bound / bytes_per_s * 1e3:.1f} ms"
            )
            Console(width=110).print(table)
    exchange.close()
    ub.shutdown()


def _table(contest: Contest, rows: int, width: int, work: Workload, bytes_per_s: float) -> Table:
    table = Table()
    table.add_column("scheme")
    for name in ("ms", "min", "max", "x", "MB", "formula", "link ms", "push", "pull"):
        table.add_column(name, justify="right")
    order = sorted(contest.seconds, key=lambda s: median(contest.seconds[s][1:]))
    best = median(contest.seconds[order[0]][1:])
    for scheme in order:
        kept = contest.seconds[scheme][1:]  # the first one makes connections
        sent, push, pull = contest.traffic[scheme]
        formula = _core.sparse_bytes(scheme, rows, width, "float32", work.density, work.skew)
        table.add_row(
            scheme, f"{median(kept) * 1e3:.1f}", f"{min(kept) * 1e3:.1f}", f"{max(kept) * 1e3:.1f}",
            f"{median(kept) / best:.2f}", f"{sent / 1e6:.2f}", f"{formula / 1e6:.2f}",
            f"{sent / bytes_per_s * 1e3:.1f}", f"{push:.2f}", f"{pull:.2f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()

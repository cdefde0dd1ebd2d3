# SPDX-License-Identifier: Apache-2.0
"""What the host pays for each parameter of a model that computes next to nothing.

    usbyterun -np 2 python benchmarks/host_time.py

Small layers on a fast network are trained no faster than Python gets through a step. Each contender
has a model of its own, all alike, and takes a few steps in turns with the others. Ranks meet before
each turn; its first step, which finds everything done that the last one has left, does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from typing import Any

import click
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}
_CONTENDERS = ("alone", "DDP", "backward", "forward", "sharded")
_PHASES = ("zero_grad", "forward", "backward", "step", "whole")
_BATCH = 4
_TURN = 5  # steps


@contextmanager
def contender(name: str, layers: int, width: int, optimizer: str) -> Iterator[Callable[[], Any]]:
    """Gives what takes one step and returns the times at its beginning and after each phase."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    trained: Any = _OPTIMIZERS[optimizer](model.parameters())
    options: dict[str, Any] = {"overlap": name, "policy": "ddp"}
    if name == "sharded":
        options = {"shard_optimizer": True, "policy": "dear"}
    x = torch.randn(_BATCH, width)

    def step() -> list[float]:
        times = [time.perf_counter()]
        trained.zero_grad()
        times.append(time.perf_counter())
        loss = model(x).sum()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        trained.step()
        times.append(time.perf_counter())
        return times

    with ExitStack() as stack:
        if name == "DDP":
            model = DistributedDataParallel(model)
        elif name != "alone":
            trained = ub.DistributedOptimizer(trained, model=model, **options)
            stack.enter_context(closing(trained))
            while not trained.settled:
                step()
        yield step


@click.command(context_settings={"show_default": True})
@click.option("--layers", default=100, help="Linear layers, of two parameters each.")
@click.option("--width", default=8, help="Of a layer, elements.")
@click.option("--optimizer", type=click.Choice(sorted(_OPTIMIZERS)), default="sgd")
@click.option("--steps", type=click.IntRange(2), default=200, help="Of each contender.")
@click.option("--contenders", default=",".join(_CONTENDERS),
              help="Without communication; PyTorch's DDP; the overlaps of usbyte; "
              "shard_optimizer=True.")  # fmt: skip
def main(layers: int, width: int, optimizer: str, steps: int, contenders: str) -> None:
    """Measure host time; to be started on every rank of two at least."""
    names = [name.strip() for name in contenders.split(",")]
    for name in names:
        if name not in _CONTENDERS:
            raise click.UsageError(f"no contender '{name}'; there are {', '.join(_CONTENDERS)}")
    torch.set_num_threads(1)
    ub.init()
    if ub.size() == 1:
        raise click.ClickException("a single rank sends nothing; start it by `usbyterun -np 2`")
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    with ExitStack() as stack:
        take = [stack.enter_context(contender(n, layers, width, optimizer)) for n in names]
        for turn in range(-2, -(-steps // (_TURN - 1))):  # two to warm up
            for k in range(len(names)):
                k = (turn + k) % len(names)
                ub.barrier()
                marks = [take[k]() for _ in range(_TURN)]
                for each in marks[1:] if turn >= 0 else ():
                    spans = [b - a for a, b in pairwise(each)]
                    times[names[k]].append([*spans, sum(spans)])
    if ub.rank() == 0:
        click.echo(
            f"{2 * layers} parameters, {optimizer}, {ub.size()} ranks, torch {torch.__version__}: "
            f"us for each parameter, medians of {steps} steps\n"
        )
        click.echo(f"| | {' | '.join(_PHASES)} | p10 | p90 |\n|---|---|---|---|---|---|---|---|")
        for name in names:
            phases = zip(*times[name], strict=True)
            each = [[1e6 * t / (2 * layers) for t in phase] for phase in phases]
            cuts = statistics.quantiles(each[-1], n=10)
            shown = [*map(statistics.median, each), cuts[0], cuts[-1]]
            click.echo(f"| {name} | {' | '.join(f'{t:.1f}' for t in shown)} |")
    ub.shutdown()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Counts the Python calls of usbyte for each parameter in one training step.

    usbyterun -np 2 python benchmarks/python_calls.py

The counts are those of rank 0 in steps after planning: plain SGD, policy "ddp", small layers. Calls
that a step makes once, whatever the number of parameters, are included. Unlike times, counts do not
depend on the machine; `host_time.py` measures times.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import click
import torch
from torch import nn

import usbyte
import usbyte.torch as ub

Overlap = Literal["backward", "forward"]

_OVERLAPS: tuple[Overlap, ...] = ("backward", "forward")
_PHASES = ("zero_grad", "forward", "backward", "step")
_ROOT = str(Path(usbyte.__file__).parent)
_WARMUP_STEPS = 5


class CallCounter:
    """Counts calls of usbyte's Python functions in the calling thread.

    Attributes:
        phase: Phase of the step that runs; the caller assigns it.
        calls: Number of calls by phase and function.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.calls: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which calls count."""
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT):
            module = code.co_filename.removeprefix(_ROOT).removesuffix(".py").lstrip("/")
            name = getattr(code, "co_qualname", code.co_name)  # qualified from Python 3.11 on
            self.calls[self.phase, f"{module}: {name}"] += 1


def calls_per_parameter(overlap: Overlap, layers: int, steps: int) -> dict[tuple[str, str], float]:
    """Counts the calls in steps of a small model. Collective.

    Args:
        overlap: "backward" or "forward".
        layers: Number of layers, of two parameters each.
        steps: Number of steps over which calls are averaged.

    Returns:
        Calls for each parameter in one step, by phase and function.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer: Any = ub.DistributedOptimizer(plain, model=model, overlap=overlap, policy="ddp")
    x, counter = torch.randn(4, 8), CallCounter()

    def step() -> None:
        counter.phase = "zero_grad"
        optimizer.zero_grad()
        counter.phase = "forward"
        loss = model(x).sum()
        counter.phase = "backward"
        loss.backward()
        counter.phase = "step"
        optimizer.step()

    while not optimizer.settled:
        step()
    for _ in range(_WARMUP_STEPS):
        step()
    with counter.counting():
        for _ in range(steps):
            step()
    optimizer.close()
    return {key: count / (2 * layers * steps) for key, count in counter.calls.items()}


@click.command(context_settings={"show_default": True})
@click.option("--layers", default=20, help="Linear layers, of two parameters each.")
@click.option("--steps", default=50, help="Steps over which calls are averaged.")
@click.option("--functions", is_flag=True, help="Also list the functions that are called.")
def main(layers: int, steps: int, functions: bool) -> None:
    """Count Python calls; to be started on every rank of two at least."""
    ub.init()
    if ub.size() == 1:
        raise click.ClickException("a single rank sends nothing; start it by `usbyterun -np 2`")
    found = {overlap: calls_per_parameter(overlap, layers, steps) for overlap in _OVERLAPS}
    if ub.rank() == 0:
        click.echo(f"Python calls for each of {2 * layers} parameters in a step, torch "
                   f"{torch.__version__}\n")  # fmt: skip
        click.echo(f"| overlap | {' | '.join(_PHASES)} | whole |\n|---|---|---|---|---|---|")
        for overlap, calls in found.items():
            phases = [sum(n for (ran, _), n in calls.items() if ran == each) for each in _PHASES]
            shown = " | ".join(f"{n:.2f}" for n in [*phases, sum(phases)])
            click.echo(f"| {overlap} | {shown} |")
        for overlap, calls in found.items() if functions else ():
            click.echo(f"\n{overlap}:")
            for (phase, function), n in sorted(calls.items(), key=lambda row: -row[1]):
                click.echo(f"{n:8.3f}  {phase}  {function}")
    ub.shutdown()


if __name__ == "__main__":
    main()

"""Step times of a model whose layers sleep, under DDP and usbyte, interleaved in one run.

The model has the sixteen layers of VGG-16 (Simonyan & Zisserman, 2015) at half width, about 120 MB
of fp32 gradients. Each layer sleeps in forward and twice as long in backward, in proportion to its
multiply-adds, so that compute takes a known time and no core; the gradients are real and are
checked.

Run it on every rank, for example on four hosts of an emulated cluster at 1 Gbit/s:

    netns.sh up 4 1gbit; netns.sh run 4 python -m usbyte.lab.overlap; netns.sh down
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub

_WIDTHS = [32, 32, 64, 64, 128, 128, 128, 256, 256, 256, 256, 256, 256]
_SIDES = [224, 224, 112, 112, 56, 56, 56, 28, 28, 28, 14, 14, 14]
_DENSE = [(256 * 7 * 7, 1740), (1740, 1740), (1740, 1000)]


class _Sleep(torch.autograd.Function):
    """Identity on x that takes a while and gives its parameters a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer: SleepyLayer, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer = layer
        time.sleep(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        layer: SleepyLayer = ctx.layer
        time.sleep(2 * layer.forward_s)
        return grad, None, *(torch.full_like(p, layer.gradient) for p in layer.parameters())


class SleepyLayer(nn.Module):
    """A layer of a given size whose compute is sleep.

    Args:
        weights: Elements of the weight.
        biases: Elements of the bias.
        forward_s: Seconds of forward; backward takes twice as long.
    """

    gradient = 1.0  # value of every gradient element that this rank produces

    def __init__(self, weights: int, biases: int, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(weights))
        self.bias = nn.Parameter(torch.zeros(biases))
        self.forward_s = forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleeps and returns x."""
        y: torch.Tensor = _Sleep.apply(x, self, *self.parameters())
        return y


def build_model(compute_s: float) -> nn.Sequential:
    """The sleepy VGG-16, whose forward and backward sleep `compute_s` in all."""
    shapes, work = [], []
    inputs = 3
    for width, side in zip(_WIDTHS, _SIDES, strict=True):
        shapes.append((inputs * width * 9, width))
        work.append(inputs * width * 9 * side * side)
        inputs = width
    for a, b in _DENSE:
        shapes.append((a * b, b))
        work.append(a * b)
    scale = compute_s / 3 / sum(work)
    return nn.Sequential(
        *(SleepyLayer(w, b, m * scale) for (w, b), m in zip(shapes, work, strict=True))
    )


@contextmanager
def _trainer(mode: str, compute_s: float) -> Iterator[Callable[[], None]]:
    """One training step of the model under `mode`."""
    model: nn.Module = build_model(compute_s)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped: ub.DistributedOptimizer | None = None
    if mode == "ddp":
        model = DistributedDataParallel(model)
    elif mode != "alone":
        overlap, _, policy = mode.partition(":")
        optimizer = wrapped = ub.DistributedOptimizer(
            optimizer, model.named_parameters(), overlap=overlap, policy=policy or None  # type: ignore[arg-type]
        )  # fmt: skip
    x = torch.zeros(1, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    yield step
    if wrapped is not None:
        wrapped.synchronize()
        wrapped.close()
    _check(model, mode, ub.rank(), ub.size())


def _check(model: nn.Module, mode: str, rank: int, size: int) -> None:
    # Each rank's gradient is rank + 1 everywhere, so after k steps at lr 1 every parameter is -k
    # times the mean.
    mean = SleepyLayer.gradient if mode == "alone" else (size + 1) / 2
    for name, p in model.named_parameters():
        steps = -p.detach().flatten()[0].item() / mean
        if abs(steps - round(steps)) > 1e-3 or not torch.all(p == p.flatten()[0]):
            raise click.ClickException(f"{mode}: rank {rank} holds wrong values in {name}")


@click.command(context_settings={"show_default": True})
@click.option(
    "--modes", default="alone,ddp,backward:ddp,forward:bytescheduler", help="What to run, in turn."
)
@click.option("--rounds", default=3, help="How often to go through the modes.")
@click.option("--steps", default=6, help="Measured steps of each mode in each round.")
@click.option("--warmup", default=5, help="Steps before, which include usbyte's learning steps.")
@click.option("--compute", "compute_s", default=1.5, help="Seconds of sleep in a step.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write JSON.")
def main(
    modes: str, rounds: int, steps: int, warmup: int, compute_s: float, json_path: Path | None
) -> None:
    """Step times of a sleepy model under several ways of communicating, in one run."""
    ub.init()
    SleepyLayer.gradient = float(ub.rank() + 1)
    times: dict[str, list[float]] = {mode: [] for mode in modes.split(",")}
    for _ in range(rounds):
        for mode in times:
            with _trainer(mode, compute_s) as step:
                for _ in range(warmup):
                    step()
                dist.barrier()
                last = time.perf_counter()
                for _ in range(steps):
                    step()
                    now = time.perf_counter()
                    times[mode].append(now - last)
                    last = now
    if ub.rank() == 0:
        _report(times, compute_s, json_path)
    ub.shutdown()


def _report(times: dict[str, list[float]], compute_s: float, json_path: Path | None) -> None:
    megabytes = sum(p.numel() for p in build_model(0).parameters()) * 4 / 1e6
    table = Table(
        title=f"{ub.size()} ranks, {megabytes:.1f} MB of gradients, {compute_s} s of sleep, "
        f"torch {torch.__version__}"
    )
    for column in ("mode", "median s", "min", "max", "vs ddp"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    ddp = statistics.median(times["ddp"]) if "ddp" in times else float("nan")
    for mode, t in times.items():
        middle = statistics.median(t)
        row = [f"{v:.3f}" for v in (middle, min(t), max(t))]
        table.add_row(mode, *row, f"{ddp / middle:.2f}x")
    Console(width=100).print(table)
    if json_path:
        json_path.write_text(json.dumps({"ranks": ub.size(), "step_s": times}) + "\n")


if __name__ == "__main__":
    main()

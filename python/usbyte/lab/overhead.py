# SPDX-License-Identifier: Apache-2.0
"""Measures usbyte's overhead: `Engine.ready()` from Python, and a job of a single process.

Run it with: python -m usbyte.lab.overhead
"""

from __future__ import annotations

import statistics
import time

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import usbyte.torch as ub
from usbyte import _core


def ready_us(tensors: int, steps: int) -> list[float]:
    """Measures `Engine.ready()` from Python on one local rank.

    Args:
        tensors: Number of tensors of 16 float32 elements.
        steps: Number of steps.

    Returns:
        For each step, the microseconds of a call, averaged over the tensors.
    """
    specs = [_core.TensorSpec(f"t{i}", 16, "float32", 16 * i) for i in range(tensors)]
    profile = _core.Profile(
        specs, [float(i) for i in range(tensors)], [float(2 * tensors - i) for i in range(tensors)]
    )
    network = _core.NetworkModel(1, [_core.AlphaBeta(1e-6, 1e-9)])
    plan = _core.make_plan("ddp", profile, network, {"bucket_bytes": 1 << 10})
    buffer = torch.zeros(plan.flat_buffer_bytes, dtype=torch.uint8, device="cpu")
    [communicator] = _core.make_local_communicators(1)
    engine = _core.Engine(plan, buffer.data_ptr(), communicator)
    times = []
    for _ in range(steps):
        engine.begin_step()
        start = time.perf_counter()
        for i in range(tensors - 1, -1, -1):
            engine.ready(i)
        times.append((time.perf_counter() - start) / tensors * 1e6)
        engine.end_backward()
        engine.drain()
    engine.close()
    return times


def single_process(step_ms: float, rounds: int) -> tuple[list[float], list[float]]:
    """Measures a training step with a bare and with a wrapped optimizer, alternately.

    Args:
        step_ms: The batch grows until the bare step takes at least this many milliseconds.
        rounds: Half of the number of steps with each optimizer.

    Returns:
        Milliseconds of each bare step, and of each wrapped step.
    """
    torch.manual_seed(0)
    width = 512
    rows, models, optimizers = 64, [], []

    def layer() -> nn.Module:
        return nn.Linear(width, width, device="cpu", dtype=torch.float32)

    def batch() -> torch.Tensor:
        return torch.randn(rows, width, device="cpu", dtype=torch.float32)

    for wrap in (False, True):
        model = nn.Sequential(*(layer() for _ in range(12)))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if wrap:
            optimizer = ub.DistributedOptimizer(
                optimizer, model.named_parameters(), overlap="forward"
            )
        models.append(model)
        optimizers.append(optimizer)

    def step(k: int, x: torch.Tensor) -> float:
        start = time.perf_counter()
        optimizers[k].zero_grad()
        models[k](x).sum().backward()
        optimizers[k].step()
        return (time.perf_counter() - start) * 1e3

    x = batch()
    while min(step(0, x) for _ in range(5)) < step_ms:
        rows *= 2
        x = batch()
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * rounds):
        for k in (turn % 2, 1 - turn % 2):
            times[k].append(step(k, x))
    return times


@click.command(context_settings={"show_default": True})
@click.option("--tensors", default=200, help="Tensors of the plan for ready().")
@click.option("--steps", default=500, help="Steps over which ready() is timed.")
@click.option("--step-ms", default=20.0, help="Minimum length of the single-process step, in ms.")
@click.option("--rounds", default=100, help="Half of the steps with each optimizer.")
def main(tensors: int, steps: int, step_ms: float, rounds: int) -> None:
    """Print the cost of ready() from Python, and of the wrapper in a single process."""
    torch.set_num_threads(1)
    ub.init()
    table = Table(title=f"usbyte's overhead, torch {torch.__version__}, one thread")
    for column in ("what", "median", "p10", "p90", "unit"):
        table.add_column(column, justify="left" if column == "what" else "right")

    def row(what: str, values: list[float], unit: str) -> None:
        cuts = statistics.quantiles(values, n=10)
        table.add_row(
            what, *(f"{v:.3f}" for v in (statistics.median(values), cuts[0], cuts[-1])), unit
        )

    row(f"ready() from Python, {tensors} tensors", ready_us(tensors, steps), "us")
    bare, wrapped = single_process(step_ms, rounds)
    row("step, bare optimizer", bare, "ms")
    row("step, DistributedOptimizer, 1 rank", wrapped, "ms")
    cost = statistics.median(wrapped) / statistics.median(bare) - 1
    table.add_row("wrapped against bare", f"{cost * 100:+.2f}", "", "", "%")
    Console(width=100).print(table)
    ub.shutdown()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How long training takes to an accuracy, compressed and not: usbyte, DDP and DDP's own hooks.

A wide network on scanned digits, so that there is something to send. All contenders start from the
same parameters and see the same samples. Each first trains for some steps, in which usbyte learns,
plans and tries plans; then parameters, momentum and what is remembered are as at the beginning, and
the clock runs: over training steps, not over the evaluations between them. How much faster a step
is than usbyte's without compression is told as it was measured and as it was predicted.

To be started on every rank: usbyte lab run -- python benchmarks/time_to_accuracy.py
"""

from __future__ import annotations

import copy
import json
import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from usbyte.cli._tables import for_terminal, in_markdown

_CHUNK = 10  # steps between evaluations
_COLUMNS = (
    "contender", "reached", "steps", "s to it", "min", "max", "ms a step", "predicted ms",
    "against none", "predicted",
)  # fmt: skip
_PLAIN = "usbyte:none"


@dataclass
class Run:
    """One training of one contender.

    Attributes:
        contender: Its name.
        steps: Until the accuracy was reached; None if it was not.
        seconds: That those steps took, or all.
        step_s: The middle step of those that were timed.
        predicted_s: What usbyte had predicted for a step; None for others.
        plan: Codecs that its plan has.
    """

    contender: str
    steps: int | None
    seconds: float
    step_s: float
    predicted_s: float | None = None
    plan: str = ""


class Contender:
    """A model that is trained in one way.

    Args:
        name: "alone" (each rank by itself: what compute takes), "ddp", "ddp+fp16" or "ddp+powersgd"
            (torch's hooks), or "usbyte:" and what it is to compress with ("none", a spec, "auto").
        width: Of the hidden layers.
        lr: Learning rate.
    """

    def __init__(self, name: str, width: int, lr: float) -> None:
        torch.manual_seed(1)
        self.name = name
        self.model = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 10),
        )  # fmt: skip
        self.net: nn.Module = self.model
        self._forget: list[dict[int, torch.Tensor]] = []
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=lr, momentum=0.9
        )
        kind, _, how = name.partition(":")
        if kind == "usbyte":
            self.optimizer = ub.DistributedOptimizer(
                self.optimizer, self.model.named_parameters(), overlap="forward",
                compression=how, policy="ddp",  # "auto" may leave gradients uncompressed
            )  # fmt: skip
        elif kind != "alone":
            # PowerSGD's hook waits inside Gloo's threads: with a bucket for each, for ever.
            buckets = 1024 if kind == "ddp+powersgd" else None
            ddp = self.net = DistributedDataParallel(self.model, bucket_cap_mb=buckets)
            if kind == "ddp+fp16":
                ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
            elif kind == "ddp+powersgd":
                state = powerSGD_hook.PowerSGDState(
                    None, matrix_approximation_rank=2, start_powerSGD_iter=2
                )
                ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
                self._forget = [state.error_dict, state.p_memory_dict, state.q_memory_dict]
            elif kind != "ddp":
                raise click.ClickException(f"there is no contender {name!r}")
        self._start = copy.deepcopy(self.model.state_dict())
        self._optimizer_start = copy.deepcopy(self.optimizer.state_dict())

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Trains on this rank's part of a batch."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.net(images), labels).backward()
        self.optimizer.step()

    @property
    def settled(self) -> bool:
        """Its plan is there to stay."""
        return not isinstance(self.optimizer, ub.DistributedOptimizer) or self.optimizer.settled

    def start_over(self) -> None:
        """Parameters, momentum and what is remembered as at the beginning."""
        if isinstance(self.optimizer, ub.DistributedOptimizer):
            self.optimizer.synchronize()
        with torch.no_grad():
            self.model.load_state_dict(self._start)
        self.optimizer.load_state_dict(self._optimizer_start)
        for memory in self._forget:
            memory.clear()

    def close(self) -> None:
        """Ends what runs for it. Collective."""
        if isinstance(self.optimizer, ub.DistributedOptimizer):
            self.optimizer.close()


def batches(count: int, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Indices of this rank's samples, without end."""
    order = torch.Generator().manual_seed(seed)
    while True:
        shuffled = torch.randperm(count, generator=order)
        for batch in shuffled.split(size):
            if len(batch) == size:
                yield batch[ub.rank() :: ub.size()]


def train(
    name: str, target: float, most_steps: int, warm_up: int, width: int, lr: float, seed: int
) -> Run:
    """Trains one contender until the test accuracy is reached. Collective."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target)
    train_images, train_labels = images[300:], labels[300:]
    contender = Contender(name, width, lr)
    order = batches(len(train_labels), 64, seed)
    warmed = 0
    while warmed < warm_up or not contender.settled:
        index = next(order)
        contender.step(train_images[index], train_labels[index])
        warmed += 1
    contender.start_over()
    order = batches(len(train_labels), 64, seed)
    taken: list[float] = []
    reached = None
    while reached is None and len(taken) < most_steps:
        ub.barrier()
        for _ in range(_CHUNK):
            index = next(order)
            start = time.perf_counter()
            contender.step(train_images[index], train_labels[index])
            taken.append(time.perf_counter() - start)
        start = time.perf_counter()
        if isinstance(contender.optimizer, ub.DistributedOptimizer):
            contender.optimizer.synchronize()
        taken[-1] += time.perf_counter() - start  # what the next forward would have waited for
        contender.model.eval()
        with torch.no_grad():
            right = (contender.model(images[:300]).argmax(1) == labels[:300]).float().mean()
        contender.model.train()
        if float(right) >= target and name != "alone":  # whose models are different ones
            reached = len(taken)
    run = Run(name, reached, sum(taken), statistics.median(taken))
    if isinstance(contender.optimizer, ub.DistributedOptimizer):
        decision, plan = contender.optimizer.decision, contender.optimizer.plan
        run.predicted_s = None if decision is None else decision.predicted_s
        run.plan = "" if plan is None else "/".join(sorted({op.codec for op in plan.ops}))
    contender.close()
    return run


def rows_of(runs: list[Run]) -> list[list[str]]:
    """A row for each contender."""
    rows = []
    plain_s, plain_predicted_s = _step_s(runs, _PLAIN)
    for name in dict.fromkeys(run.contender for run in runs):
        own = [run for run in runs if run.contender == name]
        done = [run for run in own if run.steps is not None]
        seconds = [run.seconds for run in done]
        step_s, predicted_s = _step_s(runs, name)
        rows.append([
            name + (f" ({own[-1].plan})" if name == "usbyte:auto" else ""),
            f"{len(done)} of {len(own)}",
            f"{statistics.median(run.steps or 0 for run in done):.0f}" if done else "",
            *(f"{f(seconds):.2f}" if done else "" for f in (statistics.median, min, max)),
            f"{1e3 * step_s:.1f}" if step_s else "",
            f"{1e3 * predicted_s:.1f}" if predicted_s else "",
            f"{plain_s / step_s:.2f}x" if plain_s and step_s else "",
            f"{plain_predicted_s / predicted_s:.2f}x" if plain_predicted_s and predicted_s else "",
        ])  # fmt: skip
    return rows


def _step_s(runs: list[Run], name: str) -> tuple[float | None, float | None]:
    """A contender's step, measured and predicted; medians."""
    measured = [run.step_s for run in runs if run.contender == name]
    predicted = [r.predicted_s for r in runs if r.contender == name and r.predicted_s is not None]
    return (
        statistics.median(measured) if measured else None,
        statistics.median(predicted) if predicted else None,
    )


@click.command(help=__doc__)
@click.option(
    "--contenders",
    default="alone,ddp,ddp+fp16,ddp+powersgd,usbyte:none,usbyte:fp16,usbyte:int8,usbyte:topk:0.01,"
    "usbyte:powersgd:2,usbyte:auto",
    show_default=True,
)
@click.option("--target", default=0.95, show_default=True, help="Test accuracy.")
@click.option("--most-steps", default=400, show_default=True)
@click.option(
    "--warm-up", default=25, show_default=True, help="Steps before the clock runs, at least."
)
@click.option("--width", default=1024, show_default=True, help="Of the hidden layers.")
@click.option("--lr", default=0.1, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Trainings of each, in turns.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
@click.option("--markdown", type=click.Path(path_type=Path))
def main(
    contenders: str, target: float, most_steps: int, warm_up: int, width: int, lr: float,
    rounds: int, json_path: Path | None, markdown: Path | None,
) -> None:  # fmt: skip
    """Trains all contenders in turns and prints a table."""
    torch.set_num_threads(1)
    ub.init()
    logging.getLogger("usbyte").setLevel(logging.WARNING)
    console = Console(stderr=True, quiet=ub.rank() != 0)
    runs = []
    for seed in range(rounds):
        for name in contenders.split(","):
            run = train(name, target, most_steps, warm_up, width, lr, seed)
            runs.append(run)
            console.print(f"round {seed}, {name}: {run.steps} steps, {run.seconds:.2f} s")
    if ub.rank() == 0:
        rows = rows_of(runs)
        title = f"{ub.size()} ranks, width {width}, to {target:.0%} of test accuracy"
        Console(width=140).print(for_terminal(title, _COLUMNS, rows, left=_COLUMNS[:1]))
        if markdown is not None:
            markdown.write_text(in_markdown(_COLUMNS, rows))
        if json_path is not None:
            json_path.write_text(json.dumps([asdict(run) for run in runs], indent=1))
    ub.shutdown()


if __name__ == "__main__":
    main()

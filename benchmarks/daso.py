# SPDX-License-Identifier: Apache-2.0
"""What DASO loses and saves: the examples' jobs with it, and with synchronous training.

Run it on every rank of several nodes, such as those of the emulated cluster of `usbyte lab`:

    usbyte lab up --topology 2x2:1gbit,50mbit
    OMP_NUM_THREADS=1 usbyte lab run -- python benchmarks/daso.py -o docs/daso.md

Every variant of a job begins with the same parameters and sees the same samples in the same order,
and all make the same number of steps. Layers really compute. At the end of each training all ranks
must have the same parameters bit for bit; the job ends with an error otherwise.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import click
import torch
from rich.console import Console

import usbyte.torch as ub
from _convergence_jobs import JOBS, Job
from _daso_page import EPOCHS, SYNCHRONOUS, VARIANTS, Result, Variant, page
from usbyte.cli._options import Parsed, check_writable, listed, write_text
from usbyte.torch.comm.axis_groups import host_topology
from usbyte.torch.world.world import current

_SEEDS = {"digits": 2, "char_gpt": 1, "char_gpt_sgd": 1}
#: About half a pass over the text: the emulated hosts share the cores.
_MOST_STEPS = {"char_gpt": 195, "char_gpt_sgd": 195}
#: Of the lab: the network between nodes, whose bytes are counted.
_OUTER = Path("/sys/class/net/eth1/statistics/tx_bytes")


def train(job: Job, variant: Variant, seed: int, result: Result) -> None:
    """Trains from one seed and adds what came of it. Collective."""
    from _common import Batches, warmup_cosine

    torch.manual_seed(seed)
    model = job.make_model()
    inner = job.make_optimizer(model.parameters(), job.lr)
    optimizer: ub.DistributedOptimizer | ub.DasoOptimizer
    daso: ub.DasoOptimizer | None = None
    if variant.every:
        optimizer = daso = ub.DasoOptimizer(
            inner,
            model.named_parameters(),
            total_epochs=EPOCHS,
            warmup_epochs=SYNCHRONOUS,
            cooldown_epochs=SYNCHRONOUS,
            exchange_every=variant.every,
            exchange_wait=variant.wait,
        )
    else:
        optimizer = ub.DistributedOptimizer(inner, model.named_parameters(), overlap="forward")
    ub.broadcast_parameters(model.state_dict(), root_rank=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(job.steps))
    batches = Batches(job.samples, job.batch, seed, ub.rank(), ub.size())
    order = (index for epoch in range(job.steps) for index in batches.epoch(epoch))
    losses: list[torch.Tensor] = []
    times, sent = [], []
    ub.barrier()
    began = time.perf_counter()
    epoch_began, epoch_sent = began, _outer_bytes()
    for step in range(1, job.steps + 1):
        optimizer.zero_grad()
        loss = job.loss(model, next(order))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        if step % max(1, job.steps // EPOCHS) == 0:
            mean = ub.allreduce(torch.stack(losses).mean(), op=ub.Average, name="loss")
            losses.clear()
            now, bytes_now = time.perf_counter(), _outer_bytes()
            times.append(now - epoch_began)
            sent.append(bytes_now - epoch_sent)
            epoch_began, epoch_sent = now, bytes_now
            if daso is not None:
                daso.end_epoch(mean)
    if daso is not None:
        daso.synchronize_nodes()
    optimizer.synchronize()
    result.whole_s.append(time.perf_counter() - began)
    middle = slice(SYNCHRONOUS, EPOCHS - SYNCHRONOUS)
    result.epoch_s.append(statistics.median(times[middle]))
    own = torch.tensor(statistics.fmean(sent[middle]), dtype=torch.float64)
    result.outer_bytes.append(float(ub.allreduce(own, op=ub.Sum, name="sent")))
    result.losses.append(float(mean))
    _check_alike(model)
    result.scores.append(job.evaluate(model))
    optimizer.close()


def _outer_bytes() -> int:
    return int(_OUTER.read_text()) if _OUTER.exists() else 0


def _check_alike(model: torch.nn.Module) -> None:
    """Raises an error unless all ranks have the same parameters."""
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    if not torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min)):
        raise click.ClickException("ranks ended with different parameters")


def _job(text: str) -> str:
    if text not in JOBS:
        raise ValueError(f"{text!r} is none of {', '.join(JOBS)}")
    return text


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.option(
    "--jobs", type=Parsed("list", listed(_job)), default="digits,char_gpt",
    help=f"What to train, of {', '.join(JOBS)}.",
)  # fmt: skip
@click.option("--seeds", type=click.IntRange(1), show_default="2 for digits, 1 for char_gpt")
@click.option("--quick", is_flag=True, help="Few steps of small models, one seed.")
@click.option("--network", default="", help="What the page says of the network.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Markdown goes there, else is shown."
)
def main(
    jobs: list[str], seeds: int | None, quick: bool, network: str, output: Path | None
) -> None:
    """Train with DASO and synchronously; to be started on every rank of several nodes."""
    busy = os.getloadavg()[0]  # before this adds to it
    ub.init()
    slots, nodes = host_topology(current())
    if nodes < 2:
        raise click.ClickException(
            "DASO is about several nodes: run this in `usbyte lab`, or on several hosts"
        )
    if ub.rank() == 0:
        check_writable(output)
    console = Console(quiet=ub.rank() != 0, highlight=False)
    found: dict[str, tuple[Job, dict[str, Result]]] = {}
    for name in jobs:
        job = JOBS[name](quick)
        job = replace(job, steps=min(job.steps, _MOST_STEPS.get(name, job.steps)))
        results = {variant.name: Result() for variant in VARIANTS}
        found[name] = job, results
        for seed in range(seeds or (1 if quick else _SEEDS[name])):
            for variant in VARIANTS:
                train(job, variant, seed, results[variant.name])
                console.print(
                    f"{name}, {variant.name}, seed {seed}: {job.metric} "
                    f"{job.format(results[variant.name].scores[-1])}, "
                    f"{results[variant.name].whole_s[-1]:.1f} s"
                )
    if ub.rank() == 0:
        text = page(found, slots, nodes, network, busy)
        if output:
            write_text(output, text)
        console.print(text, markup=False, soft_wrap=True)
    ub.shutdown()


if __name__ == "__main__":
    main()

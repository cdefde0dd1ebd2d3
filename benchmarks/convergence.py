# SPDX-License-Identifier: Apache-2.0
"""What codecs do to training: the examples' jobs with each codec, against no compression.

Run it on every rank, two at least:

    OMP_NUM_THREADS=1 usbyterun -np 2 python benchmarks/convergence.py --curves docs

Every variant of a job begins with the same parameters and sees the same samples in the same order;
all run in one process group, one after the other. Plans are DDP's buckets throughout: none depends
on measured times, so that a run can be repeated. Which codecs there are, and what each needs of the
optimizer, is in `_convergence_variants`.
"""

from __future__ import annotations

import os
import platform
import time
from datetime import date
from pathlib import Path

import click
import torch
from rich.console import Console

import usbyte
import usbyte.torch as ub
from _convergence_jobs import JOBS, Job
from _convergence_results import Result, Trained, to_json
from _convergence_variants import UNCOMPRESSED, VARIANTS, Variant, chosen, known
from usbyte.cli._options import Parsed, check_writable, listed, write_text
from usbyte.errors import UsageError

_EVERY = 10  # steps of a training loss
_QUICK = ["int8", "topk:0.1"]
_SEEDS = {"digits": 3, "char_gpt": 1, "char_gpt_sgd": 1}


def train(job: Job, variant: Variant, seed: int, result: Result) -> None:
    """Trains one variant from one seed for as long as the result says, and adds what came of it.

    Collective.
    """
    from _common import Batches, warmup_cosine

    torch.manual_seed(seed)
    model = job.make_model()
    make = torch.optim.SGD if job.name in variant.plain else job.make_optimizer
    optimizer = ub.DistributedOptimizer(
        make(model.parameters(), result.lr),
        model.named_parameters(),
        compression=variant.compression,
    )
    ub.broadcast_parameters(model.state_dict(), root_rank=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(result.steps))
    batches = Batches(job.samples, job.batch, seed, ub.rank(), ub.size())
    began, step = time.perf_counter(), 0
    losses, since = [], torch.zeros(())
    while step < result.steps:
        for index in batches.epoch(step // batches.per_epoch):
            optimizer.zero_grad()
            loss = job.loss(model, index)
            loss.backward()
            optimizer.step()
            scheduler.step()
            since += loss.detach() / _EVERY
            step += 1
            if step % _EVERY == 0:
                losses.append(float(ub.allreduce(since, op=ub.Average, name="loss")))
                since.zero_()
            if step == result.steps:
                break
    result.seconds += time.perf_counter() - began
    result.losses.append(losses)
    result.scores.append(job.evaluate(model))
    plan = optimizer.plan
    assert plan is not None  # there are several ranks
    result.gradient_bytes = sum(plan.bytes(op) for op in plan.ops)
    result.message_bytes = sum(plan.message_bytes(op) for op in plan.ops)
    optimizer.close()


def _job(text: str) -> str:
    if text not in JOBS:
        raise ValueError(f"{text!r} is none of {', '.join(JOBS)}")
    return text


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.option(
    "--jobs",
    type=Parsed("list", listed(_job)),
    default="digits,char_gpt",
    help=f"What to train, of {', '.join(JOBS)}.",
)
@click.option(
    "--codecs", type=Parsed("list", str.split), metavar="SPECS", show_default="all of the table",
    help="Which codecs, separated by spaces; what is not in the table needs nothing special.",
)  # fmt: skip
@click.option("--seeds", type=click.IntRange(1), show_default="3 for digits, 1 for char_gpt")
@click.option(
    "--lr", type=float, metavar="FACTOR",
    help="Of the learning rate of all codecs, instead of the table's: to find the table's.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Few steps of small models, two codecs, one seed.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write JSON.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Also write Markdown tables.")
@click.option(
    "--curves", type=click.Path(file_okay=False, exists=True, path_type=Path), metavar="FOLDER",
    help="Also draw training losses, compression_JOB.svg (matplotlib).",
)  # fmt: skip
def main(
    jobs: list[str], codecs: list[str] | None, seeds: int | None, lr: float | None, quick: bool,
    json_path: Path | None, markdown: Path | None, curves: Path | None,
) -> None:  # fmt: skip
    """Train with each codec and without; to be started on every rank, two at least."""
    if codecs is None:
        codecs = _QUICK if quick else None
    try:
        wanted = VARIANTS if codecs is None else chosen(codecs)
    except UsageError as error:
        raise click.BadParameter(str(error), param_hint="--codecs") from error
    # Before plans are made from measurements, every plan is DDP's buckets.
    os.environ["USBYTE_LEARNING_STEPS"] = "1000000000"
    ub.init()
    if ub.size() < 2:
        raise click.ClickException(
            "one rank sends nothing and compresses nothing; start this on several, as in: "
            "usbyterun -np 2 python benchmarks/convergence.py"
        )
    if ub.rank() == 0:
        check_writable(json_path, markdown)
        if curves:
            from usbyte.cli import _figures  # says early what is missing
    variants = {variant.label: variant for variant in wanted if known(variant)}
    skipped = [variant.label for variant in wanted if variant.label not in variants]
    console = Console(quiet=ub.rank() != 0, highlight=False)
    found = []
    for name in jobs:
        job = JOBS[name](quick)
        trained = Trained(job, ub.size(), _EVERY, variants, {}, skipped)
        found.append(trained)
        for label, variant in variants.items():
            factor = variant.lr.get(name, 1.0) if lr is None or label == UNCOMPRESSED else lr
            optimizer = "SGD" if name in variant.plain else job.optimizer
            for times in job.times_as_long if variant.may_take_longer else (1,):
                result = Result(job.lr * factor, optimizer, times * job.steps)
                trained.results[label] = result
                for seed in range(seeds or (1 if quick else _SEEDS[name])):
                    train(job, variant, seed, result)
                console.print(
                    f"{name}, {label}, {result.steps} steps: {job.metric} "
                    f"{job.format(result.score)}, {result.seconds:.1f} s"
                )
                if quick or trained.reached(label):
                    break
    if ub.rank() == 0:
        text = "\n".join(trained.to_markdown() for trained in found)
        console.print(text, markup=False, soft_wrap=True)
        facts = {
            "usbyte": usbyte.__version__, "torch": torch.__version__,
            "python": platform.python_version(), "date": date.today().isoformat(),
        }  # fmt: skip
        if json_path:
            write_text(json_path, to_json(found, facts))
        if markdown:
            write_text(markdown, text)
        if curves:
            for trained in found:
                _figures.save(trained.curves(), curves / f"compression_{trained.job.name}.svg")
    ub.shutdown()


if __name__ == "__main__":
    main()

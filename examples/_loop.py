# SPDX-License-Identifier: Apache-2.0
"""The training loop of the examples that read text."""

import argparse
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from _common import (
    Batches,
    load_checkpoint,
    rehearse,
    save_checkpoint,
    settings,
    warmup_cosine,
    wrap,
)
from _report import Display, StepClock, finish
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


@dataclass
class Job:
    """What is trained, on what.

    Attributes:
        model: On its device.
        optimizer: Of its parameters.
        samples: How many there are to train on.
        digest: Of the data, which has to be the same on all workers and when a run is resumed.
        loss: Of a network, sample indices and a step's number.
        evaluate: Sums over this worker's share of held-out data, and last how much that is.
        measures: Names of those sums, over the amount.
    """

    model: nn.Module
    optimizer: Optimizer
    samples: int
    digest: str
    loss: Callable[[nn.Module, Tensor, int], Tensor]
    evaluate: Callable[[], Tensor]
    measures: tuple[str, ...]


def train(args: argparse.Namespace, ub: ModuleType, device: torch.device, job: Job) -> None:
    """Trains, evaluates after each epoch and reports."""
    rank, size = ub.rank(), ub.size()
    if ub.broadcast_object(job.digest, root_rank=0) != job.digest:
        raise RuntimeError(f"rank {rank} has another standard library, so text, than rank 0")
    batches = Batches(job.samples, args.batch_size, args.seed, rank, size)
    total = args.epochs * batches.per_epoch
    last = min(total, args.steps or total)
    fixed = settings(args) | {"text": job.digest}

    model = job.model
    step = 0
    if args.resume and rank == 0:
        step = load_checkpoint(args.checkpoint, model, job.optimizer, fixed)

    network = DistributedDataParallel(model) if args.ddp else model
    optimizer = wrap(args, ub, job.optimizer, model, losses=total // args.log_every)
    ub.broadcast_parameters(model.state_dict(), root_rank=0)
    ub.broadcast_optimizer_state(optimizer, root_rank=0)
    step = ub.broadcast_object(step, root_rank=0)
    index = next(batches.epoch(0))

    def warm_up() -> None:
        optimizer.zero_grad()
        job.loss(network, index, 0).backward()
        optimizer.step()

    rehearse(model, optimizer, warm_up, args.warmup)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(total), step - 1)

    clock = StepClock(device)
    history: list[dict[str, Any]] = []
    losses: deque[Tensor] = deque(maxlen=args.log_every)
    with Display(rank, step, last) as display:
        while step < last:
            epoch = step // batches.per_epoch
            model.train()
            for index in batches.epoch(epoch, skip=step % batches.per_epoch):
                clock.start()
                optimizer.zero_grad()
                loss = job.loss(network, index, step)
                clock.mark()
                loss.backward()
                clock.mark()
                optimizer.step()
                scheduler.step()
                clock.mark()
                losses.append(loss.detach())
                step += 1
                display.advance()
                if step % args.log_every == 0:
                    train_loss = _average(losses, ub)
                    history.append({"step": step, "train_loss": train_loss})
                    if args.daso:
                        optimizer.end_epoch(train_loss)
                    display.line(f"step {step:5d}  train loss {train_loss:.4f}")
                if step == last:
                    break

            if args.daso:
                optimizer.synchronize_nodes()  # rank 0 saves for all
            model.eval()
            with torch.no_grad():
                share = job.evaluate()
            *sums, count = ub.allreduce(share, op=ub.Sum, name="validation").tolist()
            found = {"train_loss": _average(losses, ub)}
            found |= {name: s / count for name, s in zip(job.measures, sums, strict=True)}
            history.append({"epoch": epoch + 1, "step": step, **found})
            told = "  ".join(f"{name.replace('_', ' ')} {v:.4f}" for name, v in found.items())
            display.line(f"step {step:5d}  {told}  epoch {epoch + 1}")
            if args.checkpoint and rank == 0:
                save_checkpoint(args.checkpoint, model, optimizer, step, fixed)

    if rank == 0:
        finish(args, ub, display, clock, model, history)


def _average(losses: Iterable[Tensor], ub: ModuleType) -> float:
    """The mean of the last losses over all workers."""
    mean = torch.stack(list(losses)).mean()
    return float(ub.allreduce(mean, op=ub.Average, name="train_loss"))

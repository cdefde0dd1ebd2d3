# SPDX-License-Identifier: Apache-2.0
"""Trains a small CNN on scikit-learn's 1,797 handwritten digits, with usbyte or with plain DDP.

Any launcher goes with either:

    usbyterun -np 2 python examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py --ddp
"""

import argparse
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from _common import (
    Batches,
    library,
    load_checkpoint,
    parser,
    rehearse,
    save_checkpoint,
    set_up,
    settings,
    warmup_cosine,
    wrap,
)
from _report import Display, StepClock, finish
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def build_model() -> nn.Module:
    """Returns the CNN, 0.32 million parameters; without batch norm, no statistics cross ranks."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns training images (n, 1, 8, 8) and labels (n,), then the same for the test.

    The split is stratified and always the same, whatever `--seed` says.
    """
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )

    def to_images(pixels: object) -> Tensor:
        return torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16 - 0.5

    return to_images(train_x), torch.tensor(train_y), to_images(test_x), torch.tensor(test_y)


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Returns (summed loss, number right, number of images)."""
    model.eval()
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    right = (logits.argmax(dim=1) == labels).sum()
    return torch.stack([loss, right, torch.tensor(len(labels), device=loss.device)]).double()


def train(args: argparse.Namespace, ub: ModuleType) -> None:
    """Trains, evaluates after each epoch and reports."""
    device = set_up(args, ub)
    rank, size = ub.rank(), ub.size()

    train_x, train_y, test_x, test_y = (tensor.to(device) for tensor in load_data())
    batches = Batches(len(train_x), args.batch_size, args.seed, rank, size)
    total = args.epochs * batches.per_epoch
    last = min(total, args.steps or total)

    model = build_model().to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step = 0
    if args.resume and rank == 0:
        step = load_checkpoint(args.checkpoint, model, optimizer, settings(args))

    network = DistributedDataParallel(model) if args.ddp else model
    optimizer = wrap(args, ub, optimizer, model, losses=args.epochs)
    ub.broadcast_parameters(model.state_dict(), root_rank=0)
    ub.broadcast_optimizer_state(optimizer, root_rank=0)
    step = ub.broadcast_object(step, root_rank=0)
    index = next(batches.epoch(0))

    def warm_up() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(train_x[index]), train_y[index]).backward()
        optimizer.step()

    rehearse(model, optimizer, warm_up, args.warmup)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(total), step - 1)

    clock = StepClock(device)
    history: list[dict[str, Any]] = []
    with Display(rank, step, last) as display:
        while step < last:
            epoch = step // batches.per_epoch
            model.train()
            losses = []
            for index in batches.epoch(epoch, skip=step % batches.per_epoch):
                images, labels = train_x[index], train_y[index]
                clock.start()
                optimizer.zero_grad()
                loss = F.cross_entropy(network(images), labels, label_smoothing=0.1)
                clock.mark()
                loss.backward()
                clock.mark()
                optimizer.step()
                scheduler.step()
                clock.mark()
                losses.append(loss.detach())
                step += 1
                display.advance()
                if step == last:
                    break

            train_loss = ub.allreduce(torch.stack(losses).mean(), op=ub.Average, name="train_loss")
            if args.daso:
                optimizer.end_epoch(train_loss)
                optimizer.synchronize_nodes()  # rank 0 saves for all
            share = evaluate(model, test_x[rank::size], test_y[rank::size])
            test_loss, right, count = ub.allreduce(share, op=ub.Sum, name="test").tolist()
            result = {
                "epoch": epoch + 1,
                "step": step,
                "train_loss": train_loss.item(),
                "test_loss": test_loss / count,
                "test_accuracy": right / count,
            }
            history.append(result)
            display.line(
                "epoch {epoch:2d}  step {step:4d}  train loss {train_loss:.4f}  "
                "test loss {test_loss:.4f}  test accuracy {test_accuracy:.2%}".format(**result)
            )
            if args.checkpoint and rank == 0:
                save_checkpoint(args.checkpoint, model, optimizer, step, settings(args))

    if rank == 0:
        finish(args, ub, display, clock, model, history)


def main() -> None:
    """Starts and ends this worker."""
    args = parser(str(__doc__).splitlines()[0], epochs=15, batch_size=64, lr=2e-3).parse_args()
    ub = library(args)
    ub.init()
    train(args, ub)
    ub.shutdown()


if __name__ == "__main__":
    main()

"""Trains a small byte-level GPT on the source of Python's standard library, usbyte or plain DDP.

    usbyterun -np 2 python examples/char_gpt.py
    torchrun --nproc-per-node 2 examples/char_gpt.py --ddp

The batch size is global: any number of workers follows the loss curve of a single process.
"""

import argparse
import hashlib
import sysconfig
from collections import deque
from collections.abc import Iterable
from pathlib import Path
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
)
from _gpt import GPT, Shape
from _report import Display, StepClock, finish
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    options = parser(str(__doc__).splitlines()[0], epochs=2, batch_size=16, lr=2e-3)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--heads", type=int, default=4)
    options.add_argument("--context", type=int, default=128, help="bytes the model sees at once")
    options.add_argument("--text-bytes", type=int, default=400_000, help="of training text")
    options.add_argument("--log-every", type=int, default=10, help="steps per train loss, a mean")
    return options.parse_args()


def load_text(size: int, context: int) -> tuple[Tensor, Tensor, str]:
    """Reads the standard library's top-level modules in the order of their names.

    Returns:
        Training windows and validation windows, (n, context + 1) of uint8, each overlapping the
        next by one byte; and a digest of both. Every tenth file is for validation.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train = b"".join(path.read_bytes() for i, path in enumerate(files) if i % 10 != 9)[:size]
    valid = b"".join(path.read_bytes() for path in files[9::10])[: size // 10]
    digest = hashlib.sha256(train + b"\0" + valid).hexdigest()

    def windows(text: bytes) -> Tensor:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context)

    return windows(train), windows(valid), digest


def loss_of(network: nn.Module, windows: Tensor, reduction: str = "mean") -> Tensor:
    """Returns the cross entropy of each next byte in nats; windows is (batch, context + 1)."""
    windows = windows.long()
    logits = network(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, batch_size: int) -> Tensor:
    """Returns (summed loss, number of bytes)."""
    model.eval()
    result = torch.zeros(2, dtype=torch.float64, device=windows.device)
    for batch in windows.split(batch_size):
        result[0] += loss_of(model, batch, reduction="sum")
        result[1] += batch[:, 1:].numel()
    return result


def average(losses: Iterable[Tensor], ub: ModuleType) -> float:
    """Returns the mean of the last losses over all workers."""
    mean = torch.stack(list(losses)).mean()
    return float(ub.allreduce(mean, op=ub.Average, name="train_loss"))


def train(args: argparse.Namespace, ub: ModuleType) -> None:
    """Trains, evaluates after each epoch and reports."""
    device = set_up(args, ub)
    rank, size = ub.rank(), ub.size()

    text, valid, digest = load_text(args.text_bytes, args.context)
    if ub.broadcast_object(digest, root_rank=0) != digest:
        raise RuntimeError(f"rank {rank} has another standard library, so text, than rank 0")
    text, valid = text.to(device), valid.to(device)
    batches = Batches(len(text), args.batch_size, args.seed, rank, size)
    total = args.epochs * batches.per_epoch
    last = min(total, args.steps or total)
    fixed = settings(args) | {"text": digest}

    model = GPT(Shape(args.layers, args.width, args.heads, args.context)).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step = 0
    if args.resume and rank == 0:
        step = load_checkpoint(args.checkpoint, model, optimizer, fixed)

    network = DistributedDataParallel(model) if args.ddp else model
    optimizer = ub.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        overlap=args.overlap,
        policy=args.policy,
    )
    index = next(batches.epoch(0))

    def warm_up() -> None:
        optimizer.zero_grad()
        loss_of(network, text[index]).backward()
        optimizer.step()

    rehearse(model, optimizer, warm_up, args.warmup)
    ub.broadcast_parameters(model.state_dict(), root_rank=0)
    ub.broadcast_optimizer_state(optimizer, root_rank=0)
    step = ub.broadcast_object(step, root_rank=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(total), step - 1)

    clock = StepClock(device)
    history: list[dict[str, Any]] = []
    losses: deque[Tensor] = deque(maxlen=args.log_every)
    with Display(rank, step, last) as display:
        while step < last:
            epoch = step // batches.per_epoch
            model.train()
            for index in batches.epoch(epoch, skip=step % batches.per_epoch):
                windows = text[index]
                clock.start()
                optimizer.zero_grad()
                loss = loss_of(network, windows)
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
                    train_loss = average(losses, ub)
                    history.append({"step": step, "train_loss": train_loss})
                    display.line(f"step {step:5d}  train loss {train_loss:.4f}")
                if step == last:
                    break

            share = evaluate(model, valid[rank::size], args.batch_size // size)
            valid_loss, count = ub.allreduce(share, op=ub.Sum, name="validation").tolist()
            result = {
                "epoch": epoch + 1,
                "step": step,
                "train_loss": average(losses, ub),
                "validation_loss": valid_loss / count,
            }
            history.append(result)
            display.line(
                "step {step:5d}  train loss {train_loss:.4f}  "
                "validation loss {validation_loss:.4f}  epoch {epoch}".format(**result)
            )
            if args.checkpoint and rank == 0:
                save_checkpoint(args.checkpoint, model, optimizer, step, fixed)

    if rank == 0:
        finish(args, ub, display, clock, model, history)


def main() -> None:
    """Starts and ends this worker."""
    args = arguments()
    ub = library(args)
    ub.init()
    train(args, ub)
    ub.shutdown()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What the examples need besides the model and the loop: options, shards, checkpoints."""

import argparse
import copy
import glob
import importlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Options that say where and how far to run, not what is computed: they may change on --resume.
_RUN_OPTIONS = {
    *("ddp", "overlap", "policy", "device", "steps", "checkpoint", "resume", "json"),
    *("warmup", "log_every"),
}


def parser(description: str, *, epochs: int, batch_size: int, lr: float) -> argparse.ArgumentParser:
    """Returns a parser with the options that all examples share."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = result.add_argument
    add("--ddp", action="store_true", help="plain PyTorch DDP, for comparison")
    add("--overlap", choices=["auto", "forward", "backward"], default="auto", help="usbyte only")
    add("--policy", help="usbyte only: bytescheduler, ddp, wfbp, ...; None: the library's choice")
    add("--daso", action="store_true", help="nodes exchange parameters late: other results")
    add("--epochs", type=_count, default=epochs, help="passes over the data; sets the LR schedule")
    add("--steps", type=_count, help="stop once this many steps are done; the schedule stays")
    add("--batch-size", type=_count, default=batch_size, help="samples per step, of all workers")
    add("--lr", type=float, default=lr, help="peak learning rate")
    add("--seed", type=int, default=0, help="of the first weights and of the sample order")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--checkpoint", type=Path, help="written after every epoch and at the end")
    add("--resume", action="store_true", help="continue from --checkpoint, if it is there")
    add("--json", type=Path, help="where to write the results")
    add(
        "--warmup",
        type=int,
        default=10,
        help="steps that are made and undone before training, at least",
    )
    return result


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def library(args: argparse.Namespace) -> ModuleType:
    """Returns `usbyte.torch`, or with `--ddp` a module with the same names over plain DDP."""
    if args.resume and not args.checkpoint:
        raise ValueError("--resume needs --checkpoint FILE")
    if args.ddp and args.daso:
        raise ValueError("--daso is usbyte's: leave out --ddp")
    return importlib.import_module("_ddp" if args.ddp else "usbyte.torch")


def set_up(args: argparse.Namespace, ub: ModuleType) -> torch.device:
    """Seeds this process, gives it its share of the cores and returns its device."""
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True
    if "OMP_NUM_THREADS" not in os.environ and ub.local_size() > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ub.local_size()))
    enough = torch.cuda.device_count() >= ub.local_size()
    if args.device == "cpu" or (args.device == "auto" and not enough):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; leave it out to train on the CPU")
    index = ub.local_rank() % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def wrap(
    args: argparse.Namespace, ub: ModuleType, optimizer: Optimizer, model: nn.Module, losses: int
) -> Any:
    """Returns the optimizer that knows of the other workers.

    Args:
        args: The options.
        ub: `usbyte.torch` or its stand-in.
        optimizer: To be wrapped.
        model: Whose parameters it has.
        losses: How often `end_epoch` will be told a loss until training ends, with `--daso`.
    """
    names = model.named_parameters()
    if args.daso:
        synchronous = losses // 8
        return ub.DasoOptimizer(
            optimizer,
            named_parameters=names,
            policy=args.policy,
            total_epochs=max(1, losses),
            warmup_epochs=synchronous,
            cooldown_epochs=synchronous,
        )
    return ub.DistributedOptimizer(
        optimizer, named_parameters=names, overlap=args.overlap, policy=args.policy
    )


class Batches:
    """Cuts each epoch's sample order into global batches and those into equal shares.

    The order depends on the seed and the epoch alone. So any number of workers makes the same
    global batches, every worker makes as many steps, and a resumed run needs no sampler state.
    """

    def __init__(self, samples: int, batch_size: int, seed: int, rank: int, size: int) -> None:
        if batch_size % size:
            raise ValueError(f"--batch-size {batch_size} does not divide over {size} workers")
        if samples < batch_size:
            raise ValueError(f"--batch-size {batch_size} is above the {samples} samples")
        self.per_epoch = samples // batch_size
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._rank, self._size = rank, size

    def epoch(self, number: int, skip: int = 0) -> Iterator[Tensor]:
        """Yields this worker's sample indices, shape (batch_size / size,), for each step."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        order = torch.randperm(self._samples, generator=generator)
        for batch in order.split(self._batch_size)[skip : self.per_epoch]:
            yield batch[self._rank :: self._size]


def warmup_cosine(total: int) -> Callable[[int], float]:
    """Returns the learning rate factor: linear over the first twentieth, then a cosine to 0."""
    warmup = max(1, total // 20)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, total - warmup))

    return factor


def rehearse(model: nn.Module, optimizer: Optimizer, step: Callable[[], None], least: int) -> None:
    """Calls `step` `least` times, more until usbyte's plan has settled, and undoes it all.

    A script of your own needs none of this. Both usbyte and DDP make their first steps on a
    provisional plan and then lay the gradients out anew, by what they saw; usbyte then tries some
    plans. With three workers or more another layout sums in another order, so a resumed run could
    differ from one never stopped in the last bit. Here both have settled before the first step that
    counts, and the step times hold no warm-up either.
    """
    if not least:
        return
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    made = 0
    while made < least or not getattr(optimizer, "settled", True):
        step()
        made += 1
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    optimizer.zero_grad()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that a resumed run must repeat."""
    return {name: value for name, value in vars(args).items() if name not in _RUN_OPTIONS}


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer, step: int, settings: dict[str, Any]
) -> None:
    """Replaces `path` as a whole: whoever reads it finds the old checkpoint or the new one.

    Nothing in training draws random numbers after the first weights, and the sample order and
    the learning rate follow from `step`: so there is no generator or scheduler to save.
    """
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "settings": settings,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        left.unlink()  # by a process that was killed while it saved
    # os.replace is atomic only inside one file system.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer, settings: dict[str, Any]
) -> int:
    """Loads a checkpoint into model and optimizer and returns the number of steps done.

    Where there is none yet, training begins: so the command with `--resume` is the same for the
    first start and for every one after a fault.

    Raises:
        ValueError: The file is no whole checkpoint, or it was made with other settings.
    """
    if not path.exists():
        return 0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = state["settings"]
    except (EOFError, KeyError, OSError, RuntimeError, TypeError, UnpicklingError) as error:
        raise ValueError(
            f"{path} is no checkpoint of this script, or was cut short; name another with "
            "--checkpoint, or remove it to begin anew"
        ) from error
    changed = [
        f"{name} was {saved.get(name)!r} and is {settings.get(name)!r}"
        for name in sorted(saved.keys() | settings.keys())
        if saved.get(name) != settings.get(name)
    ]
    if changed:
        raise ValueError(f"{path} cannot be continued: {'; '.join(changed)}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])

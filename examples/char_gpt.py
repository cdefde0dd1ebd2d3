# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte-level GPT on the source of Python's standard library, usbyte or plain DDP.

    usbyterun -np 2 python examples/char_gpt.py
    torchrun --nproc-per-node 2 examples/char_gpt.py --ddp

The batch size is global: any number of workers follows the loss curve of a single process.
"""

import argparse
import hashlib
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from _common import library, parser, set_up
from _gpt import GPT, Shape
from _loop import Job, train
from torch import Tensor, nn


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


def evaluate(model: nn.Module, windows: Tensor, batch_size: int) -> Tensor:
    """Returns (summed loss, number of bytes)."""
    result = torch.zeros(2, dtype=torch.float64, device=windows.device)
    for batch in windows.split(batch_size):
        result[0] += loss_of(model, batch, reduction="sum")
        result[1] += batch[:, 1:].numel()
    return result


def job(args: argparse.Namespace, ub: ModuleType, device: torch.device) -> Job:
    """Returns what is trained."""
    text, valid, digest = load_text(args.text_bytes, args.context)
    text, valid = text.to(device), valid.to(device)
    model = GPT(Shape(args.layers, args.width, args.heads, args.context)).to(device)
    share, batch_size = valid[ub.rank() :: ub.size()], args.batch_size // ub.size()
    return Job(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=args.lr),
        samples=len(text),
        digest=digest,
        loss=lambda network, index, _: loss_of(network, text[index]),
        evaluate=lambda: evaluate(model, share, batch_size),
        measures=("validation_loss",),
    )


def main() -> None:
    """Starts and ends this worker."""
    args = arguments()
    ub = library(args)
    ub.init()
    device = set_up(args, ub)
    train(args, ub, device, job(args, ub, device))
    ub.shutdown()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What is trained: the models and data of the examples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import usbyte.torch as ub

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")


@dataclass(frozen=True)
class Job:
    """A model, its data, and how it is trained without compression.

    Attributes:
        name: What people call it.
        make_model: From torch's generator.
        make_optimizer: From parameters and learning rate.
        optimizer: What people call that.
        lr: Learning rate at its peak.
        samples: Number of training samples.
        batch: Samples of a step, over all ranks.
        steps: How long it is trained without compression.
        times_as_long: How many times as long others are, until one reaches what that has reached.
        loss: Of model and sample indices of this rank; a mean.
        score: Of the model on held-out data: this rank's sum and count, float64 of shape (2,), for
            rank and size.
        metric: What the score is called.
        percent: The score is a share that should be large; else a loss in nats that should be
            small.
        tolerance: By how much a score may be worse than the uncompressed one and count as reached.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    optimizer: str
    lr: float
    samples: int
    batch: int
    steps: int
    times_as_long: tuple[int, ...]
    loss: Callable[[nn.Module, Tensor], Tensor]
    score: Callable[[nn.Module, int, int], Tensor]
    metric: str
    percent: bool
    tolerance: float

    def format(self, value: float, sign: str = "") -> str:
        """Writes a score or a difference of scores."""
        digits, unit = (2, " %") if self.percent else (4, "")
        rounded = round(value * (100 if self.percent else 1), digits) + 0.0  # no -0.00
        return f"{rounded:{sign}.{digits}f}{unit}"

    def worse_by(self, score: float, than: float) -> float:
        """How much worse a score is than another; negative where it is better."""
        return than - score if self.percent else score - than

    def evaluate(self, model: nn.Module) -> float:
        """The score, over all ranks. Collective."""
        model.eval()
        with torch.no_grad():
            total = ub.allreduce(self.score(model, ub.rank(), ub.size()), op=ub.Sum, name="score")
        model.train()
        return float(total[0] / total[1])


def digits(quick: bool) -> Job:
    """A CNN on scikit-learn's digits, by SGD with momentum, as theory of error feedback has it."""
    _find_examples()
    try:
        from digits import build_model, evaluate, load_data
    except ImportError as error:
        raise click.ClickException(
            f"the digits cannot be loaded ({error}); install what the examples need: "
            "pip install 'usbyte[examples]'"
        ) from error
    images, labels, test_images, test_labels = load_data()

    def loss(model: nn.Module, index: Tensor) -> Tensor:
        return F.cross_entropy(model(images[index]), labels[index], label_smoothing=0.1)

    def score(model: nn.Module, rank: int, size: int) -> Tensor:
        return evaluate(model, test_images[rank::size], test_labels[rank::size])[1:]

    return Job(
        "digits", build_model,
        lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9), "SGD, momentum 0.9",
        lr=0.1, samples=len(images), batch=64, steps=10 if quick else 330, times_as_long=(1,),
        loss=loss, score=score,
        metric="test accuracy", percent=True, tolerance=0.01,
    )  # fmt: skip


def char_gpt(quick: bool) -> Job:
    """A small GPT on Python's own source, by AdamW."""
    return _char_gpt(
        "char_gpt", lambda params, lr: torch.optim.AdamW(params, lr=lr), "AdamW", 2e-3, quick
    )


def char_gpt_sgd(quick: bool) -> Job:
    """The same by SGD with momentum, as theory of error feedback has it."""
    return _char_gpt(
        "char_gpt_sgd",
        lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
        "SGD, momentum 0.9",
        0.05,
        quick,
    )


def _char_gpt(
    name: str,
    make_optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer],
    optimizer: str,
    lr: float,
    quick: bool,
) -> Job:
    _find_examples()
    from _gpt import GPT, Shape
    from char_gpt import evaluate, load_text, loss_of

    shape = Shape(1, 32, 2, 32) if quick else Shape(3, 128, 4, 64)
    text, valid, digest = load_text(20_000 if quick else 400_000, shape.context)
    if ub.broadcast_object(digest, root_rank=0) != digest:
        raise click.ClickException("ranks have different standard libraries, so different text")

    def score(model: nn.Module, rank: int, size: int) -> Tensor:
        return evaluate(model, valid[rank::size], 16)

    return Job(
        name, lambda: GPT(shape), make_optimizer, optimizer,
        lr=lr, samples=len(text), batch=16, steps=10 if quick else 400, times_as_long=(1, 2, 4),
        loss=lambda model, index: loss_of(model, text[index]), score=score,
        metric="validation loss", percent=False, tolerance=0.05,
    )  # fmt: skip


def _find_examples() -> None:
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)


#: By name; `quick` makes them tiny.
JOBS: dict[str, Callable[[bool], Job]] = {
    "digits": digits,
    "char_gpt": char_gpt,
    "char_gpt_sgd": char_gpt_sgd,
}

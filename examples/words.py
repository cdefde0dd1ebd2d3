# SPDX-License-Identifier: Apache-2.0
"""Learns vectors of the words in Python's standard library, with usbyte or with plain DDP.

    usbyterun -np 2 python examples/words.py
    torchrun --nproc-per-node 2 examples/words.py --ddp

A word is told from its neighbours: a continuous bag of words with negative sampling (Mikolov et
al., "Efficient Estimation of Word Representations in Vector Space" and "Distributed
Representations of Words and Phrases and their Compositionality", 2013). A batch has few of the
words, so that gradients are sparse: only rows of words that it has travel. Plain DDP may abort now
and then, for a fault in torch that docs/sparse.md tells of.
"""

import argparse
import hashlib
import re
import sysconfig
from collections import Counter
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from _common import library, parser, set_up
from _loop import Job, train
from torch import Tensor, nn

_WORD = re.compile(rb"[A-Za-z_]\w*")
_FREQUENT = 1e-4  # share of the text above which words are left out at times
_FLATTER = 0.75  # power of the frequency by which wrong words are drawn


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    options = parser(str(__doc__).splitlines()[0], epochs=2, batch_size=2048, lr=0.1)
    options.add_argument("--vocabulary", type=int, default=60_000, help="words, at most")
    options.add_argument("--width", type=int, default=128, help="of a vector")
    options.add_argument("--window", type=int, default=5, help="neighbours on either side")
    options.add_argument("--noise", type=int, default=10, help="wrong words for each right one")
    options.add_argument("--text-bytes", type=int, default=1 << 30, help="of training text")
    options.add_argument("--log-every", type=int, default=50, help="steps per train loss, a mean")
    return options.parse_args()


class Text:
    """The words of the standard library's modules and packages, as numbers by their frequency.

    Every tenth file, in the order of their names, is for validation.

    Attributes:
        words: By number, the most frequent first.
        train: Numbers of the words in their order; very frequent ones are left out at times.
        valid: Likewise, with all of them.
        shares: Of each word in all of the training text.
        digest: Of both texts.
    """

    def __init__(self, size: int, vocabulary: int) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(
            path
            for path in library.rglob("*.py")
            if not {"site-packages", "dist-packages"} & set(path.parts)
        )
        train = b"\n".join(path.read_bytes() for i, path in enumerate(files) if i % 10 != 9)[:size]
        valid = b"\n".join(path.read_bytes() for path in files[9::10])[: size // 10]
        self.digest = hashlib.sha256(train + b"\0" + valid).hexdigest()
        found = _WORD.findall(train)
        counts = Counter(found)
        self.words = sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary]
        number = {word: i for i, word in enumerate(self.words)}

        def numbers(words: list[bytes]) -> Tensor:
            return torch.tensor([number[word] for word in words if word in number])

        self.valid = numbers(_WORD.findall(valid))
        every = numbers(found)
        self.shares = every.bincount(minlength=len(self.words)).double() / len(every)
        kept = (_FREQUENT / self.shares).sqrt()[every]
        draws = torch.rand(len(every), generator=torch.Generator().manual_seed(0))
        self.train = every[draws < kept]


class Vectors(nn.Module):
    """Two vectors for each word: as a neighbour, and as the one that is looked for."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.neighbours = nn.EmbeddingBag(words, width, mode="mean", sparse=True)
        self.words = nn.Embedding(words, width, sparse=True)
        nn.init.uniform_(self.neighbours.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.words.weight)

    def forward(self, neighbours: Tensor, candidates: Tensor) -> Tensor:
        """Returns a score for each candidate, (batch, candidates).

        Args:
            neighbours: Numbers of words, (batch, neighbours).
            candidates: Likewise, (batch, candidates).
        """
        return torch.einsum("bw,bcw->bc", self.neighbours(neighbours), self.words(candidates))


class Windows:
    """Windows of text: a word in the middle, its neighbours, and wrong words in its place."""

    def __init__(self, text: Tensor, shares: Tensor, window: int, noise: int) -> None:
        self._windows = text.unfold(0, 2 * window + 1, 1)
        self._middle, self._noise = window, noise
        self._cumulative = (shares**_FLATTER).cumsum(0)

    def __len__(self) -> int:
        return len(self._windows)

    def of(self, index: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Returns neighbours and candidates, the right one first.

        Args:
            index: Of the windows, (batch,).
            draw: What decides the wrong words: from 0 to 1, (batch, noise).
        """
        windows = self._windows[index]
        wrong = torch.searchsorted(self._cumulative, draw * self._cumulative[-1])
        wrong.clamp_(max=len(self._cumulative) - 1)
        middle = windows[:, self._middle : self._middle + 1]
        around = torch.cat([windows[:, : self._middle], windows[:, self._middle + 1 :]], dim=1)
        return around, torch.cat([middle, wrong], dim=1)

    def draws(self, seed: int, count: int) -> Tensor:
        """Returns what decides the wrong words of so many windows."""
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(count, self._noise, generator=generator, dtype=torch.float64)


def losses_of(scores: Tensor) -> Tensor:
    """Returns -log of the chance to tell the right word, in column 0, and each wrong one."""
    return -(F.logsigmoid(scores[:, 0]) + F.logsigmoid(-scores[:, 1:]).sum(dim=1))


def evaluate(model: nn.Module, windows: Windows, index: Tensor, draws: Tensor) -> Tensor:
    """Returns (summed loss, windows whose word scores highest, number of windows)."""
    result = torch.zeros(3, dtype=torch.float64)
    for part, draw in zip(index.split(4096), draws.split(4096), strict=True):
        scores = model(*windows.of(part, draw))
        best = (scores[:, :1] > scores[:, 1:]).all(dim=1)
        result += torch.tensor([losses_of(scores).sum(), best.sum(), len(part)])
    return result


def job(args: argparse.Namespace, ub: ModuleType, device: torch.device) -> Job:
    """Returns what is trained."""
    text = Text(args.text_bytes, args.vocabulary)
    model = Vectors(len(text.words), args.width)
    windows = Windows(text.train, text.shares, args.window, args.noise)
    held_out = Windows(text.valid, text.shares, args.window, args.noise)
    rank, size = ub.rank(), ub.size()
    share = torch.arange(len(held_out))[rank::size]
    shared_draws = held_out.draws(0, len(held_out))[rank::size]

    def loss(network: nn.Module, index: Tensor, step: int) -> Tensor:
        # All workers draw for the whole batch, so that their number does not matter.
        draw = windows.draws(args.seed * 1_000_003 + step, args.batch_size)[rank::size]
        return losses_of(network(*windows.of(index, draw))).mean()

    return Job(
        model=model,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=args.lr),
        samples=len(windows),
        digest=text.digest,
        loss=loss,
        evaluate=lambda: evaluate(model, held_out, share, shared_draws),
        measures=("validation_loss", "validation_accuracy"),
    )


def main() -> None:
    """Starts and ends this worker."""
    args = arguments()
    if args.device == "cuda":
        raise ValueError("sparse gradients travel on the CPU: leave out --device cuda")
    args.device = "cpu"
    ub = library(args)
    ub.init()
    device = set_up(args, ub)
    train(args, ub, device, job(args, ub, device))
    ub.shutdown()


if __name__ == "__main__":
    main()

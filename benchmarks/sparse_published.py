# SPDX-License-Identifier: Apache-2.0
"""Published figures of Zen beside what the schemes' cost formulas make of them.

    python benchmarks/sparse_published.py -o docs/reproduced_sparse.md

Nothing is sent: densities follow from Zipf's law, bytes from the formulas of `csrc/sparse`.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

from _pages import deliver, output_option
from usbyte import __version__, _core
from usbyte.cli._tables import in_markdown

_NODES, _GPUS = 16, 8  # of each node
_RATES = (25, 100)  # Gb/s
_FIRST_EIGHTH = 0.6  # published share of a GPU's non-zeros in the first of 8 equal ranges
_SAMPLE = 100_000  # rows that stand for a matrix
_BLOCK = 256  # elements that OmniReduce sends together; rows are no narrower
_BASELINES = ("dense", "agsparse", "sparcml", "omnireduce", "sparse_ps")
_OURS = ("zen", "hierarchical")
_READINGS = ("a GPU for each node", "nodes add up first")


@dataclass(frozen=True)
class Model:
    """Published of a model's embeddings.

    Attributes:
        name: Of the model.
        elements: All of them.
        density: Share of them that one GPU's gradient has.
        gain: Published throughput over the best baseline's, at 25 Gb/s.
        over: Published factors over baselines, by their name here.
        exponent: Of the Zipf law of the rows; None for the one that has the published share in the
            first range.
    """

    name: str
    elements: int
    density: float
    gain: float
    over: Mapping[str, float] = field(default_factory=dict)
    exponent: float | None = None


def _drawn(vocabulary: int, tokens: int) -> float:
    """Share of a vocabulary that so many tokens hold, drawn by Zipf's law with exponent 1."""
    law = 1 / np.arange(1, vocabulary + 1, dtype=np.float64)
    return float(-np.expm1(tokens * np.log1p(-law / law.sum())).mean())


_TOKENS = 8192  # of a GPU's batch, assumed for language models
MODELS = (
    Model("LSTM", 406_000_000, 0.0113, 1.67, {"dense": 6.77, "omnireduce": 2.48}),
    Model("DeepFM", 214_000_000, 0.0280, 1.44, {"dense": 2.10}),
    Model("NMT", 112_000_000, 0.0247, 1.51),
    Model("Llama3.2-3B", 128_256 * 3072, _drawn(128_256, _TOKENS), 1.68, exponent=1.0),
)  # fmt: skip
_MOST_OVER_SPARCML = 2.82  # published, over all models
_MOST_IN_COMMUNICATION = 5.09  # published, over the state of the art

_HEAD = """# Zen's published figures, reproduced by cost formulas

Written by `{command}`: usbyte {version}, Python {python}, {date}. Nothing was sent: a scheme \
takes what the bytes of its formula (`csrc/sparse`) take a link of {nodes} nodes, without startups \
and without what hashing and adding up take. Published (OSDI 2025) are sizes and densities of the \
embeddings of LSTM, DeepFM and NMT, and that a GPU has over 60 % of its non-zeros in the first of \
8 equal ranges. What is not published here follows from that: rows are drawn by Zipf's law, whose \
exponent is the one that puts {share:.0%} there, independently by each GPU. No densities of \
language models are at hand. For Llama3.2-3B, {tokens:,} tokens a GPU are assumed, drawn by Zipf's \
law with exponent 1.

Two readings, since a node of {gpus} GPUs adds up before it sends and densities are of one GPU: \
*a GPU for each node* takes the published density for that of a node, *nodes add up first* that of \
{gpus} GPUs together. Non-zeros are single elements with a number of 4 bytes each, as in Zen's \
formulas; OmniReduce's blocks of {block} elements are rows, so that they are full or empty.

## Communication

Times in ms, at {rate} Gb/s; at {other} Gb/s they are a quarter, and all factors are the same. \
*d*: share of a node's gradient that is not zero; *gamma*: how much denser the sum of all nodes \
is; *skew*: a node's non-zeros in the fullest of as many ranges as nodes, over their mean.

"""

_CHECKED = """
## What can be checked

Published are a most of {most} in communication time and of 2.48x in throughput over the state of \
the art, and factors over single baselines. Communication alone must gain at least what throughput \
gains: a smaller factor in both readings contradicts the published one, or what is assumed here of \
the rows. Of 6.77x and 2.10x it is not known here whether they are of throughput. {contradicted}

"""

_DERIVED = """
## Derived from published gains, not checked

The published gain in throughput over the best baseline depends on the time of a step that is not \
communication, which is not published here. The table gives the time that makes the published gain \
come out: it is fitted to it and checks nothing. For LSTM, it implies a gain over OmniReduce that \
can be compared with the published one.

"""


def chances(density: float, exponent: float) -> np.ndarray:
    """Of each row, by rank, to be in one GPU's gradient: of so many draws by Zipf's law."""
    law = np.arange(1, _SAMPLE + 1, dtype=np.float64) ** -exponent
    law /= law.sum()
    log_missed = np.log1p(-law)
    draws = np.exp(_bisect(lambda n: -np.expm1(np.exp(n) * log_missed).mean(), density, 0.0, 60.0))
    # Short of certain, so that nothing below divides by zero.
    return np.minimum(-np.expm1(draws * log_missed), 1 - 1e-12)


def fitted(density: float) -> tuple[float, np.ndarray]:
    """The exponent that puts the published share into the first range; and the chances by it."""

    def first(exponent: float) -> float:
        found = chances(density, exponent)
        return float(found[: _SAMPLE // 8].sum() / found.sum())

    exponent = _bisect(first, _FIRST_EIGHTH, 0.0, 3.0)
    return exponent, chances(density, exponent)


def _bisect(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Case:
    """A model on all nodes.

    Attributes:
        model: Which.
        reading: What a node's gradient is.
        densities: Of sums of 1, 2, ... nodes.
        skew: A node's non-zeros in the fullest of as many ranges as nodes, over their mean.
    """

    model: Model
    reading: str
    densities: list[float]
    skew: float

    def seconds(self, scheme: str, gbit: float) -> float:
        """What it takes a link."""
        width = _BLOCK if scheme == "omnireduce" else 1
        rows = self.model.elements // width
        sent = _core.sparse_bytes(scheme, rows, width, "float32", self.densities, self.skew)
        return sent * 8e-9 / gbit


def cases() -> Iterator[Case]:
    """Every model, read in both ways."""
    for model in MODELS:
        of_gpu = (
            fitted(model.density)[1]
            if model.exponent is None
            else chances(model.density, model.exponent)
        )
        for reading, gpus in zip(_READINGS, (1, _GPUS), strict=True):
            of_node = -np.expm1(gpus * np.log1p(-of_gpu))
            sums = [
                float(-np.expm1(k * gpus * np.log1p(-of_gpu)).mean()) for k in range(1, _NODES + 1)
            ]
            skew = float(of_node[: _SAMPLE // _NODES].mean() / of_node.mean())
            yield Case(model, reading, sums, skew)


def communication(found: list[Case]) -> Iterator[tuple[str, ...]]:
    """Rows of the first table."""
    for case in found:
        seconds = {s: case.seconds(s, _RATES[0]) for s in (*_OURS, *_BASELINES)}
        zen = seconds["zen"]
        best = min(_BASELINES, key=seconds.__getitem__)
        gamma = case.densities[-1] / case.densities[0]
        yield (
            case.model.name, case.reading, f"{100 * case.densities[0]:.2f}", f"{gamma:.2f}",
            f"{case.skew:.1f}", *(f"{1e3 * seconds[s]:.0f}" for s in (*_OURS, *_BASELINES)),
            f"{seconds[best] / zen:.2f}x over {best}", f"{seconds['omnireduce'] / zen:.2f}x",
            f"{seconds['dense'] / zen:.2f}x",
        )  # fmt: skip


def checked(found: list[Case]) -> Iterator[tuple[str, ...]]:
    """Rows of the second table: factors that are published over one baseline."""
    for model in MODELS:
        readings = [case for case in found if case.model is model]
        for baseline, factor in model.over.items():
            ours = [
                case.seconds(baseline, _RATES[0]) / case.seconds("zen", _RATES[0])
                for case in readings
            ]
            reached = [r.reading for r, o in zip(readings, ours, strict=True) if o >= factor]
            yield (
                model.name, baseline, f"{factor:.2f}x", *(f"{o:.2f}x" for o in ours),
                " and ".join(reached) or "neither",
            )  # fmt: skip
    for baseline, factor in (
        ("omnireduce", _MOST_IN_COMMUNICATION),
        ("sparcml", _MOST_OVER_SPARCML),
    ):
        ours = [
            max(
                case.seconds(baseline, _RATES[0]) / case.seconds("zen", _RATES[0])
                for case in found
                if case.reading == reading
            )
            for reading in _READINGS
        ]
        reached = [r for r, o in zip(_READINGS, ours, strict=True) if o >= factor]
        name = "the state of the art, here " * (baseline == "omnireduce") + baseline
        yield (
            "any", name, f"at most {factor:.2f}x", *(f"at most {o:.2f}x" for o in ours),
            " and ".join(reached) or "neither",
        )  # fmt: skip


def derived(found: list[Case]) -> Iterator[tuple[str, ...]]:
    """Rows of the third table: the rest of the step that a published gain implies."""
    for case in found:
        seconds = {s: case.seconds(s, _RATES[0]) for s in ("zen", *_BASELINES)}
        zen, best = seconds["zen"], min(seconds[s] for s in _BASELINES)
        gain = case.model.gain
        rest = (best - gain * zen) / (gain - 1)
        over = case.model.over.get("omnireduce")
        row = (case.model.name, case.reading, f"{gain:.2f}x", f"{best / zen:.2f}x")
        if rest < 0:
            yield *row, "none: communication alone gains less", "", ""
            continue
        implied = (rest + seconds["omnireduce"]) / (rest + zen)
        yield *row, f"{1e3 * rest:.0f}", f"{implied:.2f}x", f"{over:.2f}x" if over else ""


def document(arguments: list[str]) -> str:
    """The whole page."""
    found = list(cases())
    head = _HEAD.format(
        command=shlex.join(["python", "benchmarks/sparse_published.py", *arguments]),
        version=__version__,
        python=platform.python_version(),
        date=datetime.date.today(),
        nodes=_NODES,
        gpus=_GPUS,
        block=_BLOCK,
        share=_FIRST_EIGHTH,
        tokens=_TOKENS,
        rate=_RATES[0],
        other=_RATES[1],
    )
    times = in_markdown(
        ("model", "reading", "d %", "gamma", "skew", *_OURS, *_BASELINES, "zen over the best",
         "over omnireduce", "over dense"),
        communication(found),
    )  # fmt: skip
    factors = in_markdown(
        ("model", "over", "published", *(f"communication, {r}" for r in _READINGS),
         "reached by"),
        checked(found),
    )  # fmt: skip
    rest = in_markdown(
        ("model", "reading", "published gain", "communication alone", "rest of the step, ms",
         "implied over OmniReduce", "published"),
        derived(found),
    )  # fmt: skip
    neither = [" over ".join((row[2], row[1])) for row in checked(found) if row[-1] == "neither"]
    what = _CHECKED.format(
        most=f"{_MOST_IN_COMMUNICATION:.2f}x",
        contradicted=f"Not reached in either reading: {'; '.join(neither) or 'none'}.",
    )
    return f"{head}{times}{what}{factors}{_DERIVED}{rest}"


@click.command(context_settings={"max_content_width": 100})
@output_option
def main(output: Path | None) -> None:
    """Work out what Zen's authors have published, and put both side by side."""
    deliver(document(sys.argv[1:]), output)


if __name__ == "__main__":
    main()

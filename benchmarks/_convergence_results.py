# SPDX-License-Identifier: Apache-2.0
"""What came of training, as a table, as JSON and as curves."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from _convergence_jobs import Job
from _convergence_variants import UNCOMPRESSED, Variant
from usbyte.cli._tables import in_markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = (
    "codec", "{metric}", "against uncompressed", "reached", "steps", "training loss",
    "bytes a step", "ratio", "optimizer",
)  # fmt: skip


@dataclass
class Result:
    """One variant of one job; lists are by seed.

    Attributes:
        lr: Learning rate at its peak.
        optimizer: What it was trained by.
        steps: How long.
        message_bytes: What a rank hands to the network in a step.
        gradient_bytes: The same without compression.
        scores: On held-out data at the end.
        losses: Training losses, means of `every` steps and over ranks.
        seconds: For all seeds.
    """

    lr: float
    optimizer: str
    steps: int
    message_bytes: int = 0
    gradient_bytes: int = 0
    scores: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def score(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.scores)

    @property
    def curve(self) -> list[float]:
        """Training losses, means over seeds."""
        return [statistics.fmean(at) for at in zip(*self.losses, strict=True)]


@dataclass
class Trained:
    """All variants of one job.

    Attributes:
        job: What was trained.
        ranks: On how many.
        every: Steps of a training loss.
        variants: By label.
        results: By label, the uncompressed one among them.
        skipped: Labels of those that the core does not know.
    """

    job: Job
    ranks: int
    every: int
    variants: dict[str, Variant]
    results: dict[str, Result]
    skipped: list[str]

    def behind(self, label: str) -> float:
        """How much worse than uncompressed, over the same seeds; NaN where training diverged."""
        return self.job.worse_by(self.results[label].score, self.results[UNCOMPRESSED].score)

    def reached(self, label: str) -> bool:
        """Whether that is within the tolerance."""
        return self.behind(label) <= self.job.tolerance

    def heading(self) -> str:
        """What was done, and what the columns mean."""
        job, base = self.job, self.results[UNCOMPRESSED]
        spread = statistics.stdev(base.scores) if len(base.scores) > 1 else math.nan
        tried = [f"{times} times" for times in job.times_as_long if times > 1]
        longer = (
            f"; what is not, `feedback=off` aside, is trained anew for {', then '.join(tried)} "
            "as many steps, and its last try is in the table"
            if tried
            else ""
        )
        noise = "" if math.isnan(spread) else f", whose deviation is {job.format(spread)}"
        return (
            f"{job.name}: steps of {job.batch} samples on {self.ranks} ranks, means "
            f"over {len(base.scores)} seed(s){noise}. Reached: {job.metric} at most "
            f"{job.format(job.tolerance)} worse than uncompressed{longer}. Bytes: of the messages "
            "of a rank; ratio: gradients over messages. Beside optimizers: the peak learning rate."
        )

    def rows(self) -> list[list[str]]:
        """Texts for a table."""
        found = []
        for label, result in self.results.items():
            base = self.results[UNCOMPRESSED].score
            found.append(
                [
                    f"`{label}`" if label != UNCOMPRESSED else label,
                    self.job.format(result.score),
                    "" if label == UNCOMPRESSED else self.job.format(result.score - base, "+"),
                    "" if label == UNCOMPRESSED else "yes" if self.reached(label) else "no",
                    str(result.steps),
                    f"{result.curve[-1]:.4f}",
                    str(result.message_bytes),
                    f"{result.gradient_bytes / result.message_bytes:.1f}",
                    f"{result.optimizer}, {result.lr:g}",
                ]
            )
        return found

    def to_markdown(self) -> str:
        """A table for a document."""
        columns = [column.format(metric=self.job.metric) for column in _COLUMNS]
        text = f"{self.heading()}\n\n{in_markdown(columns, self.rows())}"
        if self.skipped:
            names = ", ".join(f"`{name}`" for name in self.skipped)
            text += f"\nNot run, since the installed core does not know them: {names}.\n"
        return text

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for JSON; what is not finite becomes null."""
        rows = {
            label: asdict(result)
            | {
                "reached": self.reached(label),
                "score": result.score,
                "worse_by": self.behind(label),
            }
            for label, result in self.results.items()
        }
        return {
            "job": self.job.name, "batch": self.job.batch,
            "ranks": self.ranks, "metric": self.job.metric, "tolerance": self.job.tolerance,
            "loss_every_steps": self.every, "results": _finite(rows), "skipped": self.skipped,
        }  # fmt: skip

    def _points(self, label: str) -> tuple[list[int], list[float]]:
        curve = self.results[label].curve
        return [self.every * (k + 1) for k in range(len(curve))], curve

    def curves(self) -> Figure:
        """Training losses: a panel for each family of codecs, all with the uncompressed one."""
        from matplotlib.figure import Figure

        families = list(dict.fromkeys(v.family for v in self.variants.values() if v.family))
        figure = Figure(figsize=(4.4 * len(families), 4.2), layout="constrained")
        panels = figure.subplots(1, len(families), squeeze=False, sharey=True)[0]
        base = self.results[UNCOMPRESSED].curve
        for panel, family in zip(panels, families, strict=True):
            panel.plot(*self._points(UNCOMPRESSED), color="black", lw=2.5, alpha=0.4,
                       label=UNCOMPRESSED)  # fmt: skip
            for label, variant in self.variants.items():
                if variant.family == family:
                    style = "--" if "feedback=off" in label else "-"
                    panel.plot(*self._points(label), style, lw=1, label=label)
            panel.set_title(family)
            panel.set_xlabel("step")
            panel.grid(alpha=0.3)
            panel.legend(frameon=False, fontsize=8)
        # A variant that diverges would hide the others.
        panels[0].set_ylim(0.9 * min(base), 1.1 * max(base))
        panels[0].set_ylabel(f"{self.job.name}: training loss")
        return figure


def to_json(trained: Sequence[Trained], facts: dict[str, Any]) -> str:
    """Everything, curves included."""
    root = facts | {"jobs": [one.to_dict() for one in trained]}
    return json.dumps(root, indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

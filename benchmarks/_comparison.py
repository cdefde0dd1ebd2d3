# SPDX-License-Identifier: Apache-2.0
"""What the contenders did, as a table, as Markdown and as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console

import usbyte.torch as ub
from usbyte import _core
from usbyte._util.units import format_cost
from usbyte.cli._tables import for_terminal, in_markdown

_COLUMNS = ("contender", "median s", "min", "max", "predicted s", "against DDP")


@dataclass
class Result:
    """What one contender did.

    Attributes:
        step_s: Seconds of every measured step on rank 0.
        foreseen_s: What usbyte had foreseen for a step, of each turn; empty for others.
        step_j: Joules for a step, of each turn, all machines together; empty without counters.
    """

    step_s: list[float] = field(default_factory=list)
    foreseen_s: list[float] = field(default_factory=list)
    step_j: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Seconds of the middle step."""
        return statistics.median(self.step_s)

    @property
    def predicted_s(self) -> float | None:
        """The middle one of what was foreseen."""
        return statistics.median(self.foreseen_s) if self.foreseen_s else None


@dataclass
class Comparison:
    """All that was found.

    Attributes:
        profile: What was replayed.
        results: By contender.
        skipped: Why others did not run.
        network: Measured by usbyte or given by the user.
        energy: What is counted where energy is.
    """

    profile: _core.Profile
    results: dict[str, Result]
    skipped: dict[str, str]
    network: _core.NetworkModel | None = None
    energy: str = ""

    @property
    def bytes_bound_s(self) -> float | None:
        """The bound of bytes on this network, in seconds; None without a network."""
        return None if self.network is None else _core.bytes_bound_s(self.profile, self.network)

    @property
    def best_ddp(self) -> str | None:
        """The fastest bucket size of DDP."""
        ddp = [name for name in self.results if name.startswith("ddp:")]
        return min(ddp, key=lambda name: self.results[name].median_s, default=None)

    def heading(self) -> str:
        """One line on what was compared."""
        text = (
            f"{self.profile.model or 'job'} on {ub.size()} ranks: "
            f"{self.profile.bytes / 1e6:.1f} MB in {len(self.profile.tensors)} gradients, "
            f"{self.profile.iteration_s:.3f} s of compute, "
        )
        if self.bytes_bound_s is not None and self.network is not None:
            line = self.network.all_reduce[0]
            bound_s = _core.bound_s(self.profile, self.network)
            text += f"bound {bound_s:.3f} s, of bytes alone {self.bytes_bound_s:.3f} s (all_reduce "
            text += f"{format_cost(line.alpha_s, line.beta_s_per_byte, line.overlap_s)}), "
        text += f"energy by {self.energy}, " if self.energy else ""
        return f"{text}torch {torch.__version__}"

    def columns(self) -> tuple[str, ...]:
        """With energy where it was measured."""
        return (*_COLUMNS, "J for a step") if self.energy else _COLUMNS

    def rows(self) -> list[tuple[str, ...]]:
        """Texts for `columns`; of DDP only the best."""
        best = self.best_ddp
        found = []
        for name, result in self.results.items():
            if name.startswith("ddp:") and name != best:
                continue
            label = f"PyTorch DDP, {name[4:]} MiB (best)" if name == best else name
            times = (result.median_s, min(result.step_s), max(result.step_s))
            predicted = "" if result.predicted_s is None else f"{result.predicted_s:.3f}"
            ratio = self.results[best].median_s / result.median_s if best else None
            against = "" if ratio is None else f"{ratio:.2f}x"
            row = (label, *(f"{t:.3f}" for t in times), predicted, against)
            joules = (f"{statistics.median(result.step_j):.1f}",) if self.energy else ()
            found.append((*row, *joules))
        return found

    def to_json(self) -> str:
        """Everything, every step's time included."""
        root: dict[str, Any] = {
            "ranks": ub.size(),
            "torch": torch.__version__,
            "model": self.profile.model,
            "bytes": self.profile.bytes,
            "tensors": len(self.profile.tensors),
            "compute_s": self.profile.iteration_s,
            "bytes_bound_s": self.bytes_bound_s,
            "best_ddp": self.best_ddp,
            "results": {
                name: {
                    "median_s": result.median_s,
                    "predicted_s": result.predicted_s,
                    **asdict(result),
                }
                for name, result in self.results.items()
            },
            "skipped": self.skipped,
            "energy": self.energy,
        }
        root["network"] = json.loads(self.network.to_json()) if self.network else None
        return json.dumps(root, indent=1) + "\n"

    def to_markdown(self) -> str:
        """A table for a document."""
        text = f"{self.heading()}\n\n{in_markdown(self.columns(), self.rows())}"
        return text + "".join(f"\nNot run: {name}: {why}.\n" for name, why in self.skipped.items())

    def show(self) -> None:
        """Prints a table."""
        console = Console(width=120, highlight=False)
        console.print(for_terminal(self.heading(), self.columns(), self.rows(), _COLUMNS[:1]))
        for name, reason in self.skipped.items():
            console.print(f"{name} was not run: {reason}", markup=False)

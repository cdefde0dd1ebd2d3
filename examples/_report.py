# SPDX-License-Identifier: Apache-2.0
"""What rank 0 shows and writes: progress, lines, the step-time table, the results as JSON."""

import argparse
import hashlib
import itertools
import json
import os
import time
from types import ModuleType, TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

PHASES = ("forward", "backward", "step")

_NOTE = (
    "samples/s: global batch / median total. step: optimizer and scheduler. Waiting for the\n"
    "network falls into backward (DDP, overlap backward) or the next forward (overlap forward),\n"
    "so compare the total."
)


class StepClock:
    """Collects when the phases of each training step end, in seconds.

    On a GPU the times are events on the current stream, so that timing never stops the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps: list[list[Any]] = []

    def start(self) -> None:
        """A step begins."""
        self._steps.append([self._now()])

    def mark(self) -> None:
        """The next of `PHASES` ends."""
        self._steps[-1].append(self._now())

    def summary(self) -> dict[str, dict[str, float]]:
        """Returns median, p10 and p90 in milliseconds for each phase and the whole step."""
        if not self._steps:
            return {}
        if self._cuda:
            torch.cuda.synchronize()
        spans = [[self._ms(a, b) for a, b in itertools.pairwise(s)] for s in self._steps]
        columns = torch.tensor(spans, dtype=torch.float64)  # (steps, phases)
        columns = torch.cat([columns, columns.sum(dim=1, keepdim=True)], dim=1)
        at = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
        quantiles = torch.quantile(columns, at, dim=0).T.tolist()
        return {
            phase: dict(zip(("median", "p10", "p90"), row, strict=True))
            for phase, row in zip((*PHASES, "total"), quantiles, strict=True)
        }

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) if self._cuda else 1e3 * (end - begin))


class Display:
    """A progress bar and lines above it on rank 0; lines alone where there is no terminal."""

    def __init__(self, rank: int, first: int, last: int) -> None:
        self.console = Console(quiet=rank != 0, highlight=False)
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=rank != 0 or not self.console.is_terminal,
        )
        self._task = self._progress.add_task("step", total=last, completed=first)

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def advance(self) -> None:
        """One more step is done."""
        self._progress.advance(self._task)

    def line(self, text: str) -> None:
        """Prints a line."""
        self.console.print(text, markup=False, soft_wrap=True)


def finish(
    args: argparse.Namespace,
    ub: ModuleType,
    display: Display,
    clock: StepClock,
    model: nn.Module,
    history: list[dict[str, Any]],
) -> None:
    """Prints the step-time table and writes `--json`; call it on rank 0.

    Args:
        args: The options.
        ub: `usbyte.torch` or its stand-in.
        display: Where to print.
        clock: The times of the steps.
        model: The trained model.
        history: One record for each evaluation, in order.
    """
    times = clock.summary()
    how = "DASO" if args.daso else f"overlap {args.overlap}"
    mode = "ddp" if args.ddp else f"usbyte, {how}, policy {args.policy or 'auto'}"
    workers = f"{ub.size()} worker{'s' if ub.size() > 1 else ''}"
    rate = 1e3 * args.batch_size / times["total"]["median"] if times else None
    if rate:
        display.line(f"\n{mode}: {workers}, {rate:.0f} samples/s. Times on rank 0, in ms:")
        display.console.print(_table(times))
        display.line(_NOTE)
    if args.json:
        report = {
            "mode": "ddp" if args.ddp else "daso" if args.daso else "usbyte",
            "overlap": None if args.ddp or args.daso else args.overlap,
            "policy": None if args.ddp else args.policy,
            "world_size": ub.size(),
            "device": str(next(model.parameters()).device),
            "torch": torch.__version__,
            "step_ms": times,
            "samples_per_second": rate,
            "parameters_sha256": fingerprint(model),
            "final": history[-1] if history else None,
            "history": history,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        temporary = args.json.with_name(f"{args.json.name}.{os.getpid()}.part")
        temporary.write_text(json.dumps(report, indent=2) + "\n")
        temporary.replace(args.json)


def fingerprint(model: nn.Module) -> str:
    """Returns the SHA-256 of all parameters: equal only if they are equal bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _table(times: dict[str, dict[str, float]]) -> Table:
    """Lays out `StepClock.summary()`."""
    table = Table("phase")
    for column in ("median", "p10", "p90"):
        table.add_column(column, justify="right")
    for phase, row in times.items():
        table.add_row(phase, *(f"{value:.2f}" for value in row.values()))
    return table

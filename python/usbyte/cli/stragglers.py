# SPDX-License-Identifier: Apache-2.0
"""`usbyte stragglers`: tells which rank the others wait for, from the traces of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click

from usbyte.cli._tables import for_terminal
from usbyte.cli._traces import Span, read_spans
from usbyte.errors import UsageError

_NOTE = (
    "Late: how long after the first rank this rank has launched an operation; the most of a step's "
    "operations. Waits: time in which the training thread, or its stream, waited for gradients."
)

_EXAMPLES = """\b
Example:
  USBYTE_TIMELINE=trace.%r.json USBYTE_TIMELINE_STEPS=100:120 usbyterun -np 4 python train.py
  usbyte stragglers trace.*.json
"""

#: A rank is called late if it is late by this share of the step in the median.
_NOTABLE = 0.02


class RankDelay(NamedTuple):
    """How late a rank is. Times are seconds in a step.

    Attributes:
        rank: The rank.
        late_s: In the median step, the time by which it launched an op later than the first rank.
        most_late_s: The same in the worst step.
        op: The op that was launched latest in that step, with its parameters.
        step: That step.
        wait_s: Time that the rank waited for gradients, in the median step.
    """

    rank: int
    late_s: float
    most_late_s: float
    op: str
    step: int
    wait_s: float


@click.command(context_settings={"max_content_width": 100}, epilog=_EXAMPLES)
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
def stragglers(traces: Sequence[Path]) -> None:
    """Tell which rank the others wait for.

    TRACES are the files that USBYTE_TIMELINE has written, one of each rank.
    """
    from rich.console import Console

    spans = [span for path in traces for span in read_spans(path)]
    delays, step_s = find_delays(spans), typical_step_s(spans)
    columns = ("rank", "late, ms", "at most", "in step", "waits, ms", "latest at")
    rows = [
        (
            str(delay.rank), f"{delay.late_s * 1e3:.1f}", f"{delay.most_late_s * 1e3:.1f}",
            str(delay.step), f"{delay.wait_s * 1e3:.1f}", delay.op,
        )
        for delay in delays
    ]  # fmt: skip
    console = Console(soft_wrap=True)
    console.print(for_terminal(_NOTE, columns, rows, left=("latest at",)))
    console.print(verdict(delays, step_s), markup=False)


def find_delays(spans: Iterable[Span]) -> list[RankDelay]:
    """Finds how late each rank launches the ops that all ranks have in their traces.

    All ranks complete an op at about the same time. The rank with the shortest op has therefore
    launched it last. That needs no clock that the hosts share.

    Args:
        spans: Bars of the traces of at least two ranks.

    Returns:
        A delay for each rank, in the order of ranks.

    Raises:
        UsageError: The traces are of fewer than two ranks, or share no op.
    """
    took: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
    waits: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    ranks = set()
    for span in spans:
        ranks.add(span.rank)
        if span.kind == "communication":
            took[span.step, span.name][span.rank] = span.end_s - span.start_s
        elif span.kind == "wait":
            waits[span.rank][span.step] += span.end_s - span.start_s
    if len(ranks) < 2:
        raise UsageError(
            f"the traces are of {len(ranks)} ranks, and two are needed: give the files of all "
            "ranks, as USBYTE_TIMELINE=trace.%r.json makes them"
        )
    late: dict[int, dict[int, tuple[float, str]]] = {rank: {} for rank in ranks}
    for (step, name), by_rank in took.items():
        if by_rank.keys() == ranks:
            longest = max(by_rank.values())
            for rank, took_s in by_rank.items():
                delay = (longest - took_s, name)
                late[rank][step] = max(late[rank].get(step, delay), delay)
    if not any(late.values()):
        raise UsageError(
            "no operation is in the traces of all ranks: record the same steps on all of them"
        )
    return [_delay(rank, late[rank], waits[rank]) for rank in sorted(ranks)]


def _delay(
    rank: int, late: Mapping[int, tuple[float, str]], waits: Mapping[int, float]
) -> RankDelay:
    worst = max(late, key=lambda step: late[step])
    most_late_s, op = late[worst]
    typical_s = median(late_s for late_s, _ in late.values())
    waits_s = median(waits.get(step, 0.0) for step in late)
    return RankDelay(rank, typical_s, most_late_s, op, worst, waits_s)


def typical_step_s(spans: Iterable[Span]) -> float | None:
    """Returns the median seconds between the first ops of two steps; None if unknown."""
    firsts: dict[int, dict[int, float]] = defaultdict(dict)
    for span in spans:
        if span.kind == "queue":
            first = firsts[span.rank].get(span.step, span.start_s)
            firsts[span.rank][span.step] = min(first, span.start_s)
    lengths = [
        by_step[step + 1] - start
        for by_step in firsts.values()
        for step, start in by_step.items()
        if step + 1 in by_step
    ]
    return median(lengths) if lengths else None


def verdict(delays: Sequence[RankDelay], step_s: float | None) -> str:
    """Says in a sentence which ranks the others wait for.

    Args:
        delays: The delay of each rank.
        step_s: Seconds of a step; None to give no share of it.
    """
    last = max(delays, key=lambda delay: delay.late_s)
    share = "" if not step_s else f", {last.late_s / step_s:.0%} of a step"
    if step_s and last.late_s < _NOTABLE * step_s:
        return (
            f"No rank is a straggler: none is later than {last.late_s * 1e3:.1f} ms in the median "
            f"step{share}. What ranks wait for is the network."
        )
    return (
        f"The others wait for rank {last.rank}: in the median step it launches an operation "
        f"{last.late_s * 1e3:.1f} ms after the first rank{share}. Look at what that rank computes "
        "or loads in the meantime."
    )

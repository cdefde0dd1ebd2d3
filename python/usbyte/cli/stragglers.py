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
from usbyte.errors import UsageError
from usbyte.report.chrome_trace import Span, read_spans

_NOTE = (
    "Late: how long after the first rank this rank has launched an operation; "
    "the most of a step's operations. Waits: time that the training thread, or its stream, waited "
    "for gradients. Each in the median step, then at most and in which step."
)

_EXAMPLES = """\b
Example:
  USBYTE_TIMELINE=trace.%r.json USBYTE_TIMELINE_STEPS=100:120 usbyterun -np 4 python train.py
  usbyte stragglers trace.*.json
"""

#: Share of a step below which being late, or waiting, is not worth a look.
_NOTABLE = 0.02
#: By so much the clocks of hosts may differ.
_CLOCKS_S = 60.0


class RankDelay(NamedTuple):
    """How late a rank is. Times are seconds in a step.

    Attributes:
        rank: The rank.
        late_s: In the median step, the time by which it launched an op later than the first rank.
        most_late_s: The same in the worst step.
        op: The op that was launched latest in that step, with its parameters.
        step: That step.
        wait_s: Time that the rank waited for gradients, in the median step.
        most_wait_s: The same in the worst step.
        wait_step: That step.
    """

    rank: int
    late_s: float
    most_late_s: float
    op: str
    step: int
    wait_s: float
    most_wait_s: float
    wait_step: int


@click.command(context_settings={"max_content_width": 100}, epilog=_EXAMPLES)
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=1), help="Look at this step alone.")
def stragglers(traces: Sequence[Path], step: int | None) -> None:
    """Tell which rank the others wait for.

    TRACES are the files that USBYTE_TIMELINE has written, one of each rank. They must be of one
    DistributedOptimizer that all these ranks share.
    """
    from rich.console import Console

    by_rank = one_of_each_rank({path: read_spans(path) for path in traces})
    step_s = typical_step_s(by_rank)
    delays = find_delays(by_rank if step is None else only(step, by_rank))
    columns = (
        "rank", "late, ms", "at most", "in step", "waits, ms", "at most", "in step", "latest at",
    )  # fmt: skip
    rows = [
        (
            str(delay.rank), f"{delay.late_s * 1e3:.1f}", f"{delay.most_late_s * 1e3:.1f}",
            str(delay.step), f"{delay.wait_s * 1e3:.1f}", f"{delay.most_wait_s * 1e3:.1f}",
            str(delay.wait_step), delay.op,
        )
        for delay in delays
    ]  # fmt: skip
    console = Console(soft_wrap=True)
    console.print(for_terminal(_NOTE, columns, rows, left=("latest at",)))
    console.print(verdict(delays, step_s), markup=False)


def one_of_each_rank(traces: Mapping[Path, Sequence[Span]]) -> dict[int, Sequence[Span]]:
    """Checks that the traces are of one run and of different ranks; returns the bars by rank.

    Args:
        traces: Bars by file.

    Raises:
        UsageError: They are not; the message names the files.
    """
    files: dict[int, Path] = {}
    for path, spans in traces.items():
        if not spans:
            raise UsageError(f"the trace '{path}' has no steps: record the same ones on all ranks")
        for rank in {span.rank for span in spans}:
            if rank in files:
                raise UsageError(
                    f"'{files[rank]}' and '{path}' are both of rank {rank}: give one file of each"
                )
            files[rank] = path
    if len(files) < 2:
        raise UsageError(
            "two traces are needed to compare ranks: give the files of all ranks, as "
            "USBYTE_TIMELINE=trace.%r.json makes them"
        )
    begins = {path: min(span.start_s for span in spans) for path, spans in traces.items()}
    ends = {path: max(span.end_s for span in spans) for path, spans in traces.items()}
    last, first = max(begins, key=lambda path: begins[path]), min(ends, key=lambda path: ends[path])
    if begins[last] > ends[first] + _CLOCKS_S:
        raise UsageError(
            f"'{first}' ended {begins[last] - ends[first]:.0f} s before '{last}' began: give the "
            "files of one run"
        )
    return {rank: traces[path] for rank, path in sorted(files.items())}


def only(step: int, by_rank: Mapping[int, Sequence[Span]]) -> dict[int, list[Span]]:
    """Returns the bars of one step.

    Raises:
        UsageError: A rank has not recorded it.
    """
    found = {rank: [span for span in spans if span.step == step] for rank, spans in by_rank.items()}
    for rank, spans in by_rank.items():
        if not found[rank]:
            steps = {span.step for span in spans}
            raise UsageError(
                f"the trace of rank {rank} has no step {step}, but steps {min(steps)} to "
                f"{max(steps)}: record it with USBYTE_TIMELINE_STEPS, or give another --step"
            )
    return found


def find_delays(by_rank: Mapping[int, Sequence[Span]]) -> list[RankDelay]:
    """Finds how late each rank launches the ops that all ranks have in their traces.

    All ranks complete an op at about the same time. The rank with the shortest op has therefore
    launched it last. That needs no clock that the hosts share.

    Args:
        by_rank: Bars of the traces of at least two ranks.

    Returns:
        A delay for each rank, in the order of ranks.

    Raises:
        UsageError: The ranks share no op, or take steps with several optimizers.
    """
    took: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
    for rank, spans in by_rank.items():
        for span in spans:
            if span.kind == "communication":
                if rank in took[span.step, span.name]:
                    raise UsageError(
                        f"rank {rank} has '{span.name}' twice in step {span.step}, so that several "
                        "DistributedOptimizers take steps: record steps in which only one does"
                    )
                took[span.step, span.name][rank] = span.end_s - span.start_s
    steps: dict[int, dict[int, tuple[float, str]]] = {}
    for (step, name), took_s in took.items():
        if took_s.keys() == by_rank.keys():
            longest, late = max(took_s.values()), steps.setdefault(step, {})
            for rank in by_rank:
                delay = (longest - took_s[rank], name)
                late[rank] = max(late.get(rank, delay), delay)
    if not steps:
        raise UsageError(
            "no operation is in the traces of all ranks: record the same steps, of an optimizer "
            "that all of them share"
        )
    return [_delay(rank, spans, steps) for rank, spans in by_rank.items()]


def _delay(
    rank: int, spans: Iterable[Span], steps: Mapping[int, Mapping[int, tuple[float, str]]]
) -> RankDelay:
    waits: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.kind == "wait":
            waits[span.step] += span.end_s - span.start_s
    # Ranks complete an op at slightly different times, so that each is a little late at some op.
    late = {
        step: delays[rank][0] - min(late_s for late_s, _ in delays.values())
        for step, delays in steps.items()
    }
    worst = max(late, key=lambda step: late[step])
    wait_step = max(steps, key=lambda step: waits[step])
    return RankDelay(
        rank,
        median(late.values()),
        late[worst],
        steps[worst][rank][1],
        worst,
        median(waits[step] for step in steps),
        waits[wait_step],
        wait_step,
    )


def typical_step_s(by_rank: Mapping[int, Sequence[Span]]) -> float:
    """Returns the median seconds between the first ops of two steps.

    Raises:
        UsageError: The traces have no two steps in a row.
    """
    lengths = []
    for spans in by_rank.values():
        begins: dict[int, float] = {}
        for span in spans:
            if span.kind == "queue":
                begins[span.step] = min(begins.get(span.step, span.start_s), span.start_s)
        lengths += [begins[step + 1] - at for step, at in begins.items() if step + 1 in begins]
    if not lengths:
        raise UsageError("the traces have no two steps in a row: record some more steps")
    return median(lengths)


def verdict(delays: Sequence[RankDelay], step_s: float) -> str:
    """Says which ranks the others wait for.

    Args:
        delays: The delay of each rank.
        step_s: Seconds of a step.
    """
    waited_s = max(delay.wait_s for delay in delays)
    if waited_s < _NOTABLE * step_s:
        return (
            f"No rank waits for more than {waited_s / step_s:.1%} of a step: compute sets the pace."
        )
    late = [delay for delay in delays if delay.late_s >= _NOTABLE * step_s]
    if not late:
        return "No rank is later than the others: what they wait for is the network."
    late.sort(key=lambda delay: -delay.late_s)
    told = ", ".join(
        f"rank {rank} ({late_s * 1e3:.1f} ms late, {late_s / step_s:.0%} of a step)"
        for rank, late_s, *_ in late
    )
    return f"The others wait for {told}: look at what is computed or loaded there in the meantime."

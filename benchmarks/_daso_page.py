# SPDX-License-Identifier: Apache-2.0
"""What `daso.py` trains, and the page of its results."""

from __future__ import annotations

import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch

import usbyte
from _convergence_jobs import Job
from usbyte.cli._tables import in_markdown

#: Epochs of a training as DASO counts them, and of its warm-up and its cool-down each.
EPOCHS, SYNCHRONOUS = 15, 2


@dataclass(frozen=True)
class Variant:
    """How a job is trained.

    Attributes:
        name: For the table.
        every: B, batches; 0 for synchronous training.
        wait: S, batches.
    """

    name: str
    every: int = 0
    wait: int = 0


VARIANTS = (
    Variant("synchronous"),
    Variant("DASO, B = 8, S = 2", 8, 2),
    Variant("DASO, B = 4, S = 1", 4, 1),
    Variant("DASO, B = 1, S = 1", 1, 1),
)


@dataclass
class Result:
    """What came of a variant; lists are by seed.

    Attributes:
        scores: On held-out data.
        losses: Training loss of the last epoch.
        epoch_s: Of the epochs between warm-up and cool-down, the median.
        whole_s: Of the whole training.
        outer_bytes: That all ranks together sent between nodes in one of those epochs, the mean; 0:
            unknown.
    """

    scores: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    epoch_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    outer_bytes: list[float] = field(default_factory=list)


_HEAD = """# DASO

`ub.DasoOptimizer` is DASO (Coquelin et al., "Accelerating neural network training with \
distributed asynchronous and selective optimization (DASO)", J. Big Data 9, 2022; arXiv \
2104.05588). It is **another algorithm than synchronous training**, and its results are others: \
ranks of a node average gradients in every step; nodes exchange parameters every B batches, in \
the background, and use them S batches late, x <- (2 S x + sum) / (2 S + P) with P nodes, \
where the sum is of all nodes' parameters S batches ago. \
Warm-up and cool-down average the nodes' parameters after each step. Its docstring tells the \
rest.

```python
optimizer = ub.DasoOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                             named_parameters=model.named_parameters(), total_epochs=90)
for epoch in range(90):
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
    optimizer.end_epoch(loss)          # goes on to the next phase; a stable loss changes B and S
optimizer.synchronize_nodes()          # where a training ends without cool-down, or rank 0 saves
```

## Published, and differences from the authors' library

The authors publish up to 34 % less time than other data-parallel training. That is not \
reproduced here: it takes their cluster, and the overhead of what DASO was compared with. What \
usbyte saves on an emulated cluster stands below. The authors' library (Heat, \
`heat/optim/dp_optimizer.py`, commit 0039802) differs from `ub.DasoOptimizer`:

| | Heat | usbyte |
|---|---|---|
| end of an epoch | the last batch waits for an exchange | training goes on; call \
`synchronize_nodes()` where nodes must be equal |
| inside a node | gradients are averaged every batch or every second one (local skips) | in every \
step |
| first cycle after warm-up | B = 4, S = 1; B = 8, S = 2 come when the loss is stable at B = 1 | B \
and S as given, 8 and 2 by default |
| the loss is stable | B is halved, S falls by 1 | both are halved |
| parameters on the wire | bfloat16 in warm-up and cool-down, float32 between | float32 |

## Measured

"""

_NOTES = """
What is lost: between exchanges a node follows its own batches alone, 1 / {nodes} of each global \
one, and what it hears from the others is late: a merge undoes P / (2 S + P) of what a node has \
learned in the S batches since the exchange began, at B = S = 1 and {nodes} nodes {undone:.0%} of \
every step. A smaller B is therefore not always closer to synchronous training. The learning rate \
is that of synchronous training; nothing was tuned for DASO. These are small models that train for \
minutes: they show that the algorithm works and what it moves, not what it costs a large training. \
B and S are those at the start; where the loss is stable they are halved.

What is saved is the network between nodes, and as much time as that was in the way. Layers really \
compute, and all ranks share the cores of one machine, so that compute takes longer than on \
machines of their own, which makes the difference smaller. The whole time includes warm-up and \
cool-down, whose steps wait for the slow network, and of both kinds of training the making of the \
plan; synchronous training tries several plans, which may go on into the epochs that are counted. \
Bytes between nodes can be counted on exactly; times are those of a machine with other work.
"""


def page(
    found: Mapping[str, tuple[Job, Mapping[str, Result]]],
    slots: int,
    nodes: int,
    network: str,
    busy: float,
) -> str:
    """The page.

    Args:
        found: By job, the results of all variants by name.
        slots: Ranks of a node.
        nodes: How many.
        network: In words.
        busy: Load of the machine before, threads that would run.
    """
    command = shlex.join(["python", "benchmarks/daso.py", *sys.argv[1:]])
    where = f" ({network})" if network else ""
    text = (
        f"{_HEAD}{nodes} nodes of {slots} ranks{where} on one machine: {_processor()}, "
        f"{os.cpu_count()} cores (load average {busy:.1f} from other work when it began), Linux "
        f"{platform.release()}; usbyte {usbyte.__version__}, torch "
        f"{torch.__version__}, Python {platform.python_version()}; {date.today().isoformat()}. "
        f"On every rank: `{command}`, with OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')}."
        "\n\nSynchronous: `DistributedOptimizer` over all ranks, overlap forward, policy auto. "
        f"{EPOCHS} epochs as DASO counts them, of which {SYNCHRONOUS} are warm-up and "
        f"{SYNCHRONOUS} cool-down; s/epoch is the median of those between, MB what all ranks "
        "together sent between nodes in one of them. All ranks ended with the same parameters bit "
        "for bit (checked). In brackets: the least and the most over seeds.\n"
    )
    for name, (job, results) in found.items():
        text += f"\n### {name}\n\n{_heading(job, results)}\n\n"
        columns = [
            "training", job.metric, "against synchronous", "training loss", "s/epoch", "MB/epoch",
            "whole, s",
        ]  # fmt: skip
        text += in_markdown(columns, [_row(job, name, results) for name in results])
    return text + _NOTES.format(nodes=nodes, undone=nodes / (2 + nodes))


def _heading(job: Job, results: Mapping[str, Result]) -> str:
    seeds = len(next(iter(results.values())).scores)
    return (
        f"{job.steps} steps of {job.batch} samples, {max(1, job.steps // EPOCHS)} an epoch, by "
        f"{job.optimizer}, peak learning rate {job.lr:g}; {seeds} seed(s)."
    )


def _row(job: Job, name: str, results: Mapping[str, Result]) -> list[str]:
    result, base = results[name], results[VARIANTS[0].name]
    sent = statistics.fmean(result.outer_bytes) / 1e6
    difference = statistics.fmean(result.scores) - statistics.fmean(base.scores)
    return [
        name,
        _with_spread(result.scores, job.format),
        "" if result is base else job.format(difference, "+"),
        f"{statistics.fmean(result.losses):.4f}",
        f"{statistics.median(result.epoch_s):.2f}",
        f"{sent:.1f}" if sent else "",
        _with_spread(result.whole_s, lambda seconds: f"{seconds:.1f}"),
    ]


def _with_spread(values: Sequence[float], write: Callable[[float], str]) -> str:
    mean = write(statistics.fmean(values))
    return f"{mean} ({write(min(values))}-{write(max(values))})" if len(values) > 1 else mean


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", path.read_text()) if path.exists() else None
    return match[1].strip() if match else platform.machine()

# SPDX-License-Identifier: Apache-2.0
"""Published figures beside what usbyte's policies and simulator make of them.

    python benchmarks/reproduce.py --profiles FOLDER -o docs/reproduced.md

FOLDER holds traces of backward passes (or usbyte's own profiles) as MODEL.json; the figures want
vgg16, resnet50, bert and gpt2. Nothing is trained.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from _pages import deliver, folder_option, load, output_option
from _published import (
    CLAIMS,
    EARLIER,
    EARLIER_COLUMNS,
    MEASURED,
    NOT_SIMULATED,
    Claim,
    Cluster,
)
from _schemes import READINGS, SCHEMES
from usbyte import __version__, _core
from usbyte.cli._tables import in_markdown

Jobs = Mapping[str, _core.Profile]

_NEAR = 0.02  # what deviates less from the earlier simulator needs no other reading

_HEAD = """# Published figures, reproduced by simulation

Written by `{command}`: usbyte {version}, Python {python}, {date}. Nothing was trained: usbyte's \
policies plan for backward traces of one V100 ({models}; fp32 gradients, {compute}) and its \
simulator tells the step. The traces have no forward times; half of a tensor's backward time is \
taken. Networks `n x 10GbE` and `n x 56G IB` have the constants that MG-WFBP measured; a `ring` \
has the costs of ideal ring collectives.

Two ways of counting startups stand side by side, since one alpha and one beta cannot tell what \
several operations in flight cost. *In turn*: an operation starts up when the one before has \
ended, as on one connection or one NCCL stream; only D-Credit's windows, as its authors count, and \
P3's slices where they are pipelined start up together. *Overlapping*: all operations in flight \
start up at once and share only the link, as on connections of their own; this favours whatever \
has several in flight, ByteScheduler most of all. On a real network usbyte measures what several \
in flight cost.

## Headlines

Factors are the step of the baseline over the step of the system, in the case of all models and \
networks tried that gains most; `auto` is usbyte's own policy over the same baseline in the first \
of the two cases, with startups in turn.
"""

_EARLIER = """
## Against an earlier simulator

ms of a step. `expected` is what a simulator that was written before usbyte, and shares no code \
with it, found for the same traces and costs; `ours` counts as the assumption says, with startups \
in turn but for D-Credit's windows. Where the two differ by more than {near:.0%}, the nearest of \
the other readings that were tried is given: it explains the difference as well as can be, and \
does not prove it.
"""


@dataclass(frozen=True)
class Gain:
    """The case in which a scheme gains most.

    Attributes:
        factor: The baseline's step over the scheme's.
        model: Name of the trace.
        cluster: The network.
        baseline: The scheme's best competitor there.
    """

    factor: float
    model: str
    cluster: Cluster
    baseline: str

    def __str__(self) -> str:
        return f"{self.factor:.2f}x ({self.model}, {self.cluster.name}, over {self.baseline})"


def best_gain(claim: Claim, jobs: Jobs, overlapping: bool) -> Gain | None:
    """The case that gains most; None where no trace fits."""
    gains = []
    for model in filter(jobs.__contains__, claim.models):
        for cluster in claim.clusters:
            steps = {
                name: SCHEMES[name].step_s(jobs[model], cluster, overlapping)
                for name in (claim.scheme, *claim.baselines)
            }
            baseline = min(claim.baselines, key=steps.__getitem__)
            gains.append(Gain(steps[baseline] / steps[claim.scheme], model, cluster, baseline))
    return max(gains, key=lambda gain: gain.factor, default=None)


def headlines(jobs: Jobs) -> Iterator[tuple[str, ...]]:
    """Rows of the table of claims."""
    for claim in CLAIMS:
        published = claim.text
        if claim.factor is not None and "x over" not in claim.text:
            published += f" ({claim.factor:.2f}x)"
        gain, overlapping = (best_gain(claim, jobs, o) for o in (False, True))
        if gain is None:
            yield claim.system, published, "no trace", "", "", "not tried", claim.differs
            continue
        job, baseline = jobs[gain.model], SCHEMES[gain.baseline]
        ours = baseline.step_s(job, gain.cluster) / SCHEMES["auto"].step_s(job, gain.cluster)
        reached = "" if claim.factor is None else "no"
        if claim.factor is not None and gain.factor >= claim.factor:
            reached = "yes"
        yield (
            claim.system, published, str(gain), str(overlapping), f"{ours:.2f}x", reached,
            claim.differs,
        )  # fmt: skip
    for system, text, why in NOT_SIMULATED:
        yield system, text, "not simulated", "", "", "not tried", why


def against_earlier(jobs: Jobs) -> Iterator[tuple[str, ...]]:
    """Rows of the table of step times: expected, ours, and what else ours could be."""
    clusters = {cluster.name: cluster for cluster in MEASURED}
    for model, name, expected in EARLIER:
        if model not in jobs:
            values = ", ".join(map(str, expected))
            yield f"{model}, {name}", "all", values, "no trace", "", "", "", "", ""
            continue
        for column, ms in zip(EARLIER_COLUMNS, expected, strict=True):
            found = [
                (1e3 * reading.step_s(jobs[model], clusters[name]), reading.text)
                for reading in READINGS[column]
            ]
            row = (f"{model}, {name}", column, str(ms), *_beside(found[0][0], ms), found[0][1])
            nearest = min(found[1:], key=lambda f: abs(f[0] - ms), default=found[0])
            if abs(found[0][0] / ms - 1) <= _NEAR or abs(nearest[0] - ms) >= abs(found[0][0] - ms):
                yield *row, "", "", ""
            else:
                yield *row, *_beside(nearest[0], ms), nearest[1]


def _beside(ours_ms: float, expected_ms: float) -> tuple[str, str]:
    return f"{ours_ms:.1f}", f"{100 * (ours_ms / expected_ms - 1):+.1f} %"


def document(jobs: Jobs, arguments: list[str]) -> str:
    """The whole page."""
    compute = ", ".join(f"{name} {1e3 * job.iteration_s:.0f} ms" for name, job in jobs.items())
    head = _HEAD.format(
        command=shlex.join(["python", "benchmarks/reproduce.py", *arguments]),
        version=__version__,
        python=platform.python_version(),
        date=datetime.date.today(),
        models=", ".join(jobs),
        compute=f"compute alone: {compute}",
    )
    claims = in_markdown(
        ("system", "published", "reproduced, startups in turn", "startups overlapping", "auto",
         "reached", "what differs, and why"),
        headlines(jobs),
    )  # fmt: skip
    earlier = in_markdown(
        ("case", "what", "expected", "ours", "deviation", "assumption", "other reading",
         "deviation", "its assumption"),
        against_earlier(jobs),
    )  # fmt: skip
    return f"{head}\n{claims}{_EARLIER.format(near=_NEAR)}\n{earlier}"


@click.command(context_settings={"max_content_width": 100})
@folder_option
@output_option
def main(folder: Path, output: Path | None) -> None:
    """Simulate what others have published, and put both side by side."""
    deliver(document(load(folder), sys.argv[1:]), output)


if __name__ == "__main__":
    main()

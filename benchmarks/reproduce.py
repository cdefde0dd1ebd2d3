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

import _inputs
from _pages import deliver, folder_option, load, output_option
from _published import (
    CLAIMS,
    EARLIER,
    EARLIER_COLUMNS,
    ENERGY_CLAIMS,
    ENERGY_CLUSTERS,
    ENERGY_MODELS,
    MEASURED,
    NOT_SIMULATED,
    WAITING_POWER,
    Claim,
    Cluster,
)
from _published_policies import READINGS, VARIANTS
from usbyte import __version__, _core
from usbyte.cli._tables import in_markdown

Jobs = Mapping[str, _core.Profile]

_NEAR = 0.02  # what deviates less from the earlier simulator needs no other reading

_HEAD = """# Published figures, reproduced by simulation

Written by `{command}`: usbyte {version}, Python {python}, {date}. Nothing was trained: usbyte's \
policies plan for backward traces of one V100 ({models}; fp32 gradients, {compute}) and its \
simulator tells the step. The traces have no forward times; half of a tensor's backward time is \
taken. Networks `n x 10GbE` and `n x 56G IB` have the constants that MG-WFBP measured; a `ring` \
has the costs of ideal ring collectives. *With the authors' inputs*: jobs `zju_...` are the sizes \
and times that the authors of US-Byte, D-Credit and PipeDAP have published \
([published_inputs](../benchmarks/published_inputs/README.md)), and networks have the constants in \
the released code of the system. US-Byte's and D-Credit's code multiplies its seconds per byte by \
parameters; they are read as seconds per byte here.

Two ways of counting startups stand side by side, since one alpha and one beta cannot tell what \
several operations in flight cost. *In turn*: an operation starts up when the one before has \
ended, as on one connection or one NCCL stream; only D-Credit's windows, as its authors count, and \
P3's slices where they are pipelined start up together. *Overlapping*: all operations in flight \
start up at once and share only the link, as on connections of their own; this favours whatever \
has several in flight, ByteScheduler most of all. On a real network usbyte measures what several \
in flight cost.

## Headlines

Factors are the step of the baseline over the step of the system, in the case of all models and \
networks tried that gains most; `auto`, and DDP with buckets of 25 MiB, stand over the same \
baseline in the same case. *At least as published* says by which inputs; where a factor is far \
above the published one, the model charges the baseline more than its authors measured. {reached}
"""

_ENERGY = """
## Energy

D-Credit saves energy because a step ends earlier. The model: a machine draws the same power \
whenever it computes, and a fixed share of it while it waits for the network, so that a step costs \
compute + share x (step - compute). The share is an assumption, stated in the column. Savings are \
of the step that gains most with the authors' inputs. *By its speed*: 1 - 1 / the published speed, \
which is the most that the model can save. Energy was not measured for this page; \
`benchmarks/compare.py` measures it where there is a counter (Linux RAPL, NVML).
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
    """The case in which a variant gains most.

    Attributes:
        factor: The baseline's step over the variant's.
        model: Name of the trace.
        cluster: The network.
        baseline: The variant's best competitor there.
    """

    factor: float
    model: str
    cluster: Cluster
    baseline: str

    def __str__(self) -> str:
        return f"{self.factor:.2f}x ({self.model}, {self.cluster.name}, over {self.baseline})"

    def beside(self, jobs: Jobs) -> str:
        """Returns the factors of `auto` and of DDP over the same baseline."""
        job = jobs[self.model]
        base_s = VARIANTS[self.baseline].step_s(job, self.cluster)
        factors = (
            f"{name} {base_s / VARIANTS[name].step_s(job, self.cluster):.2f}x"
            for name in ("auto", "ddp")
        )
        return ", ".join(factors)


def best_gain(claim: Claim, jobs: Jobs, overlapping: bool, authors: bool = False) -> Gain | None:
    """The case that gains most, of our inputs or the authors'; None where no job fits."""
    models = claim.authors_models if authors else claim.models
    gains = []
    for model in filter(jobs.__contains__, models):
        for cluster in claim.authors_clusters if authors else claim.clusters:
            steps = {
                name: VARIANTS[name].step_s(jobs[model], cluster, overlapping)
                for name in (claim.variant, *claim.baselines)
            }
            baseline = min(claim.baselines, key=steps.__getitem__)
            gains.append(Gain(steps[baseline] / steps[claim.variant], model, cluster, baseline))
    return max(gains, key=lambda gain: gain.factor, default=None)


def headlines(jobs: Jobs) -> Iterator[tuple[str, ...]]:
    """Rows of the table of claims."""
    for claim in CLAIMS:
        published = claim.text
        if claim.factor is not None and "x over" not in claim.text:
            published += f" ({claim.factor:.2f}x)"
        authors = best_gain(claim, jobs, overlapping=False, authors=True)
        gain, overlapping = (best_gain(claim, jobs, o) for o in (False, True))
        if gain is None:
            yield claim.system, published, "", "", "no trace", "", "", "not tried", claim.differs
            continue
        yield (
            claim.system, published, str(authors or "none at hand"),
            authors.beside(jobs) if authors else "", str(gain), gain.beside(jobs),
            str(overlapping), _reached(claim, authors, gain), claim.differs,
        )  # fmt: skip
    for system, text, why in NOT_SIMULATED:
        yield system, text, "", "", "not simulated", "", "", "not tried", why


def _reached(claim: Claim, authors: Gain | None, traces: Gain) -> str:
    if claim.factor is None:
        return ""
    by = {"the authors' inputs": authors, "the traces": traces}
    return ", ".join(k for k, gain in by.items() if gain and gain.factor >= claim.factor) or "no"


def energy(jobs: Jobs) -> Iterator[tuple[str, ...]]:
    """Rows of the table of energy: published savings, and the model's for each share."""
    for claim in ENERGY_CLAIMS:
        best = (0.0,) * len(WAITING_POWER)
        words = "no job"
        for model in filter(jobs.__contains__, ENERGY_MODELS):
            for cluster in ENERGY_CLUSTERS:
                job = jobs[model]
                steps = [
                    VARIANTS[name].step_s(job, cluster) for name in (claim.variant, claim.baseline)
                ]
                saved = tuple(1 - _energy(job, steps[0], w) / _energy(job, steps[1], w)
                              for w in WAITING_POWER)  # fmt: skip
                if saved[0] > best[0]:
                    best, words = saved, f"{model}, {cluster.name}"
        yield (
            claim.baseline, f"{claim.saving:.1%}", f"{1 - 1 / claim.factor:.1%}", words,
            *(f"{share:.1%}" for share in best),
        )  # fmt: skip


def _energy(job: _core.Profile, step_s: float, waiting_power: float) -> float:
    """Energy of a step over the power while computing, in seconds."""
    return job.iteration_s + waiting_power * (step_s - job.iteration_s)


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
    jobs = {**jobs, **_inputs.load_all()}
    rows = list(headlines(jobs))
    answers = [row[7] for row in rows if row[7] not in ("", "not tried")]
    head = _HEAD.format(
        command=shlex.join(["python", "benchmarks/reproduce.py", *arguments]),
        version=__version__,
        python=platform.python_version(),
        date=datetime.date.today(),
        models=", ".join(name for name in jobs if name not in _inputs.NAMES),
        compute=f"compute alone: {compute}",
        reached=f"{sum(a != 'no' for a in answers)} of {len(answers)} figures are reached.",
    )
    claims = in_markdown(
        ("system", "published", "with the authors' inputs", "auto and DDP there",
         "with the traces", "auto and DDP there", "the same, startups overlapping",
         "at least as published", "what differs, and why"),
        rows,
    )  # fmt: skip
    earlier = in_markdown(
        ("case", "what", "expected", "ours", "deviation", "assumption", "other reading",
         "deviation", "its assumption"),
        against_earlier(jobs),
    )  # fmt: skip
    joules = in_markdown(
        ("D-Credit over", "published", "by its speed", "case",
         *(f"saved, waiting at {share:.0%}" for share in WAITING_POWER)),
        energy(jobs),
    )  # fmt: skip
    return f"{head}\n{claims}{_ENERGY}\n{joules}{_EARLIER.format(near=_NEAR)}\n{earlier}"


@click.command(context_settings={"max_content_width": 100})
@folder_option
@output_option
def main(folder: Path, output: Path | None) -> None:
    """Simulate what others have published, and put both side by side."""
    deliver(document(load(folder), sys.argv[1:]), output)


if __name__ == "__main__":
    main()

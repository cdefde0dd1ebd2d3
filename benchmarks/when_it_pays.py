# SPDX-License-Identifier: Apache-2.0
r"""How much usbyte's plans gain over DDP, by job and network, on the simulator.

    python benchmarks/when_it_pays.py -o docs/when-it-pays.md --figure docs/when-it-pays.svg \
        --step docs/step.svg

Jobs are published times of gradients: the traces of --profiles, which should hold vgg16, resnet50,
bert and gpt2, and those of benchmarks/published_inputs. Networks are rings. Nothing is trained.
"""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median, quantiles

import click

import _inputs
from _pages import deliver, folder_option, load, output_option
from usbyte import __version__, _core
from usbyte.cli._tables import in_markdown
from usbyte.planning import profiles
from usbyte.planning.whatif import BUCKETS_MIB, best_ddp

_RANKS = (8, 32, 128)
_GBITS = (1, 10, 25, 100)
_LATENCIES_S = (5e-6, 25e-6)
_COMMUNICATION = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, float("inf"))
_LONG_FORWARD = "zju_densenet201"  # Its forward takes longer than its backward.
_STARTUPS = (0.0, 0.001, 0.01, float("inf"))
#: What the README shows of the simulated cases: name, job, ranks, Gb/s; latency is the larger one.
_README = (
    ("ResNet-101", "espresso_resnet101", 8, 10),
    ("ResNet-50", "resnet50", 8, 10),
    ("BERT", "bert", 8, 25),
    ("GPT-2", "gpt2", 8, 10),
    ("BERT", "bert", 8, 10),
    ("GPT-2", "gpt2", 8, 25),
    ("ResNet-50", "resnet50", 8, 25),
)
_README_BANDS = ((0.0, 0.5), (0.5, 1.0), (1.0, 4.0), (4.0, float("inf")))
_GAIN = 1.05  # A gain above this counts as one that a user notices.

_HEAD = """# When usbyte pays

Written by `{command}`: usbyte {version}, Python {python}, {date}. Nothing was trained: the \
simulator predicts the steps of {jobs} published jobs on {networks} assumed networks: rings of \
{ranks} ranks, {gbits} Gb/s, {latencies} us for a message, one operation starting up after the \
other. Each rank has a link of its own; where ranks of a node share one, a rank has its share. \
Rings of more ranks cost more startups, and libraries use trees there, so that they are left out.

*Gain*: the step of PyTorch DDP over the step of policy `auto` with `overlap="forward"`. DDP has \
its best bucket size of {buckets}, for each case anew; its default of 25 MiB stands beside it. Two \
numbers describe a case:

- *Communication*: the all-reduce of all gradients, 2 (n - 1) / n times their bytes over the \
link's bytes per second, over *compute*, the step of one rank without communication. ResNet-50 \
has 102 MB and computes for 95 ms: on 8 ranks with 10 Gb/s, 0.143 s / 0.095 s = 1.5.
- *Startup*: what one operation costs before its first byte, 2 (n - 1) messages, over compute.

For your own job: record it with `usbyte profile`, the network with `usbyte probe`, and read \
*comm.* and *gain* in `usbyte whatif job.json --network network.json`.

## In short

"""

_BY_CASE = """
{bands}

The bound has no plan below it: `auto` takes {over:.2f} times the bound in the median, {worst:.2f} \
times at most.

![Gain over communication, each point a case](when-it-pays.svg)

## By communication and startup

Median gain over DDP's best bucket size, in brackets the largest, then the number of cases.

"""

_BANDS = (
    (0.0, 0.5, "the backward pass hides nearly all of it under DDP, too. Stay with DDP, unless you "
     "want usbyte's errors, launcher or reports."),
    (0.5, 1.0, "it pays where a startup is 1 % of compute or more, since sizes of operations "
     "matter there; else DDP hides it."),
    (1.0, 4.0, "more than the backward pass hides, and the forward pass hides a part of the rest. "
     "This is where usbyte pays."),
    (4.0, float("inf"), "the network is busy all the time, whatever the order. Only fewer bytes "
     "help: `compression=`, which is lossy, fewer exchanges (`ub.DasoOptimizer`, another "
     "algorithm), or a faster link."),
)  # fmt: skip

_JOBS = """
## The jobs

Jobs `espresso_` and `zju_` are in [published_inputs](../benchmarks/published_inputs/README.md), \
with their sources; bert, gpt2, resnet50 and vgg16 are traces published with Espresso (EuroSys \
2023), which the command reads from a folder. Forward times decide how much can hide behind the \
forward pass. They were published for `zju_` jobs only, where each parameter's share is that of \
its elements; elsewhere forward is taken to be half of backward.

"""

_ALL = """
## Every case

Seconds of a step; *bound*: no plan is faster, startups included.

"""


@dataclass(frozen=True)
class Case:
    """A job on a network.

    Attributes:
        job: Name of the job.
        network: The network in words.
        communication: Time of all bytes over compute.
        startup: Startup of one operation over compute.
        compute_s: Step without communication.
        usual_s: Step of DDP with buckets of 25 MiB.
        ddp_s: Step of DDP with its best bucket size.
        auto_s: Step of policy auto.
        bound_s: Lower bound of a step, startups included.
    """

    job: str
    network: str
    communication: float
    startup: float
    compute_s: float
    usual_s: float
    ddp_s: float
    auto_s: float
    bound_s: float

    @property
    def gain(self) -> float:
        """DDP's step with its best bucket size over auto's."""
        return self.ddp_s / self.auto_s


def jobs_of(folder: Path) -> dict[str, _core.Profile]:
    """Published jobs by name."""
    return {**load(folder), **_inputs.load_all()}


def cases(jobs: Mapping[str, _core.Profile]) -> Iterator[Case]:
    """Simulates every job on every network."""
    for (name, job), ranks, gbit, latency_s in product(jobs.items(), _RANKS, _GBITS, _LATENCIES_S):
        network = _core.NetworkModel.ring(ranks, latency_s, gbit * 1e9 / 8, 1)
        yield case_of(name, job, network, f"{ranks} x {gbit}G, {1e6 * latency_s:g} us")


def case_of(name: str, job: _core.Profile, network: _core.NetworkModel, words: str) -> Case:
    """Simulates a job on a network with DDP and auto."""
    cost = network.all_reduce[0]
    compute_s = job.iteration_s
    usual = _core.make_plan("ddp", job, network, {}, "backward")
    usual_s = _core.simulate(usual, job, network, "backward").step_s
    return Case(
        name,
        words,
        communication=cost.beta_s_per_byte * job.bytes / compute_s,
        startup=cost.alpha_s / compute_s,
        compute_s=compute_s,
        usual_s=usual_s,
        ddp_s=best_ddp(job, network)[1],
        auto_s=_core.simulate(
            _core.make_plan("auto", job, network, {}, "forward"), job, network, "forward"
        ).step_s,
        bound_s=_core.bound_s(job, network),
    )


def summary(found: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """Rows: which cases, over what, then statistics of the gain."""
    common = [case for case in found if case.network.partition(" x ")[2].startswith(("10G", "25G"))]
    ordinary = [case for case in found if case.job != _LONG_FORWARD]
    rows = (
        ("all", "DDP, best bucket size", [case.gain for case in found]),
        ("all", "DDP, 25 MiB", [case.usual_s / case.auto_s for case in found]),
        ("10 and 25 Gb/s", "DDP, best bucket size", [case.gain for case in common]),
        (f"all but {_LONG_FORWARD}", "DDP, best bucket size", [case.gain for case in ordinary]),
    )
    for cases, over, values in rows:
        if len(values) < 2:
            continue
        yield (
            cases, over, str(len(values)),
            *(f"{x:.2f}" for x in (min(values), median(values), fmean(values),
                                   quantiles(values, n=10)[-1], max(values))),
            f"{sum(x > _GAIN for x in values) / len(values):.0%}",
        )  # fmt: skip


def job_rows(jobs: Mapping[str, _core.Profile]) -> Iterator[tuple[str, ...]]:
    """Rows: what is known of each job."""
    for name, job in jobs.items():
        first_s = min(job.ready_s)
        yield (
            name, f"{job.bytes / 1e6:.0f}", str(len(job.tensors)), f"{1e3 * job.iteration_s:.0f}",
            f"{1e3 * first_s:.0f}", "published" if name.startswith("zju_") else "half of backward",
        )  # fmt: skip


def by_case(found: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """Rows: a range of communication, then a cell for each range of startups."""
    for low, high in pairwise(_COMMUNICATION):
        row = [case for case in found if low <= case.communication < high]
        cells = []
        for least, most in pairwise(_STARTUPS):
            gains = [case.gain for case in row if least <= case.startup < most]
            cells.append(f"{median(gains):.2f} ({max(gains):.2f}), {len(gains)}" if gains else "")
        yield _range(low, high), *cells


def _gains(found: Sequence[Case], low: float, high: float) -> str:
    gains = [case.gain for case in found if low <= case.communication < high]
    if not gains:
        return "no case"
    return f"{len(gains)} cases, median gain {median(gains):.2f}, most {max(gains):.2f}"


def _range(low: float, high: float) -> str:
    if high == float("inf"):
        return f"{low:g} and more"
    return f"below {high:g}" if low == 0 else f"{low:g} to {high:g}"


def every_case(found: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """Rows of the last table."""
    for case in found:
        times = (case.compute_s, case.usual_s, case.ddp_s, case.auto_s, case.bound_s)
        yield (
            case.job, case.network, f"{case.communication:.2f}", f"{case.startup:.4f}",
            *(f"{time_s:.4f}" for time_s in times), f"{case.gain:.2f}",
        )  # fmt: skip


def readme_rows(found: Sequence[Case], measured: Path) -> Iterator[tuple[str, ...]]:
    """Rows of the README's table of gains.

    Args:
        found: All cases.
        measured: File of docs/data with the job that was measured, on four hosts.
    """
    table = json.loads(measured.read_text(encoding="utf-8"))["tables"][0]
    seconds = {row[0]: float(row[table["columns"].index("median s")]) for row in table["rows"]}
    ddp_s = next(s for name, s in seconds.items() if name.startswith("PyTorch DDP"))
    auto_s = seconds["forward:auto"]
    half = profiles.load("vgg16-half")
    measured_case = case_of("", half, _core.NetworkModel.ring(4, 0.0, 125e6, 1), "")
    yield (
        "VGG-16, half width", "4 hosts, 1 Gb/s", f"{measured_case.communication:.1f}",
        f"{ddp_s:.3f} s", f"{auto_s:.3f} s", f"{ddp_s / auto_s:.2f}x",
        "emulated hosts; layers sleep, gradients are real ([benchmarks](docs/benchmarks.md))",
    )  # fmt: skip
    for name, job, ranks, gbit in _README:
        words = f"{ranks} x {gbit}G, {1e6 * max(_LATENCIES_S):g} us"
        case = next(case for case in found if (case.job, case.network) == (job, words))
        yield (
            name, f"{ranks} ranks, {gbit} Gb/s", f"{case.communication:.1f}",
            f"{case.ddp_s:.4f} s", f"{case.auto_s:.4f} s", f"{case.gain:.2f}x",
            "simulated, V100 times",
        )  # fmt: skip


def readme_bands(found: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """Rows of the README's table of gains over communication/compute."""
    for low, high in _README_BANDS:
        gains = [case.gain for case in found if low <= case.communication < high]
        yield _range(low, high), str(len(gains)), f"{median(gains):.2f}x", f"{max(gains):.2f}x"


def draw(found: Sequence[Case], path: Path) -> None:
    """Draws the gain of each case over its communication, coloured by its startup."""
    from usbyte.cli import _figures

    figure = _figures.Figure(figsize=(7.2, 3.8), layout="constrained")
    panel = figure.subplots()
    for colour, (least, most) in enumerate(pairwise(_STARTUPS)):
        label = f"startup {_range(least, most)} of compute"
        for marker, special in (("o", False), ("^", True)):
            here = [
                case
                for case in found
                if least <= case.startup < most and (case.job == _LONG_FORWARD) == special
            ]
            panel.plot(
                [case.communication for case in here], [case.gain for case in here], marker, ms=4,
                alpha=0.6, color=f"C{colour}", label=None if special else label,
            )  # fmt: skip
    panel.plot([], [], "^", ms=4, color="grey", label=f"{_LONG_FORWARD}: forward is 2.2 backward")
    panel.axhline(1, color="grey", lw=0.8)
    panel.set_xscale("log")
    panel.set_xlabel("communication / compute: 2 (n - 1) / n bytes / bandwidth / compute")
    panel.set_ylabel("step of DDP, best bucket size / step of auto")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=8)
    _figures.save(figure, path)


def draw_step(path: Path) -> None:
    """Draws one predicted step of ResNet-101 under DDP and under auto, for the README."""
    from usbyte.cli import _figures
    from usbyte.report import picture
    from usbyte.report.scene import Scene

    job = _inputs.load("espresso_resnet101")
    network = _core.NetworkModel.ring(8, 25e-6, 1.25e9, 1)
    ddp, _ = best_ddp(job, network)
    auto = _core.make_plan("auto", job, network, {}, "forward")
    scenes = (
        Scene.predicted(ddp, job, network, "backward"),
        Scene.predicted(auto, job, network, "forward"),
    )
    title = (
        "ResNet-101 as timed on a V100, 8 ranks, 10 Gb/s, predicted; DDP has its best bucket size"
    )
    _figures.save(picture.comparison(*scenes, title), path)


def document(jobs: Mapping[str, _core.Profile], found: Sequence[Case], arguments: list[str]) -> str:
    """Returns the whole page."""
    head = _HEAD.format(
        command=shlex.join(["python", "benchmarks/when_it_pays.py", *arguments]),
        version=__version__,
        python=platform.python_version(),
        date=datetime.date.today(),
        jobs=len(jobs),
        networks=len(_RANKS) * len(_GBITS) * len(_LATENCIES_S),
        ranks=", ".join(map(str, _RANKS)),
        gbits=", ".join(map(str, _GBITS)),
        latencies=" or ".join(f"{1e6 * s:g}" for s in _LATENCIES_S),
        buckets=f"{', '.join(map(str, BUCKETS_MIB))} MiB",
    )
    short = in_markdown(
        ("cases", "gain over", "number", "least", "median", "mean", "90th percentile", "most",
         f"above {_GAIN:g}"),
        summary(found),
    )  # fmt: skip
    over = [case.auto_s / case.bound_s for case in found]
    middle = _BY_CASE.format(
        bands="\n".join(
            f"- Communication {_range(low, high)} ({_gains(found, low, high)}): {words}"
            for low, high, words in _BANDS
        ),
        over=median(over),
        worst=max(over),
    )
    ranges = in_markdown(
        ("communication", *(f"startup {_range(*pair)}" for pair in pairwise(_STARTUPS))),
        by_case(found),
    )
    known = in_markdown(
        ("job", "MB", "gradients", "compute, ms", "until the first gradient, ms", "forward times"),
        job_rows(jobs),
    )
    rows = in_markdown(
        ("job", "network", "communication", "startup", "compute", "DDP, 25 MiB", "DDP, best",
         "auto", "bound", "gain"),
        every_case(found),
    )  # fmt: skip
    return f"{head}{short}{middle}{ranges}{_JOBS}{known}{_ALL}{rows}"


@click.command(context_settings={"max_content_width": 100})
@folder_option
@output_option
@click.option("--figure", type=click.Path(path_type=Path), help="Also draw the gains (matplotlib).")
@click.option("--step", type=click.Path(path_type=Path), help="Also draw the README's picture.")
@click.option(
    "--readme",
    type=click.Path(path_type=Path, exists=True),
    metavar="FILE",
    help="Print the README's tables instead; FILE is the measured job of docs/data.",
)
def main(
    folder: Path,
    output: Path | None,
    figure: Path | None,
    step: Path | None,
    readme: Path | None,
) -> None:
    """Simulate published jobs on many networks, with DDP and with policy auto."""
    jobs = jobs_of(folder)
    found = list(cases(jobs))
    if readme:
        gains = (
            "job", "network", "communication / compute", "DDP", "usbyte", "gain", "how measured",
        )  # fmt: skip
        click.echo(in_markdown(gains, readme_rows(found, readme)))
        bands = ("communication / compute", "cases", "median gain", "most")
        click.echo(in_markdown(bands, readme_bands(found)))
        return
    deliver(document(jobs, found, sys.argv[1:]), output)
    if figure:
        draw(found, figure)
    if step:
        draw_step(step)


if __name__ == "__main__":
    main()

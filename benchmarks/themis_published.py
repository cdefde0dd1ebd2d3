# SPDX-License-Identifier: Apache-2.0
"""Published figures of Themis beside what usbyte's routes and its mesh simulator make of them.

    python benchmarks/themis_published.py -o docs/themis.md

Nothing is sent: networks and jobs are those of `usbyte.planning.topologies`, times are simulated.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from _pages import deliver, output_option
from _published_themis import FIRST_VERSION, MOST, SPEEDUPS, TRAININGS, UTILIZATION, Training
from _themis_cases import (
    CHUNKS,
    IN_TURN,
    KIND,
    NONE,
    OVERLAPPING,
    RULES,
    Outcome,
    Rules,
    all_reduce,
    compute_for,
    direct,
    gains,
    outcomes,
    steps_s,
    two_dimensions,
)
from _themis_text import (
    CHUNKS_TEXT,
    CLOSED_FORM,
    DEVIATIONS,
    HEAD,
    LATENCY,
    RUN_TIME,
    TRAINING,
)
from usbyte import __version__, _core
from usbyte.cli._tables import in_markdown
from usbyte.planning import topologies

_HUGE = (10, 100, 100)  # ranks of its dimensions


def single() -> Iterator[tuple[str, ...]]:
    """Rows of the table of one all_reduce."""
    for (name, mb), found in outcomes(OVERLAPPING).items():
        yield (
            name, str(mb), f"{1e3 * found.ideal_s:.2f}",
            *(f"{100 * u:.1f}" for u in found.utilization),
            *(f"{gain:.2f}x" for gain in found.gains),
        )  # fmt: skip


def summary() -> Iterator[tuple[str, ...]]:
    """Rows of published beside reproduced, over all networks and sizes."""
    yield (
        "published, ISCA 2022", *(f"{u:.1f}" for u in UTILIZATION),
        *(f"{gain:.2f}x" for gain in SPEEDUPS), f"{MOST:.2f}x",
    )  # fmt: skip
    mean, most = FIRST_VERSION
    yield "published, first version", "", "", "", "", f"{mean:.2f}x", f"{most:.2f}x"
    for title, rules in (
        ("startups overlap", OVERLAPPING), ("no startups", NONE), ("startups in turn", IN_TURN)
    ):  # fmt: skip
        yield f"ours, {title}", *_means(list(outcomes(rules).values()))


def _means(found: Sequence[Outcome]) -> tuple[str, ...]:
    used = zip(*(each.utilization for each in found), strict=True)
    fifo, scf = zip(*(each.gains for each in found), strict=True)
    return (
        *(f"{100 * statistics.mean(u):.1f}" for u in used),
        f"{statistics.mean(fifo):.2f}x", f"{statistics.mean(scf):.2f}x", f"{max(scf):.2f}x",
    )  # fmt: skip


def latency() -> Iterator[tuple[str, ...]]:
    """Rows of the ways to count startups."""
    for overlap in (True, False):
        for rule in RULES:
            found = list(outcomes(Rules(overlap, rule)).values())
            worst = min(min(each.gains) for each in found)
            fixed = sum(each.chosen == 1 for each in found)
            chosen = statistics.mean(each.chosen for each in found)
            yield (
                "overlap" if overlap else "in turn", rule, *_means(found)[1:], f"{worst:.2f}x",
                f"{chosen:.2f}x", str(fixed),
            )  # fmt: skip


def by_chunks() -> Iterator[tuple[str, ...]]:
    """Rows of utilisation by number of chunks, with startups in turn."""
    counts = (2, 4, 8, 16, 32, CHUNKS, 2 * CHUNKS)
    means = [_means(list(outcomes(IN_TURN, chunks).values()))[:3] for chunks in counts]
    for name, row in zip(("chunks", *_ROUTED), (counts, *zip(*means, strict=True)), strict=True):
        yield name, *map(str, row)


_PAIRS = (
    ("NVLink : NIC", 450, 50, (2, 4, 8, 16, 128)),
    ("PCIe : NIC", 20, 12.5, (2, 8, 16, 128)),
    ("PCIe : NIC", 20, 25, (2, 8, 16, 128)),
)


def closed_form() -> Iterator[tuple[str, ...]]:
    """Rows of the formula beside the simulator."""
    for name, inner, outer, all_nodes in _PAIRS:
        for nodes in all_nodes:
            mesh = two_dimensions(inner, outer, nodes)
            share = _core.two_dimension_share(mesh)
            greedy = [all_reduce(mesh, 1e9, OVERLAPPING, chunks) for chunks in (4, 16, CHUNKS)]
            choice = _core.chosen_routes(mesh, KIND, 1e9, CHUNKS)
            yield (
                f"{name} {inner:g} : {outer:g}", f"8 x {nodes}",
                f"{inner / outer:.1f} < {7 * nodes / (nodes - 1):.1f}",
                "yes" if share.gains else "no", f"{share.inner_first:.2f}", f"{share.gain:.2f}x",
                *(f"{max(each.gains):.2f}x" for each in greedy),
                f"{choice.fixed_s / choice.seconds:.2f}x ({choice.name})",
            )  # fmt: skip


def trainings() -> Iterator[tuple[str, ...]]:
    """Rows of every job on every network."""
    for published in TRAININGS:
        job = topologies.load_workload(published.workload)
        for name in topologies.MESHES:
            fixed, *others = steps_s(job, topologies.load_mesh(name))
            yield (
                job.name, name, f"{1e3 * job.compute_s:.2f}", f"{1e3 * fixed:.2f}",
                *(f"{fixed / s:.2f}x" for s in others),
            )  # fmt: skip


def training_summary() -> Iterator[tuple[str, ...]]:
    """Rows of published beside reproduced, by model."""
    for published in TRAININGS:
        job = topologies.load_workload(published.workload)
        fifo, scf, ideal = zip(*gains(job), strict=True)
        yield (
            _models(job, published), _pair(*published.first), _pair(*published.later),
            f"{published.ideal:.2f}x", f"{statistics.mean(fifo):.2f}x",
            _pair(statistics.mean(scf), max(scf)), f"{statistics.mean(ideal):.2f}x",
            compute_for(job, published.first[0]), compute_for(job, published.later[0]),
        )  # fmt: skip


def _models(job: topologies.Workload, published: Training) -> str:
    return job.name if job.name == published.model else f"{job.name}, later {published.model}"


def _pair(mean: float, most: float) -> str:
    return f"{mean:.2f}x ({most:.2f}x)"


def run_time() -> Iterator[tuple[str, ...]]:
    """Rows of how long planning takes."""
    speeds, kinds = (400e9, 100e9, 50e9), ("ring", "switched", "switched")
    huge = [
        _core.Dimension(f"dim{i}", size, speed, 1e-6, kind)
        for i, (size, speed, kind) in enumerate(zip(_HUGE, speeds, kinds, strict=True))
    ]
    for name, mesh in (
        *(
            (name, topologies.load_mesh(name))
            for name in (topologies.MESHES[0], topologies.MESHES[-1])
        ),
        (" x ".join(map(str, _HUGE)), _core.Topology(huge)),
    ):
        begun = time.perf_counter()
        choice = _core.chosen_routes(mesh, KIND, 1e9, CHUNKS)
        taken = time.perf_counter() - begun
        yield (
            name, f"{mesh.ranks:,}", str(CHUNKS), f"{1e3 * taken:.1f}", choice.name,
            f"{choice.fixed_s / choice.seconds:.2f}x",
        )  # fmt: skip


_ROUTED = ("fixed", "themis+fifo", "themis+scf")


def _table(columns: Sequence[str], rows: Callable[[], Iterator[tuple[str, ...]]]) -> str:
    return in_markdown(columns, rows())


def _headed(
    rows: Iterator[tuple[str, ...]],
) -> tuple[tuple[str, ...], Iterator[tuple[str, ...]]]:
    return next(rows), rows


def _deviations() -> dict[str, float]:
    """Figures in the text about what differs."""
    found = list(outcomes(OVERLAPPING).values())
    used = zip(*(each.utilization for each in found), strict=True)
    differ = [
        100 * statistics.mean(ours) - published
        for ours, published in zip(used, UTILIZATION, strict=True)
    ]
    gain = statistics.mean(each.gains[1] for each in found) / SPEEDUPS[1] - 1
    images = gains(topologies.load_workload("resnet50").scaled(32))
    dlrm = topologies.load_workload("dlrm")
    rings, passed_over = (
        [statistics.mean(gain) for gain in zip(*found, strict=True)]
        for found in (gains(dlrm), gains(dlrm, direct))
    )
    return {
        **dict(zip(("fixed", "fifo", "scf"), differ, strict=True)),
        "gain": gain,
        "images": statistics.mean(scf for _, scf, _ in images),
        **dict(zip(("fifo_ring", "scf_ring"), rings, strict=False)),
        **dict(zip(("fifo_direct", "scf_direct"), passed_over, strict=False)),
    }


def document(arguments: list[str]) -> str:
    """The whole page."""
    head = HEAD.format(
        command=shlex.join(["python", "benchmarks/themis_published.py", *arguments]),
        version=__version__,
        python=platform.python_version(),
        date=datetime.date.today(),
        chunks=CHUNKS,
    )
    used = [f"{name} %" for name in _ROUTED]
    means = [*used, "gain of fifo", "gain of scf", "most"]
    parts = [
        head,
        _table(["", *means], summary),
        "\nOne by one, startups overlapping:\n\n",
        _table(["network", "MB", "ideal, ms", *used, "gain of fifo", "gain of scf"], single),
        LATENCY,
        _table(
            ["startups", "in loads", *used[1:], "gain of fifo", "gain of scf", "most", "least",
             "chosen", "of which fixed"],
            latency,
        ),
        CHUNKS_TEXT,
        in_markdown(*_headed(by_chunks())),
        CLOSED_FORM,
        _table(
            ["GB/s", "ranks", "B1/B2 < bound", "gains", "inner first", "gain", "4 chunks",
             "16 chunks", f"{CHUNKS} chunks", "chosen"],
            closed_form,
        ),
        TRAINING,
        _table(
            ["model", "first version", "ISCA 2022", "ideal", "ours: fifo", "ours: scf",
             "ours: ideal", "compute x for the first", "for ISCA"],
            training_summary,
        ),
        "\nOne by one:\n\n",
        _table(
            ["model", "network", "compute, ms", "fixed, ms", *_ROUTED[1:], "ideal"], trainings
        ),
        RUN_TIME,
        _table(["network", "ranks", "chunks", "ms", "chosen", "gain"], run_time),
        DEVIATIONS.format(**_deviations()),
    ]  # fmt: skip
    return "".join(parts)


@click.command(context_settings={"max_content_width": 100})
@output_option
def main(output: Path | None) -> None:
    """Simulate what Themis' authors have published, and put both side by side."""
    deliver(document(sys.argv[1:]), output)


if __name__ == "__main__":
    main()

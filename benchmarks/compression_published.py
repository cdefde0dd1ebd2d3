# SPDX-License-Identifier: Apache-2.0
"""Published figures of compressed training beside what usbyte's ByteComp makes of them.

    python benchmarks/compression_published.py --profiles FOLDER -o docs/reproduced_compression.md

FOLDER holds traces of backward passes (or usbyte's own profiles) as MODEL.json; the figures want
vgg16, resnet50, bert and gpt2. Nothing is trained. With --codec-costs, codecs run on the CPU alone
and cost what `usbyte probe --codecs` has measured.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise, product
from pathlib import Path

import click

import _compression_schemes as schemes
import _inputs
from _pages import deliver, folder_option, load, output_option
from _published_compression import (
    NVLINK_8,
    PCIE_8,
    PCIE_64,
    TITLES,
    Links,
    node_cpu_costs,
    v100_costs,
)
from usbyte import __version__, _core
from usbyte.cli._tables import in_markdown
from usbyte.errors import UsageError
from usbyte.planning import profiles

Jobs = Mapping[str, _core.Profile]

_DGC = "topk:0.01"
_BYTECOMP = "ByteComp = Espresso (EuroSys 2023)"
_MERGECOMP = "MergeComp (2021)"
_NO_TRACE = ("no trace", "", "not tried")
_MANY_TENSORS = 314
_REPEATS = 3
_LAYER_WISE_SHARE = 0.18  # Published for ResNet50, DGC, 8 V100 over PCIe (MergeComp).
#: Jobs that Espresso's authors use; the traces folder has the others.
_AUTHORS_JOBS = ("espresso_lstm", "espresso_resnet101", "espresso_ugatit")

_HEAD = """# Published figures of compressed training, reproduced by simulation

Written by `{command}`: usbyte {version}, Python {python}, {date}. Nothing was trained: \
strategies are chosen for backward traces of one V100 ({models}; `espresso_`: published with \
Espresso, [published_inputs](../benchmarks/published_inputs/README.md); fp32 gradients; compute \
alone: {compute}) and ByteComp's timeline tells the iteration, for its competitors too. The \
traces have no forward times; half of a tensor's backward time is taken. Communication hides \
behind backward alone, as in all of these systems.

Whether to compress at all: in a node of 8 GPUs often not, as the rows *without compression* show; \
on 64 GPUs with 25 Gb/s between nodes ByteComp gains {least:+.0%} to {most:+.0%} over none. \
`usbyte whatif` tells for your job, see [compression]\
(compression.md#is-the-network-the-bottleneck).

Assumptions:

- {costs}
- n messages take n times as long to decode as one.
- MergeComp's groups are found by a search of this page's own, on the same timeline, with codecs \
on the GPU between the kernels of backward; usbyte's policy `mergecomp` plans for codecs on a \
thread of the CPU.
- Links are read in two ways. *Nominal*: PCIe 12 GB/s, NVLink 150 GB/s, 5 us for a message in a \
node; 25 Gb/s between nodes, and for a message there what MG-WFBP measured over 10GbE. *Released*: \
the constants of Espresso's own simulator, 2.5 GB/s over PCIe, 50 GB/s over NVLink, 1.25 GB/s \
between nodes, 150 us for half of an all_reduce. Collectives cost what Thakur et al. (2005) say; \
the ranks of a node share its link.
- HiPress compresses between nodes what has 2^20 elements or more (`RS | C AG D | AG`), as in \
Espresso's artefact; *tuned*: the best of all thresholds. HiTopKComm does so with every tensor. \
BytePS-Compress compresses on the CPUs, between servers on all nodes, from 64 kB on \
(`RS | C A2A D C AG D | AG`). What is not compressed takes its fastest collectives. Layer-wise: \
every tensor is encoded, gathered (FP16: reduced) and decoded by itself.
- The bound is the iteration that is found when codecs cost nothing; it is taken for what is \
published as the upper bound.

## Headlines
"""

_TABLE = """
## Every case

ms of an iteration on 64 V100 over PCIe and 25 Gb/s. *1 + 2*: after the paper's two algorithms \
alone; *ByteComp*: after the refinement that usbyte adds. Gains are over the best of HiPress \
(tuned or not), HiTopKComm and BytePS-Compress. *Uncompressed* only chooses each \
tensor's fastest collectives; *over none* is the gain over it.
"""


class Table:
    """What is simulated, once each.

    Args:
        jobs: Profiles by model.
        measured: Costs of codecs on a CPU; None: those of V100s and their nodes.
    """

    def __init__(self, jobs: Jobs, measured: _core.CodecCosts | None) -> None:
        self.jobs = dict(jobs)
        self._measured = measured
        self._clusters: dict[tuple[Links, bool], _core.CompressionCluster] = {}
        self._selected: dict[tuple[str, str, Links, bool], _core.StrategySelection] = {}

    def knows(self, codec: str) -> bool:
        """The codec's costs are known."""
        return codec in (self._measured or v100_costs()).specs

    def job(self, model: str, codec: str) -> _core.CompressionJob:
        """All gradients of a model, by that codec."""
        return schemes.job_of(self.jobs[model], codec)

    def cluster(self, links: Links, free: bool = False) -> _core.CompressionCluster:
        """The codecs on those links; `free`: as if they cost nothing."""
        if (links, free) not in self._clusters:
            gpu: _core.CodecCosts | None = v100_costs()
            cpu: _core.CodecCosts | None = node_cpu_costs(links.ranks_per_node)
            if self._measured is not None:
                gpu, cpu = None, self._measured
            if free:
                known = (self._measured or v100_costs()).specs
                gpu, cpu = _core.CodecCosts({spec: _core.CodecCost() for spec in known}), None
            self._clusters[links, free] = links.cluster(gpu, cpu)
        return self._clusters[links, free]

    def selection(
        self, model: str, codec: str, links: Links, free: bool = False
    ) -> _core.StrategySelection:
        """ByteComp's choice."""
        key = (model, codec, links, free)
        if key not in self._selected:
            job = self.job(model, codec)
            self._selected[key] = _core.select_strategies(job, self.cluster(links, free))
        return self._selected[key]

    def bound_s(self, model: str, codec: str, links: Links) -> float:
        """Lower bound, in seconds, of what the search finds."""
        return self.selection(model, codec, links, free=True).iteration_s

    def competitors(self, model: str, codec: str, links: Links) -> dict[str, float]:
        """Seconds by system that compresses."""
        job, cluster = self.job(model, codec), self.cluster(links)
        named: dict[str, Callable[..., float]] = {
            "HiPress": schemes.hipress_s,
            "tuned HiPress": schemes.tuned_hipress_s,
            "HiTopKComm": schemes.hitopkcomm_s,
            "BytePS-Compress": schemes.byteps_s,
        }
        return {name: scheme(job, cluster) for name, scheme in named.items()}


def headlines(table: Table) -> Iterator[tuple[str, ...]]:
    """Rows: system, published, reproduced with nominal and released links, reached, why."""
    yield from _bytecomp_rows(table)
    yield from _mergecomp_rows(table)


def _either(values: list[tuple[str, bool]]) -> tuple[str, str, str]:
    """Texts by reading of the links, and in which of them the figure is reached."""
    reached = [name for (_, yes), name in zip(values, ("nominal", "released"), strict=True) if yes]
    answer = {0: "no", len(values): "yes"}.get(len(reached), f"{', '.join(reached)} only")
    return values[0][0], values[1][0], answer


def _bytecomp_rows(table: Table) -> Iterator[tuple[str, ...]]:
    text = "LSTM, EF-SignSGD, 64 V100, PCIe and 25 Gb/s: +77 % over HiPress, the best competitor"
    differs = (
        "The LSTM's gradients and their times are those released with Espresso. {} A simulated "
        "HiPress overlaps all that it can and loses nothing to its implementation."
    )
    if not table.knows("efsignsgd"):
        yield _BYTECOMP, text, *_NO_TRACE, "The cost of the codec is not in the file."
        return
    for how, name in (
        ("over HiPress as in the artefact", "HiPress"),
        ("over the best of all four competitors", None),
    ):
        found = []
        for links in PCIE_64:
            competitors = table.competitors("espresso_lstm", "efsignsgd", links)
            best = name or min(competitors, key=competitors.__getitem__)
            gain = (
                competitors[best] / table.selection("espresso_lstm", "efsignsgd", links).iteration_s
                - 1
            )
            found.append((f"{gain:+.0%} ({best})", gain >= 0.77))
        yield (
            _BYTECOMP,
            f"{text}; {how}",
            *_either(found),
            differs.format(
                "HiPress compresses all weights here, as all are large."
                if name
                else "Its competitors may choose thresholds here."
            ),
        )
    cases = [(m, c) for m in table.jobs for c in TITLES if table.knows(c)]
    gains = []
    for links in PCIE_64:
        gain, model, codec = max(
            (
                min(table.competitors(m, c, links).values())
                / table.selection(m, c, links).iteration_s,
                m,
                c,
            )
            for m, c in cases
        )
        gains.append((f"{gain - 1:+.0%} ({model}, {TITLES[codec]})", gain >= 1.77))
    yield (
        _BYTECOMP, "up to +77 % over the best competitor, in the best of all cases",
        *_either(gains), "All traces and three codecs, over the best of the four competitors.",
    )  # fmt: skip
    yield (
        _BYTECOMP, "within 10 % of the upper bound", *_either(_nearness(table, cases)),
        "Throughput over that with codecs that cost nothing, from the worst to the best of all "
        "cases. The bound is of this timeline and found by the same search: it can be missed, "
        "and then a case is nearer to it than it should be.",
    )  # fmt: skip
    yield from _authors_rows(table)
    yield _selection_time(table)


def _authors_rows(table: Table) -> Iterator[tuple[str, ...]]:
    """Rows on the jobs of Espresso's authors."""
    for model in filter(table.jobs.__contains__, _AUTHORS_JOBS[1:]):
        if not table.knows(_DGC):
            continue
        found = []
        for links in PCIE_64:
            competitors = table.competitors(model, _DGC, links)
            best = min(competitors, key=competitors.__getitem__)
            chosen = table.selection(model, _DGC, links)
            gain = competitors[best] / chosen.iteration_s - 1
            nothing = chosen.uncompressed_s / chosen.iteration_s - 1
            found.append((f"{gain:+.0%} ({best}; {nothing:+.0%} over none)", gain > 0))
        values = _either(found)
        yield (
            _BYTECOMP, f"{table.jobs[model].model}, DGC 1 %, 64 V100, PCIe and 25 Gb/s: no single "
            "figure is at hand", *values[:2], "",
            "The authors' sizes and times of gradients, over the best of the four competitors.",
        )  # fmt: skip


def _nearness(table: Table, cases: list[tuple[str, str]]) -> list[tuple[str, bool]]:
    out = []
    for links in PCIE_64:
        shares = sorted(
            table.bound_s(m, c, links) / table.selection(m, c, links).iteration_s for m, c in cases
        )
        out.append((f"{shares[0]:.0%} to {shares[-1]:.0%}", shares[0] >= 0.9))
    return out


def _selection_time(table: Table) -> tuple[str, ...]:
    text = "chosen in 1 to 179 ms for 10 to 314 tensors"
    if "bert" not in table.jobs:
        return _BYTECOMP, text, *_NO_TRACE, "There is no trace of bert."
    job = schemes.job_of(table.jobs["bert"], "efsignsgd")
    rows = [(*row[:2], gap, *row[3:]) for row, gap in zip(job.tensors, _gaps(job), strict=True)]
    many, now_s = [], 0.0
    for i in range(_MANY_TENSORS):
        numel, dtype, gap, codec = rows[i % len(rows)]
        now_s += gap
        many.append((numel, dtype, now_s, codec))
    found = []
    for links in PCIE_64:
        cluster = table.cluster(links)
        times = [
            _selection_ms(table.job("espresso_lstm", "efsignsgd"), cluster),
            _selection_ms(_core.CompressionJob(many), cluster),
        ]
        found.append((f"{times[0]:.0f} and {times[1]:.0f} ms", times[1] <= 200))
    return (
        _BYTECOMP, text, *_either(found),
        f"Of the LSTM's {len(table.jobs['espresso_lstm'].tensors)} tensors and of "
        f"{_MANY_TENSORS} that repeat bert's, "
        "on two levels with all 2550 strategies of the tree; median of three, in CPU time of "
        "the machine that wrote this. The search ends after a number of simulated tasks. "
        "Reached: within 200 ms.",
    )  # fmt: skip


def _gaps(job: _core.CompressionJob) -> list[float]:
    ready = [0.0, *(row[2] for row in job.tensors)]
    return [after - before for before, after in pairwise(ready)]


def _selection_ms(job: _core.CompressionJob, cluster: _core.CompressionCluster) -> float:
    times = []
    for _ in range(_REPEATS):
        begin = time.process_time()
        _core.select_strategies(job, cluster)
        times.append(1e3 * (time.process_time() - begin))
    return sorted(times)[_REPEATS // 2]


def _mergecomp_rows(table: Table) -> Iterator[tuple[str, ...]]:
    texts = (
        "ResNet50, DGC, 8 V100 over PCIe: up to 3.83x over layer-wise compression",
        "scaling factor up to 99 % (FP16, NVLink)",
    )
    specs = (_DGC, "fp16")
    missing = "resnet50" not in table.jobs
    if missing or not all(map(table.knows, specs)):
        why = "There is no trace of it." if missing else "The cost of a codec is not in the file."
        for text in texts:
            yield _MERGECOMP, text, *_NO_TRACE, why
        return
    found = []
    for links in PCIE_8:
        job, cluster = table.job("resnet50", _DGC), table.cluster(links)
        grouped_s, groups = schemes.mergecomp_s(job, cluster)
        layer_wise_s = schemes.layer_wise_s(job, cluster)
        gain = layer_wise_s / grouped_s
        text = (
            f"{gain:.2f}x ({1e3 * layer_wise_s:.0f} to {1e3 * grouped_s:.0f} ms, {groups} groups)"
        )
        found.append((text, gain >= 3.83))
    compute_s = table.jobs["resnet50"].iteration_s
    yield (
        _MERGECOMP, texts[0], *_either(found),
        f"This trace computes for {1e3 * compute_s:.0f} ms, which nothing can go below; a smaller "
        "batch leaves more to be gained. What it takes to launch the kernels of each tensor is "
        "simulated only as far as it is in the released costs.",
    )  # fmt: skip
    yield from _smaller_batch_row(table)
    yield _do_nothing_row(table, PCIE_8, "ResNet50, 8 V100 over PCIe, without compression", 0.0)
    found = []
    for links in NVLINK_8:
        job, cluster = table.job("resnet50", "fp16"), table.cluster(links)
        grouped_s, groups = schemes.mergecomp_s(job, cluster)
        share = compute_s / grouped_s
        found.append((f"{share:.1%} ({groups} groups)", share >= 0.985))
    yield (
        _MERGECOMP, texts[1], *_either(found),
        "Compute over the iteration, for ResNet50; 98.5 % counts as 99 %.",
    )  # fmt: skip
    yield _do_nothing_row(table, NVLINK_8, "ResNet50, NVLink, without compression", 0.985)


def _do_nothing_row(
    table: Table, readings: tuple[Links, ...], text: str, least: float
) -> tuple[str, ...]:
    """Returns the row of gradients that are sent as they are; `least`: scaling factor to reach."""
    found = []
    for links in readings:
        job, cluster = table.job("resnet50", "fp16"), table.cluster(links)
        alone_s = _core.compressed_iteration_s(job, cluster, schemes.uncompressed(job, cluster))
        share = table.jobs["resnet50"].iteration_s / alone_s
        found.append((f"{share:.1%} ({1e3 * alone_s:.0f} ms)", share >= least))
    nominal, released, reached = _either(found)
    why = "fp32, an op for each tensor, the fastest collectives of each."
    if least:
        why += " Where this reaches 99 %, FP16 is not what reaches it."
    return _MERGECOMP, text, nominal, released, reached if least else "", why


def _smaller_batch_row(table: Table) -> Iterator[tuple[str, ...]]:
    """MergeComp's gain where layer-wise compression has the published scaling factor."""
    found = []
    for links in PCIE_8:
        cluster = table.cluster(links)

        def shortened(
            scale: float, cluster: _core.CompressionCluster = cluster
        ) -> tuple[float, _core.CompressionJob]:
            profile = profiles.scaled(table.jobs["resnet50"], time=scale)
            job = schemes.job_of(profile, _DGC)
            return profile.iteration_s / schemes.layer_wise_s(job, cluster), job

        low, high = 1e-3, 1.0
        for _ in range(30):
            middle = (low * high) ** 0.5
            low, high = (
                (middle, high) if shortened(middle)[0] < _LAYER_WISE_SHARE else (low, middle)
            )
        share, job = shortened(high)
        grouped_s, groups = schemes.mergecomp_s(job, cluster)
        plain_s = _core.compressed_iteration_s(job, cluster, schemes.uncompressed(job, cluster))
        layer_wise_s = schemes.layer_wise_s(job, cluster)
        gain = layer_wise_s / grouped_s
        found.append((
            f"{gain:.2f}x ({1e3 * layer_wise_s:.0f} to {1e3 * grouped_s:.0f} ms, {groups} groups; "
            f"compute {1e3 * share * layer_wise_s:.0f} ms; uncompressed {1e3 * plain_s:.0f} ms)",
            gain >= 3.83,
        ))  # fmt: skip
    yield (
        _MERGECOMP, f"the same, where layer-wise compression scales to {_LAYER_WISE_SHARE:.0%} as "
        "published", *_either(found),
        "Derived: the compute of this trace is shortened until layer-wise compression has the "
        "published scaling factor.",
    )  # fmt: skip


def every_case(table: Table) -> Iterator[tuple[str, ...]]:
    """Rows: case, ms by system, gain and share of the bound."""
    for links in PCIE_64:
        for model, profile in table.jobs.items():
            for codec in filter(table.knows, TITLES):
                found = table.selection(model, codec, links)
                competitors = table.competitors(model, codec, links)
                bound_s = table.bound_s(model, codec, links)
                steps = (
                    profile.iteration_s, found.uncompressed_s, *competitors.values(),
                    found.offloaded_s, found.iteration_s, bound_s,
                )  # fmt: skip
                gain = min(competitors.values()) / found.iteration_s - 1
                over_nothing = found.uncompressed_s / found.iteration_s - 1
                yield (
                    f"{model}, {TITLES[codec]}, {links.name}", *(f"{1e3 * s:.0f}" for s in steps),
                    f"{gain:+.0%}", f"{over_nothing:+.0%}", f"{bound_s / found.iteration_s:.0%}",
                )  # fmt: skip


def document(jobs: Jobs, measured: _core.CodecCosts | None, arguments: list[str]) -> str:
    """The whole page."""
    authors = {name: _inputs.load(name) for name in _AUTHORS_JOBS}
    table = Table({**authors, **jobs}, measured)
    costs = (
        "Codecs cost what was released with Espresso, on a V100: EF-SignSGD 130 us to encode and "
        "140 us to decode, DGC 1 % 356 and 34, Rand-k 1 % 54 and 34, FP16 4 and 22, constant up to "
        "4 MB and then by the byte; DGC sends what topk does. The CPUs "
        "of a node encode and decode 10 Gb/s together."
        if measured is None
        else "Codecs run on the CPU, one thread for each rank, and cost what was measured: "
        + ", ".join(measured.specs)
        + "."
    )
    selections = [
        table.selection(model, codec, links)
        for links, model, codec in product(PCIE_64, table.jobs, filter(table.knows, TITLES))
    ]
    gains = [found.uncompressed_s / found.iteration_s - 1 for found in selections]
    head = _HEAD.format(
        command=shlex.join(["python", "benchmarks/compression_published.py", *arguments]),
        version=__version__,
        python=platform.python_version(),
        date=datetime.date.today(),
        models=", ".join(table.jobs),
        compute=", ".join(f"{m} {1e3 * job.iteration_s:.0f} ms" for m, job in table.jobs.items()),
        costs=costs,
        least=min(gains),
        most=max(gains),
    )
    claims = in_markdown(
        ("system", "published", "nominal links", "released links", "reached",
         "what differs, and why"),
        headlines(table),
    )  # fmt: skip
    cases = in_markdown(
        ("case", "compute", "uncompressed", "HiPress", "tuned", "HiTopKComm", "BytePS-Compress",
         "1 + 2", "ByteComp", "bound", "gain", "over none", "of the bound"),
        every_case(table),
    )  # fmt: skip
    return f"{head}\n{claims}{_TABLE}\n{cases}"


@click.command(context_settings={"max_content_width": 100})
@folder_option
@click.option(
    "--codec-costs",
    type=click.Path(path_type=Path, exists=True),
    help="Costs of codecs as `usbyte probe --codecs` writes them, in place of a V100's.",
)
@output_option
def main(folder: Path, codec_costs: Path | None, output: Path | None) -> None:
    """Simulate what is published on compressed training, and put both side by side."""
    measured = None
    if codec_costs:
        try:
            measured = _core.CodecCosts.from_json(codec_costs.read_text())
        except UsageError as error:
            raise click.ClickException(f"'{codec_costs}': {error}") from error
    deliver(document(load(folder), measured, sys.argv[1:]), output)


if __name__ == "__main__":
    main()

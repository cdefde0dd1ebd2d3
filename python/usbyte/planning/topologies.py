# SPDX-License-Identifier: Apache-2.0
"""Published networks of several dimensions, and published jobs as sequences of collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from usbyte._core import (
    Dimension,
    MeshCollective,
    MeshRun,
    Topology,
    fixed_routes,
    simulate_mesh,
)
from usbyte._util.json_fields import Fields, parse
from usbyte.errors import UsageError

#: Names of published networks; `meshes/README.md` gives their sources.
MESHES = (
    "2d-sw-sw", "3d-sw-sw-sw-homo", "3d-sw-sw-sw-hetero", "3d-fc-ring-sw", "4d-ring-sw-sw-sw",
    "4d-ring-fc-ring-sw",
)  # fmt: skip
#: Names of published jobs; each file gives its source and its assumptions.
WORKLOADS = ("resnet50", "gnmt", "dlrm", "transformer-1t")
_FOLDER = Path(__file__).parent
_GROUPS = ("all", "model", "data")
_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_FORMAT = "usbyte-mesh-workload-1"
_MOST_RANKS = 2**31 - 1

#: Returns the routes of a collective's chunks, from its topology, its kind and its bytes.
Routing = Callable[[Topology, str, float], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Start:
    """A collective that a job starts.

    Attributes:
        name: Unique name, by which a later step waits for the collective.
        kind: "all_reduce", "reduce_scatter", "all_gather" or "all_to_all".
        bytes: Size of the whole vector of one rank, that is, before a reduce_scatter and after an
            all_gather.
        ranks: "all"; "model": the ranks that share one copy of the model; "data": the ranks that
            have the same shard of it.
        blocking: Whether the next step starts only when the collective is done.
    """

    name: str
    kind: str
    bytes: float
    ranks: str = "all"
    blocking: bool = False


@dataclass(frozen=True)
class Step:
    """One action of a rank: wait, then compute, then start a collective. Each may be absent.

    Attributes:
        wait: Name of the collective to wait for.
        compute_s: Seconds of compute, before the factor `Workload.compute_scale`.
        start: The collective to start.
    """

    wait: str | None = None
    compute_s: float = 0.0
    start: Start | None = None


@dataclass(frozen=True)
class Workload:
    """One iteration of a job, the same on all ranks.

    Attributes:
        name: Name of the job's neural network.
        source: Where the numbers were published.
        assumptions: Facts that were assumed, as they are not published.
        model_ranks: Number of innermost ranks that share one copy of the neural network.
        compute_scale: Factor of all compute times.
        steps: The actions, in order.
    """

    name: str
    source: str
    assumptions: tuple[str, ...]
    model_ranks: int
    compute_scale: float
    steps: tuple[Step, ...]

    @property
    def compute_s(self) -> float:
        """Seconds of compute in the iteration."""
        return self.compute_scale * sum(step.compute_s for step in self.steps)

    def scaled(self, compute: float) -> Workload:
        """Returns the job with all compute times multiplied by `compute`."""
        return replace(self, compute_scale=self.compute_scale * compute)


def load_mesh(source: str) -> Topology:
    """Reads a topology.

    Args:
        source: A name in `MESHES`, or the path of a JSON file.

    Raises:
        UsageError: The file cannot be read, or does not have a valid topology.
    """
    text = _read("meshes", MESHES, source)
    try:
        return Topology.from_json(text)
    except UsageError as error:
        raise UsageError(f"'{source}': {error}") from error


def load_workload(source: str) -> Workload:
    """Reads a job.

    Args:
        source: A name in `WORKLOADS`, or the path of a JSON file.

    Raises:
        UsageError: The file cannot be read, or does not have a valid job.
    """
    root = parse(_read("workloads", WORKLOADS, source), source)
    root.one_of("format", (_FORMAT,))
    job = Workload(
        root.text("name"),
        root.text("source"),
        root.texts("assumptions"),
        root.whole("model_ranks", 1, _MOST_RANKS),
        root.number("compute_scale"),
        _steps(root.rows("steps"), source),
    )
    root.end()
    return job


def group_sizes(topology: Topology, ranks: str, model_ranks: int) -> list[int]:
    """Returns, by dimension, how many ranks of a mesh axis group take part in a collective.

    Args:
        topology: The network.
        ranks: "all", "model" or "data", as in `Start.ranks`.
        model_ranks: Number of innermost ranks that share one copy of the model.

    Raises:
        UsageError: The `model_ranks` innermost ranks do not form a mesh. They must fill whole
            dimensions, and divide the size of the last one that they span.
    """
    sizes, left = [], model_ranks
    for dimension in topology.dimensions:
        # Ranks can span a dimension only if they fill all inner dimensions.
        sizes.append(math.gcd(dimension.size, left))
        left //= sizes[-1]
        if left > 1 and sizes[-1] < dimension.size:
            break
    if left != 1:
        raise UsageError(
            f"{model_ranks} innermost ranks of a mesh of "
            f"{' x '.join(str(d.size) for d in topology.dimensions)} form no smaller mesh"
        )
    sizes += [1] * (len(topology.dimensions) - len(sizes))
    whole = [dimension.size for dimension in topology.dimensions]
    if ranks == "all":
        return whole
    return sizes if ranks == "model" else [w // s for w, s in zip(whole, sizes, strict=True)]


def step_s(
    job: Workload,
    topology: Topology,
    routing: Routing,
    queue: str = "fifo",
    startups_overlap: bool = False,
) -> float:
    """Simulates an iteration; returns the seconds until all compute and collectives are done.

    Args:
        job: The job.
        topology: The network.
        routing: Chooses the routes of each collective. The topology that it gets has only the ranks
            of that collective.
        queue: Order in which a dimension serves its chunks, "fifo" or "scf".
        startups_overlap: Whether a dimension starts the next chunk as soon as the bytes of the one
            before have been sent. By default it starts it when that chunk has arrived.
    """
    sent, computed = _walk(job, topology)
    collectives = [
        each.collective(routing(topology.among(each.sizes), each.start.kind, each.start.bytes))
        for each in sent
    ]
    return _end_s(simulate_mesh(topology, collectives, queue, startups_overlap), computed)


def ideal_step_s(job: Workload, topology: Topology) -> float:
    """Returns the seconds of an iteration on an ideal network.

    On the ideal network, a collective uses all links of the dimensions that it spans, all the time.
    Startups take no time, switches do not reduce data, and no rank forwards data for another.
    Collectives among the same ranks are served one after another, in the order in which they start.
    Collectives among different sets of ranks do not delay each other, although they share links.

    The result is a lower limit of the step time under two conditions. No two collectives among the
    same ranks are in flight at once, and the switches of the real network do not reduce data.
    Otherwise a schedule can be faster: chunks of a small collective may overtake those of a large
    one, and a switch that reduces data receives and sends fewer bytes.
    """
    sent, computed = _walk(job, topology)
    spans = sorted({tuple(each.sizes) for each in sent})
    if not spans:
        return job.compute_s
    # Each distinct set of dimensions becomes one dimension of two ranks, which send half of a
    # vector to each other. The real ranks send a share of 1 - 1/ranks, so the bandwidth is scaled
    # to give the same time. With the real sizes, the number of ranks of the joined mesh, which is
    # the product of all sizes, could overflow.
    joined = []
    for place, sizes in enumerate(spans):
        among = topology.among(sizes)
        part = 1 - 1 / among.ranks
        speed = among.bytes_per_s / (2 * part) if part else 1.0  # A single rank sends nothing.
        joined.append(Dimension(str(place), 2, speed, kind="fully_connected"))
    mesh = Topology(joined)
    collectives = []
    for each in sent:
        place = spans.index(tuple(each.sizes))
        alone = [1] * len(spans)
        alone[place] = 2 if math.prod(each.sizes) > 1 else 1
        collectives.append(each.collective(fixed_routes(mesh.among(alone), 1), alone))
    return _end_s(simulate_mesh(mesh, collectives), computed)


@dataclass(frozen=True)
class _Sent:
    """A collective and its start time.

    Attributes:
        start: The collective.
        sizes: Participating ranks of each mesh axis group, as of `group_sizes`.
        after: Seconds to wait after the end of each earlier collective, by its position; -1 is the
            start of the iteration.
    """

    start: Start
    sizes: list[int]
    after: Mapping[int, float]

    def collective(
        self, routes: Sequence[Sequence[int]], sizes: Sequence[int] | None = None
    ) -> MeshCollective:
        return MeshCollective(
            self.start.kind,
            self.start.bytes,
            routes,
            self.sizes if sizes is None else sizes,
            self.after.get(-1, 0.0),
            [(place, delay_s) for place, delay_s in self.after.items() if place >= 0],
        )


def _walk(job: Workload, topology: Topology) -> tuple[list[_Sent], dict[int, float]]:
    """Returns all collectives, and when compute ends.

    The end of compute is given like `_Sent.after`: as seconds after the end of collectives.
    """
    now, sent, places = {-1: 0.0}, list[_Sent](), dict[str, int]()
    for step in job.steps:
        if step.wait is not None:
            now = {places[step.wait]: 0.0, **now}
        now = {place: s + job.compute_scale * step.compute_s for place, s in now.items()}
        if step.start is None:
            continue
        place = places[step.start.name] = len(sent)
        sent.append(
            _Sent(step.start, group_sizes(topology, step.start.ranks, job.model_ranks), now)
        )
        if step.start.blocking:
            now = {place: 0.0}
    return sent, now


def _end_s(run: MeshRun, computed: Mapping[int, float]) -> float:
    ends = [(run.done_s[place] if place >= 0 else 0.0) + s for place, s in computed.items()]
    return max(run.finish_s, *ends)


def _read(folder: str, names: Sequence[str], source: str) -> str:
    path = _FOLDER / folder / f"{source}.json" if source in names else Path(source)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte in the path.
        raise UsageError(
            f"cannot read '{source}': {error}; give a JSON file or one of " + ", ".join(names)
        ) from error


def _steps(rows: Sequence[Fields], file: str) -> tuple[Step, ...]:
    steps, started = list[Step](), set[str]()
    for place, row in enumerate(rows):
        wait = row.text("wait") if row.has("wait") else None
        if wait is not None and wait not in started:
            raise UsageError(
                f"'{file}': steps[{place}].wait is for {wait!r}, which has not been started"
            )
        compute_s = row.number("compute_s") if row.has("compute_s") else 0.0
        start = _start(row.inner("start")) if row.has("start") else None
        if start is not None and start.name in started:
            raise UsageError(f"'{file}': steps[{place}].start.name: {start.name!r} starts twice")
        if start is not None:
            started.add(start.name)
        row.end()
        steps.append(Step(wait, compute_s, start))
    return tuple(steps)


def _start(row: Fields) -> Start:
    start = Start(
        row.text("name"),
        row.one_of("kind", _KINDS),
        row.number("bytes"),
        row.one_of("ranks", _GROUPS) if row.has("ranks") else "all",
        row.flag("blocking") if row.has("blocking") else False,
    )
    row.end()
    return start

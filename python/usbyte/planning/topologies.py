"""Published networks of several dimensions, and training jobs as what they send on them."""

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

#: Names of published networks; `meshes/README.md` says where they are from.
MESHES = (
    "2d-sw-sw", "3d-sw-sw-sw-homo", "3d-sw-sw-sw-hetero", "3d-fc-ring-sw", "4d-ring-sw-sw-sw",
    "4d-ring-fc-ring-sw",
)  # fmt: skip
#: Names of published jobs; each file says where it is from and what was assumed.
WORKLOADS = ("resnet50", "gnmt", "dlrm", "transformer-1t")
_FOLDER = Path(__file__).parent
_GROUPS = ("all", "model", "data")
_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_FORMAT = "usbyte-mesh-workload-1"
_MOST_RANKS = 2**31 - 1

#: Routes of the chunks of a collective of a kind and so many bytes.
Routing = Callable[[Topology, str, float], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Start:
    """A collective that a job starts.

    Attributes:
        name: By which a later step waits for it.
        kind: all_reduce, reduce_scatter, all_gather or all_to_all.
        bytes: Of the vector of one rank where it is whole.
        ranks: all; model: those that share one copy of the model; data: those with the same part.
        blocking: Computing goes on when it is done.
    """

    name: str
    kind: str
    bytes: float
    ranks: str = "all"
    blocking: bool = False


@dataclass(frozen=True)
class Step:
    """What a rank does next: wait, then compute, then start a collective.

    Attributes:
        wait: For the collective of this name.
        compute_s: Seconds, before `Workload.compute_scale`.
        start: Which collective.
    """

    wait: str | None = None
    compute_s: float = 0.0
    start: Start | None = None


@dataclass(frozen=True)
class Workload:
    """One iteration of a job, the same on all ranks.

    Attributes:
        name: Of the model.
        source: Of the figures.
        assumptions: What is not published, or not known here.
        model_ranks: So many of the innermost ranks share one copy of the model.
        compute_scale: Factor of all compute.
        steps: One after another.
    """

    name: str
    source: str
    assumptions: tuple[str, ...]
    model_ranks: int
    compute_scale: float
    steps: tuple[Step, ...]

    @property
    def compute_s(self) -> float:
        """Seconds of computing alone."""
        return self.compute_scale * sum(step.compute_s for step in self.steps)

    def scaled(self, compute: float) -> Workload:
        """The same with so many times as much to compute."""
        return replace(self, compute_scale=self.compute_scale * compute)


def load_mesh(source: str) -> Topology:
    """Reads a network, by one of the names in `MESHES` or from a file.

    Raises:
        UsageError: There is no such file, or it holds no valid topology.
    """
    text = _read("meshes", MESHES, source)
    try:
        return Topology.from_json(text)
    except UsageError as error:
        raise UsageError(f"'{source}': {error}") from error


def load_workload(source: str) -> Workload:
    """Reads a job, by one of the names in `WORKLOADS` or from a file.

    Raises:
        UsageError: There is no such file, or it holds no valid job.
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
    """Ranks of each line that take part in a collective.

    Args:
        topology: The network.
        ranks: all, model or data; see `Start`.
        model_ranks: How many of the innermost ranks share one copy of the model.

    Raises:
        UsageError: These ranks do not fill dimensions, the last one in equal parts.
    """
    sizes, left = [], model_ranks
    for dimension in topology.dimensions:
        # A dimension is shared only once those further in are full.
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
    """Seconds of an iteration, until everything is computed and has arrived.

    Args:
        job: What is computed and sent.
        topology: On which network.
        routing: Routes for a collective, of which the topology shows only its ranks.
        queue: fifo or scf.
        startups_overlap: See `mesh_simulator.h`.
    """
    sent, computed = _walk(job, topology)
    collectives = [
        each.collective(routing(topology.among(each.sizes), each.start.kind, each.start.bytes))
        for each in sent
    ]
    return _end_s(simulate_mesh(topology, collectives, queue, startups_overlap), computed)


def ideal_step_s(job: Workload, topology: Topology) -> float:
    """Seconds of an iteration in which every collective is served as an ideal network would.

    A collective that is served uses all links of the dimensions that it spans, all the time;
    startups take no time, switches do not add up, and no rank passes on what is for another.
    Collectives among the same ranks are served one after another, each as a whole, in the order in
    which they start; those among other ranks are not in each other's way, though they share links.

    No schedule is faster for a job of which no two collectives among the same ranks are under way
    at once, on a network whose switches do not add up. It is no bound otherwise: chunks of a small
    collective may overtake those of a large one, which here it waits for, and a switch that adds up
    has less sent.
    """
    sent, computed = _walk(job, topology)
    spans = sorted({tuple(each.sizes) for each in sent})
    if not spans:
        return job.compute_s
    # For all dimensions that a collective spans one of two ranks, which send half of a vector to
    # each other: as much faster than theirs together as they send more. A mesh of as many ranks as
    # all of them have could have more than there are numbers for.
    joined = []
    for place, sizes in enumerate(spans):
        among = topology.among(sizes)
        part = 1 - 1 / among.ranks
        speed = among.bytes_per_s / (2 * part) if part else 1.0  # of one rank alone
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
    """A collective, and so long after the ends of which earlier ones (-1: the start) it starts."""

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
    """All collectives, and so long after the ends of which of them all is computed."""
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
    except (OSError, ValueError) as error:  # ValueError: no text, or a path that there cannot be
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

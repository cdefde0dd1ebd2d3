"""Published networks of several dimensions, and training jobs as what they send on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from usbyte._core import (
    Dimension,
    MeshCollective,
    MeshRun,
    Topology,
    fixed_routes,
    simulate_mesh,
)
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
    return Topology.from_json(_read("meshes", MESHES, source))


def load_workload(source: str) -> Workload:
    """Reads a job, by one of the names in `WORKLOADS` or from a file.

    Raises:
        UsageError: There is no such file, or it holds no valid job.
    """
    text = _read("workloads", WORKLOADS, source)
    try:
        root = json.loads(text)
        if root["format"] != "usbyte-mesh-workload-1":
            raise ValueError(f"its format is {root['format']!r}")
        job = Workload(
            str(root["name"]),
            str(root["source"]),
            tuple(map(str, root["assumptions"])),
            int(root["model_ranks"]),
            float(root["compute_scale"]),
            tuple(_step(row) for row in root["steps"]),
        )
        _check(job)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"'{source}' is not a job for a mesh: {error!r}") from error
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
    """Seconds of an iteration if every collective used all dimensions that it spans all the time.

    Collectives of different ranks are not in each other's way here, startups take no time: a bound
    that schedules may not reach.
    """
    sent, computed = _walk(job, topology)
    spans = sorted({tuple(each.sizes) for each in sent})
    if not spans:
        return job.compute_s
    # One dimension in place of all those that a collective spans, with their speeds together.
    joined = []
    for place, sizes in enumerate(spans):
        among = topology.among(sizes)
        speed = among.bytes_per_s or 1.0  # of one rank alone
        joined.append(Dimension(str(place), among.ranks, speed, kind="fully_connected"))
    mesh = Topology(joined)
    collectives = []
    for each in sent:
        alone = [1] * len(spans)
        alone[spans.index(tuple(each.sizes))] = topology.among(each.sizes).ranks
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
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read '{source}': {error}; give a JSON file or one of " + ", ".join(names)
        ) from error


def _step(row: Mapping[str, Any]) -> Step:
    start = row.get("start")
    return Step(
        row.get("wait"), float(row.get("compute_s", 0.0)), Start(**start) if start else None
    )


def _check(job: Workload) -> None:
    started: set[str] = set()
    for step in job.steps:
        if step.wait is not None and step.wait not in started:
            raise ValueError(f"it waits for {step.wait!r}, which has not been started")
        _check_number(step.compute_s, "compute_s")
        if step.start is None:
            continue
        if step.start.name in started:
            raise ValueError(f"it starts {step.start.name!r} twice")
        started.add(step.start.name)
        if step.start.kind not in _KINDS or step.start.ranks not in _GROUPS:
            raise ValueError(
                f"{step.start.name!r} is a {step.start.kind!r} among {step.start.ranks!r} ranks; "
                f"known are {', '.join(_KINDS)} among {', '.join(_GROUPS)}"
            )
        _check_number(step.start.bytes, step.start.name)
    _check_number(job.compute_scale, "compute_scale")
    if job.model_ranks < 1:
        raise ValueError(f"its model_ranks are {job.model_ranks}")


def _check_number(value: float, name: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}, and must be finite and not negative")

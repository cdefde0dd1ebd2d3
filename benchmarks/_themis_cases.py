# SPDX-License-Identifier: Apache-2.0
"""What is simulated of Themis: one all_reduce, two dimensions, and training."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from usbyte import _core
from usbyte.planning import topologies

CHUNKS = 64
SIZES_MB = (100, 250, 500, 1000)
KIND = "all_reduce"
RULES = ("once", "each_phase", "original")


@dataclass(frozen=True)
class Rules:
    """How startups are simulated, and how Themis' loads count them.

    Attributes:
        overlap: Others send meanwhile; else a dimension carries out one operation at a time.
        latency: once, each_phase or original.
        startups: Whether there are any.
    """

    overlap: bool
    latency: str
    startups: bool = True

    def mesh(self, name: str) -> _core.Topology:
        """A published network."""
        mesh = topologies.load_mesh(name)
        if self.startups:
            return mesh
        return _core.Topology(
            [_core.Dimension(d.name, d.size, d.bytes_per_s, 0.0, d.kind) for d in mesh.dimensions]
        )


OVERLAPPING, IN_TURN = Rules(True, "once"), Rules(False, "each_phase")
NONE = Rules(True, "once", startups=False)


@dataclass(frozen=True)
class Outcome:
    """One all_reduce, seconds: in the fixed order, by Themis in two queues, and at best.

    Attributes:
        fixed_s: Innermost dimension first.
        fifo_s: Themis, in order of arrival.
        scf_s: Themis, smallest chunk first.
        ideal_s: All dimensions busy all the time.
    """

    fixed_s: float
    fifo_s: float
    scf_s: float
    ideal_s: float

    @property
    def times_s(self) -> tuple[float, float, float]:
        """Without the ideal."""
        return self.fixed_s, self.fifo_s, self.scf_s

    @property
    def utilization(self) -> tuple[float, ...]:
        """Of fixed, fifo, scf: without switches that add up, every route moves the same bytes."""
        return tuple(self.ideal_s / s for s in self.times_s)

    @property
    def gains(self) -> tuple[float, float]:
        """Speed-ups of fifo and scf."""
        return self.fixed_s / self.fifo_s, self.fixed_s / self.scf_s

    @property
    def chosen(self) -> float:
        """Speed-up of the fastest of the three."""
        return self.fixed_s / min(self.times_s)


def all_reduce(mesh: _core.Topology, size: float, rules: Rules, chunks: int = CHUNKS) -> Outcome:
    """One all_reduce of `size` bytes."""
    fixed = _core.fixed_routes(mesh, chunks)
    routes = _core.themis_routes(mesh, KIND, size, chunks, rules.latency)

    def seconds(way: Sequence[Sequence[int]], queue: str) -> float:
        collective = _core.MeshCollective(KIND, size, way)
        return _core.simulate_mesh(mesh, [collective], queue, rules.overlap).finish_s

    return Outcome(
        seconds(fixed, "fifo"),
        seconds(routes, "fifo"),
        seconds(routes, "scf"),
        _core.ideal_s(mesh, KIND, size),
    )


@functools.cache
def outcomes(rules: Rules, chunks: int = CHUNKS) -> dict[tuple[str, int], Outcome]:
    """By network and MB."""
    return {
        (name, mb): all_reduce(rules.mesh(name), 1e6 * mb, rules, chunks)
        for name in topologies.MESHES
        for mb in SIZES_MB
    }


def two_dimensions(inner: float, outer: float, nodes: int) -> _core.Topology:
    """Nodes of 8 ranks, GB/s of a rank, without startups."""
    return _core.Topology(
        [
            _core.Dimension("node", 8, 1e9 * inner, kind="fully_connected"),
            _core.Dimension("network", nodes, 1e9 * outer, kind="switched"),
        ]
    )


def _routing(rules: Rules, themis: bool) -> topologies.Routing:
    def routes(mesh: _core.Topology, kind: str, size: float) -> Sequence[Sequence[int]]:
        if themis:
            return _core.themis_routes(mesh, kind, size, CHUNKS, rules.latency)
        return _core.fixed_routes(mesh, CHUNKS)

    return routes


def steps_s(job: topologies.Workload, mesh: _core.Topology) -> tuple[float, float, float, float]:
    """Seconds of an iteration: fixed, Themis by arrival, smallest first, ideal."""
    run = functools.partial(topologies.step_s, job, mesh, startups_overlap=True)
    themis = _routing(OVERLAPPING, True)
    return (
        run(_routing(OVERLAPPING, False)), run(themis), run(themis, "scf"),
        topologies.ideal_step_s(job, mesh),
    )  # fmt: skip


def direct(mesh: _core.Topology) -> _core.Topology:
    """The same with rings whose ranks pass nothing on, though steps are as many."""
    return _core.Topology(
        [
            _core.Dimension(d.name, d.size, d.bytes_per_s, d.startup_s, "fully_connected")
            if d.kind == "ring"
            else d
            for d in mesh.dimensions
        ]
    )


def gains(
    job: topologies.Workload,
    network: Callable[[_core.Topology], _core.Topology] = lambda mesh: mesh,
) -> list[tuple[float, float, float]]:
    """Speed-ups on every network, or one made of it: Themis by arrival, smallest first, ideal."""
    found = []
    for name in topologies.MESHES:
        fixed, *others = steps_s(job, network(topologies.load_mesh(name)))
        found.append((fixed / others[0], fixed / others[1], fixed / others[2]))
    return found


def compute_for(job: topologies.Workload, gain: float) -> str:
    """The factor of computing that makes a published mean speed-up come out."""

    def mean_gain(log_factor: float) -> float:
        return statistics.mean(scf for _, scf, _ in gains(job.scaled(10**log_factor)))

    low, high = -2.0, 2.0
    if mean_gain(low) < gain:
        return "none"
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_gain(middle) >= gain else (low, middle)
    return f"{10**low:.2f}"

"""What each tuned policy searches: the published ones' sizes, and our own corrections to `auto`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from usbyte import _core
from usbyte.tuning.tuner import Candidate, Point, Search

_MIB = 1 << 20
_XI = 0.1  # as published, by both


@dataclass(frozen=True)
class Job:
    """What a policy plans for.

    Attributes:
        profile: What the job was measured to do.
        network: What the network was measured to cost.
        options: Sizes in bytes; see `usbyte._core.make_plan`.
        overlap: What communication may hide behind.
        sharded: Whether each rank updates its shard, and parameters are gathered.
    """

    profile: _core.Profile
    network: _core.NetworkModel
    options: Mapping[str, int]
    overlap: str = "forward"
    sharded: bool = False

    def plan(
        self, policy: str, network: _core.NetworkModel | None = None, **sizes: int
    ) -> _core.Plan:
        """A policy's plan under other sizes, or another network."""
        options = {**self.options, **sizes}
        return _core.make_plan(
            policy, self.profile, network or self.network, options, self.overlap, self.sharded
        )

    def simulated_s(self, plan: _core.Plan) -> float:
        """Seconds of a step, as predicted."""
        args = (self.profile, self.network, self.overlap, self.sharded)
        return _core.simulate(plan, *args).step_s


def bytescheduler(job: Job) -> Search:
    """ByteScheduler's tuner: partition 2 to 32 MiB and credit 4 to 64 MiB, 15 points of 100 steps.

    Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration",
    SOSP 2019. The second axis is the credit's place between the partition and 64 MiB, so that no
    point has a credit that holds no part; both are logarithmic. The first point is what the options
    say.
    """

    def at(point: Point) -> Candidate:
        partition = _between(2 * _MIB, 32 * _MIB, point[0])
        credit = _between(max(4 * _MIB, partition), 64 * _MIB, point[1])
        plan = job.plan("bytescheduler", partition_bytes=partition, credit_bytes=credit)
        what = f"partition {_mib(partition)}, credit {_mib(credit)}"
        return Candidate(what, _named("tune:bytescheduler", plan), point)

    first = _place(2 * _MIB, 32 * _MIB, job.options.get("partition_bytes", 8 * _MIB))
    least = max(4 * _MIB, _between(2 * _MIB, 32 * _MIB, first))
    second = _place(least, 64 * _MIB, job.options.get("credit_bytes", 16 * _MIB))
    starts = [at((first, second))]
    return Search(("partition", "credit"), at, starts, trials=15, steps=100, xi=_XI)


def dear(job: Job) -> Search:
    """DeAR's tuner: the fusion size, 1 to 256 MiB from 25 MiB on, 10 trials of 5 steps.

    Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
    Pipelining", ICDCS 2023. The axis is logarithmic.
    """

    def at(point: Point) -> Candidate:
        fusion = _between(_MIB, 256 * _MIB, point[0])
        plan = job.plan("dear", fusion_bytes=fusion)
        return Candidate(f"fusion {_mib(fusion)}", _named("tune:dear", plan), point)

    starts = [at((_place(_MIB, 256 * _MIB, 25 * _MIB),))]
    return Search(("fusion",), at, starts, trials=10, steps=5, xi=_XI)


def ours(job: Job) -> Search:
    """Our own, "tune": `auto` under other costs than the probe has measured.

    What a probe between two steps cannot tell is what ops cost inside the job, where they compete
    with compute for cores and memory, and with each other. So the search is not over sizes, which
    `auto` chooses better for given costs than any sampling does, but over the two numbers that it
    chooses them by: factors on all startups (1/4 to 16) and on all costs of a byte (1/2 to 4), more
    room upwards because contention only adds. They order plans from many small ops that hide
    everything to few large ones that disturb little. `auto`'s own plan is the first, and two
    policies that know no costs or heed them less come next: DDP and ByteScheduler, or with shards
    DeAR with its usual and its best fusion size. What wins is measured again, against `auto`'s own
    plan, and stays only if it is faster by 1 % once more, so that noise cannot make a job slower.
    """

    def at(point: Point) -> Candidate:
        alpha, beta = 2 ** (6 * point[0] - 2), 2 ** (3 * point[1] - 1)
        plan = job.plan("auto", _scaled(job.network, alpha, beta))
        what = f"auto with startups x {alpha:.2f}, bytes x {beta:.2f}"
        return Candidate(what, _named("tune", plan), point)

    unscaled = (1 / 3, 1 / 3)
    starts = [Candidate("auto", _named("tune", job.plan("auto")), unscaled)]
    for policy in ("dear", "dear_exact") if job.sharded else ("ddp", "bytescheduler"):
        starts.append(Candidate(policy, _named("tune", job.plan(policy))))
    return Search(("alpha", "beta"), at, starts, trials=12, steps=12, xi=0.01, confirm=True)


def narrowed(search: Search, best: Candidate) -> Search:
    """The first candidate against what was best before, for the same search on other costs."""
    first = search.starts[0]
    again = next((s for s in search.starts if s.what == best.what), None)
    if again is None and best.point:
        again = search.at(best.point)
    starts = [first] if again is None or again.plan == first.plan else [first, again]
    return replace(search, starts=starts, trials=len(starts))


def _scaled(network: _core.NetworkModel, alpha: float, beta: float) -> _core.NetworkModel:
    def costs(column: list[_core.AlphaBeta]) -> list[_core.AlphaBeta]:
        return [
            # What is added is not hidden.
            _core.AlphaBeta(
                c.alpha_s * alpha, c.beta_s_per_byte * beta, min(c.overlap_s, c.alpha_s * alpha)
            )
            for c in column
        ]

    shot = network.one_shot
    return _core.NetworkModel(
        network.ranks,
        costs(network.all_reduce),
        costs(network.reduce_scatter),
        costs(network.all_gather),
        network.concurrent,
        network.busy_alpha_s * alpha,
        network.pack_s_per_byte,
        _core.OneShot(shot.most_bytes, shot.latency_s * alpha, shot.gap_s * alpha),
    )


def _named(policy: str, plan: _core.Plan) -> _core.Plan:
    # Equal ops then make equal hashes, whoever has planned them.
    return _core.Plan(policy, plan.tensors, plan.ops)


def _between(low: int, high: int, place: float) -> int:
    """From low (0) to high (1), logarithmically."""
    return min(max(round(low * (high / low) ** place), low), high)


def _place(low: int, high: int, value: int) -> float:
    """Inverse of `_between`; values outside count as the nearest end."""
    return min(max(math.log(value / low) / math.log(high / low), 0.0), 1.0)


def _mib(size: int) -> str:
    return f"{size / _MIB:.3g} MiB"

"""What is tried: sizes of published policies, plans that are nearly as good as `auto`'s."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from usbyte import _core
from usbyte.planning.tuning.tuner import Candidate, Point, Search, Space

_MIB = 1 << 20
_XI = 0.1  # as published, by both
_SCALES = [  # of startups and bytes, from which variants of a plan come
    (alpha, beta) for beta in (1.0, 0.99, 1.01, 0.98) for alpha in (2.0, 1.4, 0.7)
]
_VARIANTS = 5  # that are tried
_BY_LAYER = 0.05  # of a step, that updates by layer may cost
_ALMOST = 0.005  # of the step: differences that the model cannot tell
_PLANNING_S = 5.0  # after which no more variants are planned


@dataclass(frozen=True)
class Job:
    """What a policy plans for.

    Attributes:
        profile: What the job was measured to do.
        network: What the network was measured to cost.
        options: Sizes in bytes; see `usbyte._core.make_plan`.
        overlap: What communication may hide behind.
        sharded: Whether each rank updates its shard, and parameters are gathered.
        codecs: By tensor, what gradients travel by; empty: nothing is compressed, or plans get
            their codecs afterwards.
        codec_costs: Of those codecs.
        may_end_in_backward: Plans under which gradients are final after backward are tried too.
    """

    profile: _core.Profile
    network: _core.NetworkModel
    options: Mapping[str, int]
    overlap: str = "forward"
    sharded: bool = False
    codecs: Sequence[str] = ()
    codec_costs: _core.CodecCosts = field(default_factory=lambda: _core.CodecCosts())
    may_end_in_backward: bool = False

    def plan(
        self, policy: str, network: _core.NetworkModel | None = None, **sizes: int
    ) -> _core.Plan:
        """A policy's plan under other sizes, or another network."""
        options = {**self.options, **sizes}
        return _core.make_plan(
            policy, self.profile, network or self.network, options, self.overlap, self.sharded,
            self.codecs, self.codec_costs,
        )  # fmt: skip

    def simulated_s(self, plan: _core.Plan) -> float:
        """Seconds of a step, as predicted."""
        args = (self.profile, self.network, self.overlap, self.sharded, self.codec_costs)
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
    space = Space(("partition", "credit"), at, trials=15, xi=_XI)
    return Search(starts, steps=100, space=space)


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
    return Search(starts, steps=5, space=Space(("fusion",), at, trials=10, xi=_XI))


def auto(job: Job) -> Search:
    """`auto` in the job: its plan, variants that the model holds for as good, and DDP's plan.

    Plans of equal predicted steps differ by some percent where they run, as ops compete with
    compute for cores and memory, and ranks are late by chance: the job knows better than any model.
    Variants are what `auto` plans under startups and bytes a little dearer or cheaper, as far as
    the predicted step hardly suffers. DDP's plan is there for the case that the model is wrong
    altogether, and, where gradients may be final after backward, as what updates by layer cost is
    not in the model, also what `auto` plans then. The faster ones are measured again.

    Nothing but its plan is tried where that is DDP's already, as nothing is to be won; nor with
    shards, as state moves between ranks with each change of plans.
    """
    end = time.monotonic() + _PLANNING_S
    first = job.plan("auto")
    starts = [Candidate("auto", first)]
    if not job.sharded and first.ops != (usual := job.plan("ddp")).ops:
        starts += _variants(job, first, end)
        overlap = None
        if job.may_end_in_backward and job.overlap != "backward":
            overlap = "backward"
            starts += _in_backward(job, first)
        starts.append(Candidate("ddp", _named("auto", usual), overlap=overlap))
    return Search(starts, steps=7, halve=True)


def mergecomp_online(job: Job) -> Search:
    """MergeComp's search as published: two groups, one boundary, the running job's steps.

    Wang, Wu and Ng, "MergeComp: A Compression Scheduler for Scalable Communication-Efficient
    Distributed Training", 2021. All gradients as one group first, then two groups of those that
    backward produces first and last; the step is taken to fall and then to rise with the boundary
    between them, so that a search over it needs about 1.44 log2 of the number of tensors. Here it
    is Fibonacci's (Kiefer, "Sequential Minimax Search for a Maximum", 1953), with 10 steps of each
    plan. Groups are sent one after the other, each as an operation for each dtype and codec.
    """
    profile = job.profile
    count = len(profile.tensors)
    later_first = range(count - 1, -1, -1)
    backward = sorted(later_first, key=lambda tensor: profile.ready_s[tensor])

    def at(boundary: int) -> Candidate:
        groups = [group for group in (backward[:boundary], backward[boundary:]) if group]
        plan = _core.Plan(
            "mergecomp_online",
            profile.tensors,
            [op for group in groups for op in _merged(profile.tensors, group)],
        )
        if job.codecs:
            plan = _core.with_codecs(plan, job.codecs)
        words = f"{boundary} of {count} tensors before the rest" if boundary else "one group"
        return Candidate(words, plan)

    def guide(time_of: Callable[[Candidate], float | None]) -> Candidate | None:
        return _fibonacci(at, 1, count - 1, time_of)

    # A job with one start and no space is taken to have nothing to try.
    second = guide(lambda _: None)
    return Search([at(0), second] if second else [at(0)], steps=10, guide=guide)


def _merged(tensors: Sequence[_core.TensorSpec], group: Sequence[int]) -> list[_core.Op]:
    """An all_reduce for each dtype of a group, in the order in which their last tensors follow."""
    members: dict[str, list[int]] = {}
    for tensor in group:
        dtype = tensors[tensor].dtype
        members[dtype] = [*members.pop(dtype, []), tensor]
    ops = []
    for same in members.values():
        blocks: list[tuple[int, int]] = []
        for spec in (tensors[tensor] for tensor in sorted(same)):
            if blocks and blocks[-1][1] == spec.offset:
                blocks[-1] = (blocks[-1][0], spec.end)
            else:
                blocks.append((spec.offset, spec.end))
        ops.append(_core.Op("all_reduce", blocks, fence=True))
    return ops


def _fibonacci(
    at: Callable[[int], Candidate],
    low: int,
    high: int,
    time_of: Callable[[Candidate], float | None],
) -> Candidate | None:
    """The next point that a search for the least time within [low, high] asks for, if any."""
    if high < low:
        return None
    small, large = 1, 1  # the two inner points lie so far from the ends
    while large < high - low + 2:
        small, large = large, small + large
    start = low - 1  # the points from here to `large` further are left, without the ends
    while large > 2:
        left, right = start + large - small, start + small
        times = []
        for point in (left, right):
            time_s = time_of(at(point)) if point <= high else math.inf
            if time_s is None:
                return at(point)
            times.append(time_s)
        if times[1] < times[0]:
            start = left
        small, large = large - small, small
    last = at(start + 1)
    return last if time_of(last) is None else None


def _variants(job: Job, first: _core.Plan, end: float) -> list[Candidate]:
    worst_s = job.simulated_s(first) * (1 + _ALMOST)
    known = {first.hash()}
    found: list[Candidate] = []
    for alpha, beta in _SCALES:
        if len(found) == _VARIANTS or time.monotonic() > end:
            break
        plan = job.plan("auto", job.network.scaled(alpha, beta))
        if plan.hash() not in known and job.simulated_s(plan) <= worst_s:
            known.add(plan.hash())
            what = f"auto with startups x {alpha:.2g}, bytes x {beta:.2f}"
            found.append(Candidate(what, plan))
    return found


def _in_backward(job: Job, first: _core.Plan) -> list[Candidate]:
    """What `auto` plans where gradients are final after backward, if that may be no slower."""
    ended = replace(job, overlap="backward")
    plan = ended.plan("auto")
    worst_s = job.simulated_s(first) * (1 + _BY_LAYER)
    if ended.simulated_s(plan) > worst_s:
        return []
    return [Candidate("auto, gradients final after backward", plan, overlap="backward")]


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

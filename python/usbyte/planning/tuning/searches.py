# SPDX-License-Identifier: Apache-2.0
"""The searches: sizes of published policies, and variants of the plan of `auto`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.planning.tuning.tuner import Candidate, Point, Search, Space

_KIB, _MIB = 1 << 10, 1 << 20
_XI = 0.1  # The value of both papers, ByteScheduler and DeAR.
# Factors of the network model's startups and times per byte; each pair gives a variant of a plan.
_SCALES = [(alpha, beta) for beta in (1.0, 0.99, 1.01, 0.98) for alpha in (2.0, 1.4, 0.7)]
_VARIANTS = 3  # The most variants to try.
_RIVALS = 2  # The most plans of other policies to try.
_RIVAL = 0.05  # The share of a step by which their prediction may be longer.
_BY_LAYER = 0.05  # The share of a step that updates by layer may cost; the simulator ignores it.
_ALMOST = 0.005  # Predicted steps that differ by a smaller share count as equal.
_WORTH_TRIALS = 0.01  # The share of DDP's step that must be predicted to be saved.
_PLANNING_S = 5.0  # No more variants are planned after this time.


@dataclass(frozen=True)
class TuningTask:
    """The inputs of a policy.

    Attributes:
        profile: The measured job.
        network: The measured network.
        options: Sizes in bytes, by the names of `usbyte._core.make_plan`.
        overlap: "backward" or "forward".
        sharded: Whether each rank updates only its shard of the parameters.
        codecs: The codec of each tensor, in the profile's order. Empty: no compression, or the
            caller adds the codecs to the plans later.
        codec_costs: Encoding and decoding costs of these codecs.
        may_end_in_backward: Whether to try also plans with overlap "backward".
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
        """Makes a policy's plan.

        Args:
            policy: A policy of `usbyte._core.policies()`.
            network: Used instead of the job's network model.
            sizes: Sizes in bytes that replace those in `options`.
        """
        options = {**self.options, **sizes}
        return _core.make_plan(
            policy, self.profile, network or self.network, options, self.overlap, self.sharded,
            self.codecs, self.codec_costs,
        )  # fmt: skip

    def simulated_s(self, plan: _core.Plan) -> float:
        """Returns the predicted seconds of a step under the plan."""
        args = (self.profile, self.network, self.overlap, self.sharded, self.codec_costs)
        return _core.simulate(plan, *args).step_s


def bytescheduler(task: TuningTask) -> Search:
    """Searches partition (8 to 128 MiB) and credit (16 to 256 MiB) in 15 trials of 100 steps.

    This is the tuner of Peng et al., "A Generic Communication Scheduler for Distributed DNN
    Training Acceleration" (ByteScheduler), SOSP 2019. The released code counts in parameters: 2 to
    32 million and 4 to 64 million, taken at 4 bytes each. Both axes are logarithmic. The second
    axis is the position of the credit between the partition (at least 16 MiB) and 256 MiB, so that
    no credit is smaller than a partition. The first point comes from the job's options.
    """
    parts, credits = (8 * _MIB, 128 * _MIB), (16 * _MIB, 256 * _MIB)

    def at(point: Point) -> Candidate:
        partition = _between(*parts, point[0])
        credit = _between(max(credits[0], partition), credits[1], point[1])
        plan = task.plan("bytescheduler", partition_bytes=partition, credit_bytes=credit)
        what = f"partition {_mib(partition)}, credit {_mib(credit)}"
        return Candidate(what, _named("tune:bytescheduler", plan), point)

    first = _place(*parts, task.options.get("partition_bytes", 32 * _MIB))
    least = max(credits[0], _between(*parts, first))
    second = _place(least, credits[1], task.options.get("credit_bytes", 64 * _MIB))
    starts = [at((first, second))]
    space = Space(("partition", "credit"), at, trials=15, xi=_XI)
    return Search(starts, steps=100, space=space)


def dear(task: TuningTask) -> Search:
    """Searches the fusion size (1 to 256 MiB, first 25 MiB) in 10 trials of 5 steps.

    This is the tuner of Zhang et al., "DeAR: Accelerating Distributed Deep Learning with
    Fine-Grained All-Reduce Pipelining", ICDCS 2023. The axis is logarithmic.
    """

    def at(point: Point) -> Candidate:
        fusion = _between(_MIB, 256 * _MIB, point[0])
        plan = task.plan("dear", fusion_bytes=fusion)
        return Candidate(f"fusion {_mib(fusion)}", _named("tune:dear", plan), point)

    starts = [at((_place(_MIB, 256 * _MIB, 25 * _MIB),))]
    return Search(starts, steps=5, space=Space(("fusion",), at, trials=10, xi=_XI))


def us_byte(task: TuningTask) -> Search:
    """Tries units from 256 KiB to 32 MiB, by powers of two, for 10 steps each.

    Gao et al., "US-Byte: An Efficient Communication Framework for Scheduling Unequal-Sized Tensor
    Blocks in Distributed Deep Learning", TPDS 2024, plans for a given unit: 1 million parameters
    in its released code, and 1, 4 or 8 million in that of D-Credit.
    """
    return _units(task, "us-byte")


def dcredit(task: TuningTask) -> Search:
    """Tries units as `us_byte` does.

    Gao et al., "D-Credit: A Dynamic Sliding Window of Tensor Communication Mechanism to Accelerate
    Distributed DNN Training", TNSE 2025, plans for a given unit, too.
    """
    return _units(task, "dcredit")


def _units(task: TuningTask, policy: str) -> Search:
    sizes = [256 * _KIB << k for k in range(8)]
    starts = [
        Candidate(
            f"unit {_mib(size)}", _named(f"tune:{policy}", task.plan(policy, unit_bytes=size))
        )
        for size in sizes
    ]
    return Search(starts, steps=10)


def auto(task: TuningTask) -> Search:
    """Tries the plan of `auto`, variants of it with an almost equal prediction, and DDP's plan.

    Plans with equal predictions differ by some percent in the real job: ops compete with compute
    for cores and memory bandwidth, and ranks are late at random. A measurement shows which one is
    faster. The candidates are:

    - The plan of `auto`.
    - Variants: plans of `auto` under slightly larger or smaller startups and times per byte, if
      their predicted step is almost as short.
    - Without codecs, rivals: the best plans of other policies, if their predicted step is not much
      longer. They differ from that of `auto` in kind, and so in what the network model leaves out.
    - With `may_end_in_backward`: the plan of `auto` for overlap "backward". The network model does
      not include the cost of updates by layer, which this plan does not have.
    - DDP's plan, in case the network model is wrong.

    The faster half is measured again. Only the plan of `auto` is tried if it is predicted to save
    less than 1 % of DDP's step, or if the optimizer is sharded, since each switch of plans then
    moves state between ranks.
    """
    end = time.monotonic() + _PLANNING_S
    first = task.plan("auto")
    starts = [Candidate("auto", first)]
    usual = None if task.sharded else task.plan("ddp")
    if usual is not None and _is_worth_trials(task, first, usual):
        starts += _variants(task, first, end)
        starts += _rivals(task, starts, end)
        overlap = None
        if task.may_end_in_backward and task.overlap != "backward":
            overlap = "backward"
            starts += _in_backward(task, first)
        starts.append(Candidate("ddp", _named("auto", usual), overlap=overlap))
    return Search(starts, steps=7, halve=True)


def mergecomp_online(task: TuningTask) -> Search:
    """Searches the boundary between two groups of gradients, as MergeComp does, in the job.

    Wang, Wu and Ng, "MergeComp: A Compression Scheduler for Scalable Communication-Efficient
    Distributed Training", 2021. The first candidate sends all gradients as one group of tensors.
    The others have two groups: the gradients that backward produces first, and the rest. The step
    time is assumed to fall and then to rise with the boundary. A Fibonacci search (Kiefer,
    "Sequential Minimax Search for a Maximum", 1953) then needs about 1.44 log2(tensors) trials, of
    10 steps each. Groups are sent one after the other, with one op for each dtype and codec.
    """
    profile = task.profile
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
        if task.codecs:
            plan = _core.with_codecs(plan, task.codecs)
        words = f"{boundary} of {count} tensors before the rest" if boundary else "one group"
        return Candidate(words, plan)

    def guide(time_of: Callable[[Candidate], float | None]) -> Candidate | None:
        return _fibonacci(at, 1, count - 1, time_of)

    # Callers take a search with one start and no space for one that has nothing to try.
    second = guide(lambda _: None)
    return Search([at(0), second] if second else [at(0)], steps=10, guide=guide)


def _merged(tensors: Sequence[_core.TensorSpec], group: Sequence[int]) -> list[_core.Op]:
    """Returns one all_reduce per dtype of a group, ordered by the last tensor of each dtype."""
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
    """Returns the next candidate of a Fibonacci search for the least time; None at its end.

    Args:
        at: Returns the candidate at a point.
        low: First point.
        high: Last point.
        time_of: Returns the measured time of a candidate, None if it was not measured yet.
    """
    if high < low:
        return None
    small, large = 1, 1  # Distances of the two inner points from the ends.
    while large < high - low + 2:
        small, large = large, small + large
    start = low - 1  # The points strictly between start and start + large are left.
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


def _is_worth_trials(task: TuningTask, first: _core.Plan, usual: _core.Plan) -> bool:
    return task.simulated_s(first) < task.simulated_s(usual) * (1 - _WORTH_TRIALS)


def _variants(task: TuningTask, first: _core.Plan, end: float) -> list[Candidate]:
    worst_s = task.simulated_s(first) * (1 + _ALMOST)
    known = {first.hash()}
    found: list[Candidate] = []
    for alpha, beta in _SCALES:
        if len(found) == _VARIANTS or time.monotonic() > end:
            break
        plan = task.plan("auto", task.network.scaled(alpha, beta))
        if plan.hash() not in known and task.simulated_s(plan) <= worst_s:
            known.add(plan.hash())
            what = f"auto with startups x {alpha:.2g}, bytes x {beta:.2f}"
            found.append(Candidate(what, plan))
    return found


def _rivals(task: TuningTask, tried: Sequence[Candidate], end: float) -> list[Candidate]:
    """Returns the best plans of other policies that are not among those to be tried already."""
    if task.codecs:  # `auto` itself compares the other policies under codecs.
        return []
    worst_s = task.simulated_s(tried[0].plan) * (1 + _RIVAL)
    known = {candidate.plan.hash() for candidate in tried}
    found: list[tuple[float, Candidate]] = []
    for policy in _core.policies():
        if policy in ("auto", "ddp") or time.monotonic() > end:
            continue
        try:
            plan = _named("auto", task.plan(policy))
        except UsageError:  # It refuses this job, for example because of too many parts.
            continue
        step_s = task.simulated_s(plan)
        if plan.hash() not in known and step_s <= worst_s:
            known.add(plan.hash())
            found.append((step_s, Candidate(f"plan of {policy}", plan)))
    found.sort(key=lambda each: each[0])
    return [candidate for _, candidate in found[:_RIVALS]]


def _in_backward(task: TuningTask, first: _core.Plan) -> list[Candidate]:
    """Returns the plan of `auto` for overlap "backward", unless it is predicted too slow."""
    ended = replace(task, overlap="backward")
    plan = ended.plan("auto")
    worst_s = task.simulated_s(first) * (1 + _BY_LAYER)
    if ended.simulated_s(plan) > worst_s:
        return []
    return [Candidate("auto, gradients final after backward", plan, overlap="backward")]


def _named(policy: str, plan: _core.Plan) -> _core.Plan:
    # The hash includes the policy: with one name, equal ops of different policies hash equally.
    return _core.Plan(policy, plan.tensors, plan.ops)


def _between(low: int, high: int, place: float) -> int:
    """Maps a position from 0 to 1 to a size from low to high, on a logarithmic scale."""
    return min(max(round(low * (high / low) ** place), low), high)


def _place(low: int, high: int, value: int) -> float:
    """Returns the inverse of `_between`; values outside the range count as its nearest end."""
    return min(max(math.log(value / low) / math.log(high / low), 0.0), 1.0)


def _mib(size: int) -> str:
    return f"{size / _MIB:.3g} MiB"

# SPDX-License-Identifier: Apache-2.0
"""Predicts how much a faster network, a better schedule or fewer bytes would speed up a job.

This is the analysis of Zhang et al., "Is Network the Bottleneck of Distributed Training?", 2020. It
runs nothing: the profile has the times at which gradients become ready, and the network model has
the cost of communication. Here it compares two schedules with two bounds, so that the loss of a
schedule is told from startups, and these from the bandwidth of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from usbyte import _core
from usbyte._util import units
from usbyte.errors import UsageError

#: Values of `Point.verdict`.
COMPUTE, SOFTWARE = "compute bound", "software bound"
LATENCY, NETWORK = "latency bound", "network bound"

#: Bucket sizes of DDP, of which `best_ddp` takes the best.
BUCKETS_MIB = (1, 2, 4, 8, 16, 25, 32, 64, 128, 256)

#: A ratio exceeds the smallest sufficient one by at most this factor.
TOLERANCE = 1.01
_MOST = 2.0**20  # With a ratio above this, the bytes take no time.


@dataclass(frozen=True)
class Outcome:
    """The predicted step of a job on a network under one schedule.

    Attributes:
        step_s: Seconds of a step.
        scaling: Seconds of a step without communication, divided by `step_s`; 1 is linear speed-up.
        ratio: The least factor by which the bytes must shrink to reach the target, if compression
            takes no time. 1: no compression is needed. Infinite: no compression is enough, as the
            startups alone take too long.
    """

    step_s: float
    scaling: float
    ratio: float


@dataclass(frozen=True)
class Point:
    """The predictions for a job on one network.

    Attributes:
        ranks: Ranks of the network.
        bandwidth_bytes_per_s: Bandwidth of a link, if the network is a ring.
        target: The scaling factor to reach.
        compute_s: Seconds of a step without communication.
        communication: Time of all bytes at the network's speed over `compute_s`.
        gain: Step of DDP with its best bucket size over the step of policy auto.
        ddp: DDP's buckets of 25 MiB, overlapped with backward.
        plan: Policy auto, overlapped with backward and the next forward.
        bound: The bound, which no plan can beat.
        bytes_bound: The bound of bytes alone, without startups.
    """

    ranks: int
    bandwidth_bytes_per_s: float
    target: float
    compute_s: float
    communication: float
    gain: float
    ddp: Outcome
    plan: Outcome
    bound: Outcome
    bytes_bound: Outcome

    @property
    def rate(self) -> str:
        """The bandwidth as text, with three digits, such as "10gbit"."""
        return units.format_rate(float(f"{8 * self.bandwidth_bytes_per_s:.3g}") / 8)

    @property
    def verdict(self) -> str:
        """What limits the job.

        Compute bound: DDP reaches the target. Software bound: DDP does not reach it, although the
        network could carry all bytes in time, startups included. Latency bound: it could carry the
        bytes, but startups take too long. Network bound: no schedule reaches the target without
        compression.
        """
        if self.ddp.scaling >= self.target:
            return COMPUTE
        if self.bound.scaling >= self.target:
            return SOFTWARE
        return LATENCY if self.bytes_bound.scaling >= self.target else NETWORK


def examine(job: _core.Profile, network: _core.NetworkModel, target: float = 0.95) -> Point:
    """Predicts the scaling of a job on a network, and the compression that the target needs.

    For each ratio, the network's time per byte is divided by the ratio, and `auto` makes a new
    plan. So compression takes no time here, and messages are summed on the way as gradients are. A
    real codec needs a larger ratio. One whose messages travel by all_gather needs ranks / 2 times
    the ratio.

    Args:
        job: The profile.
        network: A network model of at least two ranks.
        target: A scaling factor above 0 and up to 1.

    Raises:
        UsageError: The target is out of range, the network has one rank, or its bytes cost nothing.
    """
    if not 0 < target <= 1:
        raise UsageError(
            f"the target {target:g} is not a scaling factor; 1 is linear, so write a target above "
            "0 and up to 1, such as 0.95"
        )
    bandwidth = bus_bandwidth(network)
    bytes_s = network.all_reduce[0].beta_s_per_byte * job.bytes

    def carrying(ratio: float) -> _core.NetworkModel:
        return network.scaled(1.0, 1.0 / ratio)

    buckets = _core.make_plan("ddp", job, network, {}, "backward")

    def ddp_s(ratio: float) -> float:
        return _core.simulate(buckets, job, carrying(ratio), "backward").step_s

    def plan_s(ratio: float) -> float:
        faster = carrying(ratio)
        return _core.simulate(_core.make_plan("auto", job, faster), job, faster).step_s

    def bytes_bound_s(ratio: float) -> float:
        return _core.bytes_bound_s(job, carrying(ratio))

    def bound_s(ratio: float) -> float:
        return _core.bound_s(job, carrying(ratio))

    def outcome(step_s: Callable[[float], float], lowest: float = 1.0) -> Outcome:
        now_s = step_s(1.0)
        ratio = 1.0
        if job.iteration_s < target * now_s:
            ratio = least_ratio(lambda r: job.iteration_s >= target * step_s(r), lowest)
        return Outcome(now_s, job.iteration_s / now_s, ratio)

    bound = outcome(bound_s)
    # No plan needs a smaller ratio than the bound. Starting there saves calls of the slow `auto`.
    plan = outcome(plan_s, bound.ratio)
    return Point(
        ranks=network.ranks,
        bandwidth_bytes_per_s=bandwidth,
        target=target,
        compute_s=job.iteration_s,
        communication=_over(bytes_s, job.iteration_s),
        gain=best_ddp(job, network)[1] / plan.step_s,
        ddp=outcome(ddp_s),
        plan=plan,
        bound=bound,
        bytes_bound=outcome(bytes_bound_s),
    )


def _over(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.inf


def best_ddp(job: _core.Profile, network: _core.NetworkModel) -> tuple[_core.Plan, float]:
    """Returns DDP's plan with the best of `BUCKETS_MIB`, and its predicted step in seconds.

    The first bucket, which DDP closes at 1 MiB, may also be as large as the others.
    """
    options: list[dict[str, int]] = []
    for size in (mib << 20 for mib in BUCKETS_MIB):
        options += [{"bucket_bytes": size}, {"bucket_bytes": size, "first_bucket_bytes": size}]
    plans = [_core.make_plan("ddp", job, network, sizes, "backward") for sizes in options]
    steps_s = [_core.simulate(plan, job, network, "backward").step_s for plan in plans]
    best = min(range(len(plans)), key=steps_s.__getitem__)
    return plans[best], steps_s[best]


def least_ratio(reaches: Callable[[float], bool], lowest: float = 1.0) -> float:
    """Returns the smallest ratio that reaches a target, or up to `TOLERANCE` times as much.

    Args:
        reaches: Whether a ratio reaches the target; must be monotonic.
        lowest: Start of the search; no smaller ratio reaches the target.

    Returns:
        The ratio, or infinity if no ratio reaches the target.
    """
    if not lowest < _MOST or not reaches(_MOST):
        return math.inf
    low, high, stride = lowest, lowest, TOLERANCE
    while not reaches(high):
        low, high, stride = high, min(high * stride, _MOST), stride * stride
    while high > TOLERANCE * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def bus_bandwidth(network: _core.NetworkModel) -> float:
    """Returns the link bandwidth, in bytes/s, of a ring with this network's time per byte.

    It is the smallest time per byte of the all_reduce over all numbers of ops in flight.

    Raises:
        UsageError: The network has one rank, or its bytes cost nothing.
    """
    beta = min(cost.beta_s_per_byte for cost in network.all_reduce)
    if network.ranks < 2 or not beta > 0:
        raise UsageError(
            f"the network of {network.ranks} rank(s) whose all_reduce takes {beta:g} s/byte cannot "
            "be a bottleneck; give one of several ranks, as usbyte probe --json writes it"
        )
    return 2 * (network.ranks - 1) / network.ranks / beta


def at_bandwidth(network: _core.NetworkModel, bytes_per_s: float) -> _core.NetworkModel:
    """Returns the network model with the same startups, on links of another bandwidth."""
    return network.scaled(1.0, bus_bandwidth(network) / bytes_per_s)


def advice(points: Sequence[Point]) -> str:
    """Returns one sentence that says what to do for a job, in order.

    Args:
        points: Predictions for one job and one target, on one or more networks.
    """
    lacking = [point for point in points if point.verdict != COMPUTE]
    goal = f"{points[0].target:.3g} of linear"
    if not lacking:
        return f"Nothing to do: DDP reaches {goal} {_where(lacking, points)}."
    planned = [point for point in lacking if point.plan.ratio == 1]
    late = [point for point in lacking if point.plan.ratio > 1]
    startups = [p for p in late if p.verdict == LATENCY or p.plan.ratio == math.inf]
    smaller = [point for point in late if point not in startups]
    steps = []
    if planned:
        steps.append(
            "use usbyte (policy auto, overlap forward), which is enough " + _where(planned, points)
        )
    if smaller:
        ratios = sorted(point.plan.ratio for point in smaller)
        least, most = (format_ratio(ratio) for ratio in (ratios[0], ratios[-1]))
        times = least if least == most else f"{least} to {most}"
        steps.append(
            f"send {times} fewer bytes, or use links as much faster, {_where(smaller, points)}"
        )
    if startups:
        steps.append(
            "reduce the startups (fewer ranks, a lower latency) or use larger batches, since "
            f"startups, not bytes, take too long {_where(startups, points)}"
        )
    return f"For {goal}, first {'; then '.join(steps)}."


def format_ratio(ratio: float) -> str:
    """Formats 2.347 as "2.35x"; rounds up, so that the printed ratio is enough."""
    digits = max(0, 2 - math.floor(math.log10(ratio)))
    return f"{math.ceil(ratio * 10**digits - 1e-9) / 10**digits:.{digits}f}x"


def _where(some: Sequence[Point], points: Sequence[Point]) -> str:
    if len(some) in (0, len(points)):
        return "everywhere" if len(points) > 1 else "here"
    by_ranks: dict[int, list[str]] = {}
    for point in some:
        by_ranks.setdefault(point.ranks, []).append(point.rate)
    by_rates: dict[str, list[str]] = {}
    for ranks, rates in by_ranks.items():
        by_rates.setdefault(_listed(rates), []).append(str(ranks))
    return "at " + ", ".join(
        f"{rates} on {_listed(ranks)} ranks" for rates, ranks in by_rates.items()
    )


def _listed(texts: Sequence[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last

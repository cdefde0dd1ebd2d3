"""What a faster network, a better schedule or fewer bytes would be worth to a job.

The question is that of Zhang et al., "Is Network the Bottleneck of Distributed Training?", 2020:
gradients become ready when the profile says, communication costs what a model says, and nothing is
run. Here three schedules answer it side by side, with startups, so that what a schedule loses is
told apart from what the network cannot carry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from usbyte import _core
from usbyte._util import units
from usbyte.errors import UsageError

#: Verdicts.
COMPUTE, SOFTWARE, NETWORK = "compute bound", "software bound", "network bound"

#: A ratio is at most by this factor larger than it need be.
TOLERANCE = 1.01
_MOST = 2.0**20  # fewer bytes than that are as good as none


@dataclass(frozen=True)
class Outcome:
    """What one schedule makes of a job on a network.

    Attributes:
        step_s: Seconds of a step.
        scaling: The step without communication over this one; 1 is linear speed-up.
        ratio: By what bytes must be divided, at least, for the target, if compressing takes no
            time; 1: nothing need be. Infinite: not even no bytes would do, startups are too long.
    """

    step_s: float
    scaling: float
    ratio: float


@dataclass(frozen=True)
class Point:
    """A job on one network.

    Attributes:
        ranks: Of the network.
        bandwidth_bytes_per_s: What a ring's links carry.
        target: The scaling factor that is asked for.
        compute_s: Seconds of a step without communication.
        ddp: DDP's buckets of 25 MiB, overlapped with backward.
        plan: Policy auto, overlapped with backward and the next forward.
        bound: What no order of sending beats; it has no startups.
    """

    ranks: int
    bandwidth_bytes_per_s: float
    target: float
    compute_s: float
    ddp: Outcome
    plan: Outcome
    bound: Outcome

    @property
    def rate(self) -> str:
        """The bandwidth as people write it, to three digits."""
        return units.format_rate(float(f"{8 * self.bandwidth_bytes_per_s:.3g}") / 8)

    @property
    def verdict(self) -> str:
        """What is in the way.

        Compute bound: DDP reaches the target. Software bound: it does not, though the bytes could
        be carried in time. Network bound: no schedule reaches it with all bytes.
        """
        if self.ddp.scaling >= self.target:
            return COMPUTE
        if max(self.plan.scaling, self.bound.scaling) >= self.target:
            return SOFTWARE
        return NETWORK


def examine(job: _core.Profile, network: _core.NetworkModel, target: float = 0.95) -> Point:
    """Asks what a job would reach on a network, and what it lacks.

    A ratio divides the network's beta, and plans are made anew for it. So compressing is free here,
    and messages are added up on their way as gradients are: a codec needs more than the ratio, and
    one whose messages travel by all_gather needs half the number of ranks times as much.

    Args:
        job: The profile.
        network: Its costs, of several ranks.
        target: A scaling factor above 0 and up to 1.

    Raises:
        UsageError: The target is no such factor, or the network is of one rank.
    """
    if not 0 < target <= 1:
        raise UsageError(
            f"a scaling factor of {target:g} cannot be asked for; 1 is linear, so write a target "
            "above 0 and up to 1, such as 0.95"
        )
    bandwidth = bus_bandwidth(network)

    def carrying(ratio: float) -> _core.NetworkModel:
        return network.scaled(1.0, 1.0 / ratio)

    buckets = _core.make_plan("ddp", job, network, {}, "backward")

    def ddp_s(ratio: float) -> float:
        return _core.simulate(buckets, job, carrying(ratio), "backward").step_s

    def plan_s(ratio: float) -> float:
        faster = carrying(ratio)
        return _core.simulate(_core.make_plan("auto", job, faster), job, faster).step_s

    def bound_s(ratio: float) -> float:
        return _core.bound_s(job, carrying(ratio))

    def outcome(step_s: Callable[[float], float], lowest: float = 1.0) -> Outcome:
        now_s = step_s(1.0)
        ratio = 1.0
        if job.iteration_s < target * now_s:
            ratio = least_ratio(lambda r: job.iteration_s >= target * step_s(r), lowest)
        return Outcome(now_s, job.iteration_s / now_s, ratio)

    bound = outcome(bound_s)
    # No plan needs less than the bound does, which tells where to look: planning takes long.
    plan = outcome(plan_s, bound.ratio)
    return Point(
        network.ranks, bandwidth, target, job.iteration_s, outcome(ddp_s), plan, bound
    )  # fmt: skip


def least_ratio(reaches: Callable[[float], bool], lowest: float = 1.0) -> float:
    """The smallest ratio that reaches a target, or up to `TOLERANCE` times as much.

    Args:
        reaches: Whether a ratio does; if one does, so do larger ones.
        lowest: What is known to be too little, or just enough.

    Returns:
        The ratio, or infinity if none reaches it.
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
    """Bytes per second that the links of a ring carry where bytes cost what they do here.

    Raises:
        UsageError: There is one rank, or bytes cost nothing.
    """
    beta = min(cost.beta_s_per_byte for cost in network.all_reduce)
    if network.ranks < 2 or not beta > 0:
        raise UsageError(
            f"the network of {network.ranks} rank(s) whose all_reduce takes {beta:g} s/byte cannot "
            "be a bottleneck; give one of several ranks, as usbyte probe --json writes it"
        )
    return 2 * (network.ranks - 1) / network.ranks / beta


def at_bandwidth(network: _core.NetworkModel, bytes_per_s: float) -> _core.NetworkModel:
    """The network with the same startups on links of another bandwidth."""
    return network.scaled(1.0, bus_bandwidth(network) / bytes_per_s)


def advice(points: Sequence[Point]) -> str:
    """What to do first about a job, and what is left then, in one sentence.

    Args:
        points: Of one job and target; one at least.
    """
    lacking = [point for point in points if point.verdict != COMPUTE]
    goal = f"{points[0].target:.3g} of linear"
    if not lacking:
        return f"Nothing is to be done: DDP reaches {goal} {_where(lacking, points)}."
    planned = [point for point in lacking if point.plan.ratio == 1]
    smaller = [point for point in lacking if 1 < point.plan.ratio < math.inf]
    startups = [point for point in lacking if point.plan.ratio == math.inf]
    steps = []
    if planned:
        steps.append(
            "let usbyte plan (policy auto, overlap forward), which is enough "
            + _where(planned, points)
        )
    if smaller:
        ratios = sorted(point.plan.ratio for point in smaller)
        least, most = (format_ratio(ratio) for ratio in (ratios[0], ratios[-1]))
        times = least if least == most else f"{least} to {most}"
        steps.append(
            f"send {times} fewer bytes, or take links as much faster, {_where(smaller, points)}"
        )
    if startups:
        steps.append(
            "have fewer or shorter startups (fewer ranks, a lower latency, larger batches), since "
            f"no compression is enough {_where(startups, points)}"
        )
    return f"For {goal}, first {'; then '.join(steps)}."


def format_ratio(ratio: float) -> str:
    """Writes 2.347 as "2.35x"; rounded up, so that it is enough."""
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

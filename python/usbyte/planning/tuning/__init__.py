"""Plans that are tried, in the running job or on the simulator, to keep the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.planning.tuning.searches import Job, auto, bytescheduler, dear, mergecomp_online
from usbyte.planning.tuning.tuner import Candidate, Search, Tuner, check_installed

__all__ = [
    "SHARDING",
    "TRIED",
    "TUNED",
    "Candidate",
    "Job",
    "Search",
    "Tuner",
    "auto",
    "check_installed",
    "check_policy",
    "make_plan",
    "policies",
]

#: What each tuned policy searches, by name.
TUNED = {
    "mergecomp_online": mergecomp_online,
    "tune:bytescheduler": bytescheduler,
    "tune:dear": dear,
}

#: What is tried in a running job, by policy.
TRIED = {"auto": auto, **TUNED}

#: Policies that a sharded optimizer can follow.
SHARDING = ("auto", "dear", "dear_exact", "tune:dear")


def policies() -> list[str]:
    """Names of all policies, the tuned ones last."""
    return [*_core.policies(), *TUNED]


def check_policy(policy: str) -> None:
    """Raises UsageError, with all that there are, unless there is such a policy."""
    if policy not in policies():
        raise UsageError(f"unknown policy '{policy}'; known are {', '.join(policies())}")


def make_plan(
    policy: str,
    profile: _core.Profile,
    network: _core.NetworkModel,
    options: Mapping[str, int],
    overlap: str = "forward",
    sharded: bool = False,
    codecs: Sequence[str] = (),
    codec_costs: _core.CodecCosts | None = None,
) -> _core.Plan:
    """As `usbyte._core.make_plan`, also for tuned policies, which then tune the simulated step.

    Raises:
        UsageError: The policy is unknown, or tuned and bayesian-optimization is not installed.
    """
    check_policy(policy)
    if policy not in TUNED:
        return _core.make_plan(
            policy, profile, network, dict(options), overlap, sharded, codecs,
            codec_costs or _core.CodecCosts(),
        )  # fmt: skip
    costs = codec_costs or _core.CodecCosts()
    job = Job(profile, network, options, overlap, sharded, tuple(codecs), costs)
    tuner = Tuner(TUNED[policy](job))
    while (candidate := tuner.ask()) is not None:
        tuner.tell(job.simulated_s(candidate.plan))
    return tuner.best().plan

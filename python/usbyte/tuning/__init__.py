"""Plans that are tried, in the running job or on the simulator, to keep the fastest."""

from __future__ import annotations

from collections.abc import Mapping

from usbyte import _core
from usbyte.tuning.searches import Job, auto, bytescheduler, dear
from usbyte.tuning.tuner import Candidate, Search, Tuner, check_installed

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
    "make_plan",
    "policies",
]

#: What each tuned policy searches, by name.
TUNED = {"tune:bytescheduler": bytescheduler, "tune:dear": dear}

#: What is tried in a running job, by policy.
TRIED = {"auto": auto, **TUNED}

#: Policies that a sharded optimizer can follow.
SHARDING = ("auto", "dear", "dear_exact", "tune:dear")


def policies() -> list[str]:
    """Names of all policies, the tuned ones last."""
    return [*_core.policies(), *TUNED]


def make_plan(
    policy: str,
    profile: _core.Profile,
    network: _core.NetworkModel,
    options: Mapping[str, int],
    overlap: str = "forward",
    sharded: bool = False,
) -> _core.Plan:
    """As `usbyte._core.make_plan`, also for tuned policies, which then tune the simulated step.

    Raises:
        UsageError: The policy is unknown, or tuned and bayesian-optimization is not installed.
    """
    if policy not in TUNED:
        return _core.make_plan(policy, profile, network, dict(options), overlap, sharded)
    job = Job(profile, network, options, overlap, sharded)
    tuner = Tuner(TUNED[policy](job))
    while (candidate := tuner.ask()) is not None:
        tuner.tell(job.simulated_s(candidate.plan))
    return tuner.best().plan

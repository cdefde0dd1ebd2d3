# SPDX-License-Identifier: Apache-2.0
"""Searches that try plans, in the running job or on the simulator, and choose the fastest."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.planning.tuning.searches import (
    TuningTask,
    auto,
    bytescheduler,
    dcredit,
    dear,
    mergecomp_online,
    us_byte,
)
from usbyte.planning.tuning.tuner import Candidate, Search, Tuner, check_installed

__all__ = [
    "BAYESIAN",
    "SHARDING",
    "TRIED",
    "TUNED",
    "Candidate",
    "Search",
    "Tuner",
    "TuningTask",
    "auto",
    "check_installed",
    "known_policy",
    "make_plan",
    "policies",
]

#: The search of each tuned policy, by the policy's name.
TUNED = {
    "mergecomp_online": mergecomp_online,
    "tune:bytescheduler": bytescheduler,
    "tune:dcredit": dcredit,
    "tune:dear": dear,
    "tune:us-byte": us_byte,
}

#: The search that runs in a training job, by policy; other policies have no trials.
TRIED = {"auto": auto, **TUNED}

#: Tuned policies that need the package bayesian-optimization.
BAYESIAN = ("tune:bytescheduler", "tune:dear")

#: Policies whose plans a sharded optimizer can execute.
SHARDING = (*_core.sharding_policies(), "tune:dear")


def policies() -> list[str]:
    """Returns the names of all policies, the tuned ones last."""
    return [*_core.policies(), *TUNED]


def known_policy(policy: str) -> str:
    """Returns the name of a policy in `policies()`, for this name or a former one.

    Raises:
        UsageError: The policy is unknown; the message lists all.
    """
    policy = _core.policy_name(policy)
    if policy not in policies():
        close = difflib.get_close_matches(policy, policies(), 1)
        guess = f": did you mean '{close[0]}'?" if close else ";"
        raise UsageError(f"unknown policy '{policy}'{guess} known are {', '.join(policies())}")
    return policy


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
    """Makes the plan of a policy; a tuned policy tunes the simulated step time.

    Args:
        policy: A name in `policies()`, or a former one.
        profile: The measured job.
        network: The measured network.
        options: Sizes in bytes, by the names of `usbyte._core.make_plan`.
        overlap: "backward" or "forward".
        sharded: Whether each rank updates only its shard of the parameters.
        codecs: The codec of each tensor, in the profile's order; empty: no compression.
        codec_costs: Encoding and decoding costs of these codecs; None: coding takes no time.

    Raises:
        UsageError: The policy is unknown, or it needs bayesian-optimization, which is not
            installed.
    """
    policy = known_policy(policy)
    if policy not in TUNED:
        return _core.make_plan(
            policy, profile, network, dict(options), overlap, sharded, codecs,
            codec_costs or _core.CodecCosts(),
        )  # fmt: skip
    costs = codec_costs or _core.CodecCosts()
    task = TuningTask(profile, network, options, overlap, sharded, tuple(codecs), costs)
    tuner = Tuner(TUNED[policy](task))
    while (candidate := tuner.ask()) is not None:
        tuner.tell(task.simulated_s(candidate.plan))
    return tuner.best().plan

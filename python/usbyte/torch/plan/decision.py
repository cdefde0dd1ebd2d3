# SPDX-License-Identifier: Apache-2.0
"""What ranks agree on when they plan, and how it travels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from usbyte import _core
from usbyte.errors import Error, MismatchError, UsageError
from usbyte.torch.plan.sparse import SchemeChoice
from usbyte.torch.runtime.messages import check, read, unreadable


@dataclass(frozen=True)
class Decision:
    """What the ranks agreed on.

    Attributes:
        plan: The plan that all ranks follow.
        profile: The job as it was measured, the slowest rank's times.
        network: What the network was measured to cost.
        predicted_s: Seconds for a step of this plan.
        bound_s: Seconds for a step that no plan goes below.
        trial_steps: Steps after which the next plan is tried; 0 if this one stays.
        sparse: How sparse gradients travel, by name.
        overlap: What communication hides behind: "forward", "backward".
    """

    plan: _core.Plan
    profile: _core.Profile
    network: _core.NetworkModel
    predicted_s: float
    bound_s: float
    trial_steps: int = 0
    sparse: Mapping[str, SchemeChoice] = field(default_factory=dict)
    overlap: str = "forward"

    def to_json(self) -> str:
        """As it travels, with a hash of the plan."""
        return json.dumps(
            {
                "hash": self.plan.hash(),
                "plan": self.plan.to_json(),
                "profile": self.profile.to_json(),
                "network": self.network.to_json(),
                "predicted_s": self.predicted_s,
                "bound_s": self.bound_s,
                "trial_steps": self.trial_steps,
                "sparse": {name: [way.scheme, way.bytes] for name, way in self.sparse.items()},
                "overlap": self.overlap,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """Reads what `to_json` wrote.

        Raises:
            UsageError: Rank 0 could not plan.
            MismatchError: The plan reads differently here, or cannot be read.
        """
        what = "the plan that rank 0 has sent"
        message = read(what, text, dict[str, Any])
        if "error" in message:
            raise UsageError(f"rank 0 could not plan: {message['error']}")
        try:
            told: _Told = check(message, _Told)
            plan = _core.Plan.from_json(told.plan)
            profile = _core.Profile.from_json(told.profile)
            network = _core.NetworkModel.from_json(told.network)
        except (ValueError, Error) as error:
            raise unreadable(what, error) from error
        if unknown := {way for way, _ in told.sparse.values()} - set(_core.sparse_schemes()):
            raise unreadable(what, f"'{min(unknown):.80}' is no way for sparse gradients")
        if told.overlap not in ("forward", "backward"):
            raise unreadable(what, f"'{told.overlap:.80}' is no overlap")
        if plan.hash() != told.hash:
            raise MismatchError(
                "this rank reads another plan than rank 0 made; install the same version of usbyte "
                "on all hosts"
            )
        return cls(
            plan,
            profile,
            network,
            told.predicted_s,
            told.bound_s,
            told.trial_steps,
            {name: SchemeChoice(*way) for name, way in told.sparse.items()},
            told.overlap,
        )


@dataclass(frozen=True)
class _Told:
    """A decision as it travels."""

    hash: Any  # the core's, of 64 bits without a sign
    plan: str
    profile: str
    network: str
    predicted_s: float
    bound_s: float
    trial_steps: int
    sparse: dict[str, tuple[str, int]]
    overlap: str

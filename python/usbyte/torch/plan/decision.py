# SPDX-License-Identifier: Apache-2.0
"""The decision of rank 0 for a plan, and its serialization for the other ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from usbyte import _core
from usbyte.errors import Error, MismatchError, UsageError
from usbyte.planning.layout import CONTROL_TENSOR
from usbyte.planning.whatif import best_ddp
from usbyte.torch.plan.sparse import SchemeChoice
from usbyte.torch.runtime.messages import check, read, unreadable


@dataclass(frozen=True, repr=False)
class Decision:
    """A plan that all ranks follow, with the data that it was made from.

    Attributes:
        plan: The plan.
        profile: The profile of the job, with the maximum of each time over the ranks.
        network: The network model, from rank 0's measurements.
        predicted_s: Predicted seconds of a step under the plan.
        bound_s: Seconds of a step that no plan can beat.
        trial_steps: Length of the plan's trial in steps, after which the next plan follows; 0 if
            the plan is final.
        sparse: Scheme of each sparse gradient, by parameter name.
        overlap: "forward" or "backward": the passes that hide communication.
    """

    plan: _core.Plan
    profile: _core.Profile
    network: _core.NetworkModel
    predicted_s: float
    bound_s: float
    trial_steps: int = 0
    sparse: Mapping[str, SchemeChoice] = field(default_factory=dict)
    overlap: str = "forward"

    def summary(self) -> dict[str, float | int | str]:
        """Returns the plan in a few numbers, for a log, TensorBoard or W&B.

        Returns:
            `policy`, `overlap`, `ranks`, `gradients`, `ops`, `megabytes` of gradients of a step,
            and in seconds: `compute_s` (a step without communication), `predicted_s`, `bound_s`
            (no plan without codecs is faster); `final`: 0 while the plan is on trial. Without
            sparse gradients also `ddp_s`, predicted for DDP with the best of ten bucket sizes, and
            `gain`, which is `ddp_s / predicted_s`.

        Examples:
            ```python
            for name, value in optimizer.decision.summary().items():
                if not isinstance(value, str):
                    writer.add_scalar(f"usbyte/{name}", value)
            ```
        """
        job = self.profile
        told: dict[str, float | int | str] = {
            "policy": self.plan.policy,
            "overlap": self.overlap,
            "ranks": self.network.ranks,
            "gradients": sum(tensor.name != CONTROL_TENSOR for tensor in job.tensors),
            "ops": len(self.plan.ops),
            "megabytes": job.bytes / 1e6,
            "compute_s": job.iteration_s,
            "predicted_s": self.predicted_s,
            "bound_s": self.bound_s,
            "final": int(not self.trial_steps),
        }
        if not any(tensor.sparse for tensor in job.tensors):
            _, ddp_s = best_ddp(job, self.network)
            told |= {"ddp_s": ddp_s, "gain": ddp_s / self.predicted_s}
        return told

    def __repr__(self) -> str:
        """Describes the plan in one line."""
        trial = f", on trial for {self.trial_steps} steps" if self.trial_steps else ""
        return (
            f"<Decision: {self.plan.policy}, overlap {self.overlap}, {len(self.plan.ops)} ops for "
            f"{self.profile.bytes / 1e6:.1f} MB; predicted step {self.predicted_s * 1e3:.1f} ms, "
            f"bound {self.bound_s * 1e3:.1f} ms{trial}>"
        )

    def _repr_html_(self) -> str:
        """Returns a table of the summary, which notebooks show."""
        rows = []
        for name, value in self.summary().items():
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            rows.append(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>")
        return f"<table>{''.join(rows)}</table>"

    def to_json(self) -> str:
        """Serializes the decision, with a hash of the plan that `from_json` checks."""
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
        """Parses the message that rank 0 made with `to_json`.

        Args:
            text: The message: a serialized decision, or `{"error": reason}`.

        Raises:
            UsageError: The message is an error: rank 0 could not plan.
            MismatchError: The message cannot be parsed, or the parsed plan has another hash than
                rank 0's, as with another version of usbyte.
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
    """The fields of a serialized decision, with their types for validation."""

    hash: Any  # unsigned 64-bit `Plan.hash()`
    plan: str
    profile: str
    network: str
    predicted_s: float
    bound_s: float
    trial_steps: int
    sparse: dict[str, tuple[str, int]]
    overlap: str

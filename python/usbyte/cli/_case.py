# SPDX-License-Identifier: Apache-2.0
"""A prediction of `usbyte simulate`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One prediction.

    Attributes:
        model: Name of the profile.
        workers: Ranks of the ring.
        bandwidth_bytes_per_s: Bandwidth of a link.
        latency_s: Latency of a message.
        serial_startups: Whether only one op at a time starts up.
        overlap: "forward" or "backward".
        shard_optimizer: Whether each rank updates only its shard of the parameters.
        policy: Name of the policy.
        ops: Number of ops in a step.
        step_s: Predicted seconds of a step.
        bound_s: The bound for this overlap, without a codec, in seconds.
        bytes_bound_s: The same of bytes alone, without startups.
        compute_s: Seconds of a step without communication.
        codec: Codec of the floating-point gradients.
    """

    model: str
    workers: int
    bandwidth_bytes_per_s: float
    latency_s: float
    serial_startups: bool
    overlap: str
    shard_optimizer: bool
    policy: str
    ops: int
    step_s: float
    bound_s: float
    bytes_bound_s: float
    compute_s: float
    codec: str = "none"

    @property
    def spec(self) -> str:
        """Overlap and policy as text; the overlap "forward" is left out."""
        if self.shard_optimizer:
            return f"sharded:{self.policy}"
        return self.policy if self.overlap == "forward" else f"{self.overlap}:{self.policy}"

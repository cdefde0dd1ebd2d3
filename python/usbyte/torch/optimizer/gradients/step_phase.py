# SPDX-License-Identifier: Apache-2.0
"""Phases of an optimizer's step, from its first gradient to its end."""

from __future__ import annotations

from enum import Enum


class StepPhase(Enum):
    """Phase of the step whose gradients were sent last. `TRANSITIONS` lists what may follow."""

    NOTHING_SENT = "nothing was sent yet"
    IN_BACKWARD = "a backward pass sends gradients"
    IN_FLIGHT = "all gradients are in flight"
    DEFERRED = "step() was called, and each update waits for its gradient"
    REDUCED = "all gradients are reduced or discarded"
    APPLYING_SHARDS = "shards are updated and not yet gathered"
    APPLIED = "updates have used the reduced gradients"
    COMPLETED = "step() is over"


TRANSITIONS: dict[StepPhase, frozenset[StepPhase]] = {
    StepPhase.NOTHING_SENT: frozenset({StepPhase.IN_BACKWARD}),
    StepPhase.IN_BACKWARD: frozenset({StepPhase.IN_FLIGHT}),
    StepPhase.IN_FLIGHT: frozenset(
        {StepPhase.REDUCED, StepPhase.DEFERRED, StepPhase.APPLYING_SHARDS}
    ),
    StepPhase.DEFERRED: frozenset({StepPhase.APPLIED, StepPhase.IN_BACKWARD}),
    StepPhase.REDUCED: frozenset({StepPhase.APPLIED, StepPhase.IN_BACKWARD}),
    StepPhase.APPLYING_SHARDS: frozenset({StepPhase.APPLIED}),
    StepPhase.APPLIED: frozenset({StepPhase.COMPLETED, StepPhase.IN_BACKWARD}),
    StepPhase.COMPLETED: frozenset({StepPhase.IN_BACKWARD}),
}

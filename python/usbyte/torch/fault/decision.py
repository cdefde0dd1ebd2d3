# SPDX-License-Identifier: Apache-2.0
"""Decides after a fault whether a rank's parameters are those of one step on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class RankProgress:
    """How far the updates of an optimizer's parameters have come on a rank, after a fault.

    Attributes:
        completed: The last step whose updates have all been applied, counted from 1; 0 if none.
        partial: Whether some updates of the next step have been applied, too.
        completable: Whether the rest of the next step's updates can still be applied.
    """

    completed: int
    partial: bool
    completable: bool

    @property
    def last_reachable_step(self) -> int:
        """The last step that this rank has completed or can still complete."""
        return self.completed + self.completable


@dataclass
class RecoveryDecision:
    """Whether a rank's parameters are usable after a fault.

    Attributes:
        reason: Why the parameters are not usable; empty if they are.
        completes: Whether pending updates have to be applied to make them usable.
    """

    reason: str
    completes: bool = False


def decide_recovery(
    rank: int,
    progress_of: Mapping[int, RankProgress] | None,
    leaving: RankProgress | None = None,
) -> RecoveryDecision:
    """Decides whether the parameters of `rank` are usable.

    Args:
        rank: A rank of the run.
        progress_of: Progress of the surviving ranks, by rank; None if it is not known.
        leaving: Progress of `rank` if it had begun to shut down before the fault, else None. The
            survivors leave such a rank out. It has taken part in all steps that it has completed.
    """
    if progress_of is None:
        return RecoveryDecision("the progress of the other ranks is unknown")
    if leaving is not None and rank not in progress_of:
        progress_of = {rank: leaving}
    if rank not in progress_of:
        return RecoveryDecision("the other ranks have continued without this rank")
    mine = progress_of[rank]
    last, least = min(
        (progress.last_reachable_step, other) for other, progress in progress_of.items()
    )
    if mine.completable and last == mine.last_reachable_step:
        return RecoveryDecision("", completes=True)
    if mine.partial:
        step = mine.completed + 1
        return RecoveryDecision(f"step {step} was applied to some of the parameters, not to all")
    if last < mine.completed:
        return RecoveryDecision(f"step {mine.completed} was applied here, but not on rank {least}")
    return RecoveryDecision("")

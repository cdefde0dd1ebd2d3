# SPDX-License-Identifier: Apache-2.0
"""Decides whether updates are deferred to the next forward pass. All ranks decide alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from usbyte.torch.optimizer.overlap.eligibility import ScriptObserver, agree_on_overlap
from usbyte.torch.optimizer.overlap.forward_hooks import ForwardPreHooks
from usbyte.torch.optimizer.step_warnings import StepWarnings
from usbyte.torch.plan.decision import Decision
from usbyte.torch.plan.job import Settings
from usbyte.torch.world.rank_group import RankGroup

log = logging.getLogger("usbyte")


class OverlapPlanner(Protocol):
    """The parts of the planner that concern the overlap.

    Attributes:
        label: Name of the optimizer, equal on all ranks.
        decision: The plan in force with what it was made from; None while ranks learn.
    """

    label: str
    decision: Decision | None

    @property
    def overlap(self) -> str:
        """The overlap that plans are made for."""

    def choose_overlap(self, reason: str) -> None:
        """Chooses the overlap of all later plans: "backward" if there is a reason for it."""


class OverlapDecision:
    """Chooses between overlap "backward" and "forward" after the learning steps.

    With `overlap="auto"` all ranks choose together. A rank that later finds a reason against
    deferred updates asks for a new plan.

    Args:
        rank_group: Ranks that choose together.
        settings: Arguments of the DistributedOptimizer.
        planner: Gives the overlap of the plan in force and receives the choice.
        observer: Records how the script uses parameters and gradients.
        forward_hooks: Forward pre-hooks, which record which modules use parameters.
        warnings: Logs what the script should change.

    Attributes:
        learned: True while the plan in force was made from measurements and the choice has been
            made.
        shared: Name of a parameter that a thread other than the training thread has used; empty if
            there is none.
        against: Reason against deferred updates that was found after the learning steps; empty if
            there is none.
        unhooked_params: Ascending indices of the parameters whose use no forward pre-hook observed.
            Their updates are never deferred.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        settings: Settings,
        planner: OverlapPlanner,
        observer: ScriptObserver,
        forward_hooks: ForwardPreHooks,
        warnings: StepWarnings,
    ) -> None:
        self._rank_group, self._settings, self._planner = rank_group, settings, planner
        self._observer, self._forward_hooks = observer, forward_hooks
        self._warnings = warnings
        self.learned = False
        self.shared = self.against = ""
        self.unhooked_params: list[int] = []

    def close(self) -> None:
        """Drops references to what the optimizer owns; `shared` and `against` stay readable."""
        del self._observer, self._forward_hooks, self._planner

    @property
    def defers(self) -> bool:
        """Whether updates are deferred to the next forward pass under the plan in force."""
        if not self.learned or self._settings.overlap == "backward":
            return False
        decision = self._planner.decision
        return decision is not None and decision.overlap == "forward"

    def decide(self, aliased: Callable[[], Sequence[int]]) -> None:
        """Chooses the overlap if the setting is "auto". Collective; called once ranks have learned.

        Args:
            aliased: Returns the indices of the parameters whose memory other tensors of the script
                use.
        """
        self.unhooked_params = sorted(self._forward_hooks.finish_learning())
        if self._settings.overlap == "auto":
            reason = self._observer.reason(
                self._forward_hooks, self.unhooked_params, aliased(), self.shared, self.against
            )
            label = self._planner.label
            self._planner.choose_overlap(agree_on_overlap(self._rank_group, label, reason))

    def end_step(self, learning: bool) -> bool:
        """Updates the decision after a step whose updates were all applied at once.

        Args:
            learning: Whether the plan in force is the learning plan.

        Returns:
            True if this step brought a plan into force that was made from measurements.
        """
        if learning:
            if self.learned:
                self._observer.begin()
            self.learned = False
            return False
        begins, self.learned = not self.learned, True
        sharded = self._settings.shard_optimizer
        if begins and not sharded and self._planner.overlap == "forward":
            unhooked = len(self.unhooked_params)
            rest = f", except those of {unhooked} parameters whose use was not observed"
            log.info(
                "%s: updates are deferred to the next forward pass%s",
                self._planner.label,
                rest if unhooked else "",
            )
        return begins

    def check_threads(self) -> bool:
        """Records whether other threads than the calling (training) thread have used parameters.

        Returns:
            True if updates should not be deferred any more, so that the ranks must plan again.
        """
        name = self._observer.finds_threads()
        self.shared = self.shared or name
        if not name or not self.defers:
            return False
        self._warnings.thread(name)
        return self._settings.overlap == "auto"

    def stay_with_backward(self, reason: str) -> bool:
        """With overlap "auto", excludes deferred updates from the plans to come.

        Args:
            reason: Reason for the log. Only the first call has an effect.

        Returns:
            True if the ranks must plan again, because there is a plan already.
        """
        if self._settings.overlap != "auto" or self.against:
            return False
        self.against = reason
        return self.learned

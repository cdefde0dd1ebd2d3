# SPDX-License-Identifier: Apache-2.0
"""Whether updates wait for the next forward pass: learned, decided by all ranks, and revised."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from usbyte.torch.optimizer.overlap.eligibility import ScriptObserver, agree_on_overlap
from usbyte.torch.optimizer.overlap.forward_hooks import ForwardPreHooks
from usbyte.torch.optimizer.step_warnings import StepWarnings
from usbyte.torch.plan.job import Settings
from usbyte.torch.plan.planner import Planner
from usbyte.torch.world.rank_group import RankGroup

log = logging.getLogger("usbyte")


class OverlapDecision:
    """What is known of the script, and what follows for its updates.

    Args:
        rank_group: The ranks that decide together.
        settings: Arguments of the DistributedOptimizer.
        planner: Told of the decision.
        observer: Watches what the script does.
        forward_hooks: Watches which modules use parameters.
        warnings: Logs what the script should change.

    Attributes:
        learned: There is a plan, and a decision.
        shared: A parameter that another thread than the one that trains has used; empty if none.
        against: A reason against updates that wait, found after the first steps; empty if none.
        unhooked_params: Parameters whose use no hook sees.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        settings: Settings,
        planner: Planner,
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

    @property
    def defers(self) -> bool:
        """Updates wait for the next forward pass, under the plan in force."""
        if not self.learned or self._settings.overlap == "backward":
            return False
        decision = self._planner.decision
        return decision is not None and decision.overlap == "forward"

    def decide(self, aliased: Callable[[], Sequence[int]]) -> None:
        """All ranks have learned: agrees on the overlap if it is "auto". Collective.

        Args:
            aliased: Returns the parameters over whose memory the script keeps other tensors.
        """
        self.unhooked_params = sorted(self._forward_hooks.finish_learning())
        if self._settings.overlap == "auto":
            reason = self._observer.reason(
                self._forward_hooks, self.unhooked_params, aliased(), self.shared, self.against
            )
            label = self._planner.label
            self._planner.settle_overlap(agree_on_overlap(self._rank_group, label, reason))

    def end_step(self, learning: bool) -> bool:
        """After a step that was taken as a whole.

        Args:
            learning: The plan in force is the one that is learned under.

        Returns:
            True if a plan has come into force that was made from measurements.
        """
        if learning:
            if self.learned:
                self._observer.begin()
            self.learned = False
            return False
        begins, self.learned = not self.learned, True
        sharded = self._settings.shard_optimizer
        if begins and not sharded and self._planner.overlap == "forward":
            log.info(
                "%s: updates wait for the next forward pass, except %d whose use was not seen",
                self._planner.label,
                len(self.unhooked_params),
            )
        return begins

    def check_threads(self) -> bool:
        """Notes which parameters other threads than the calling one, which trains, have used.

        Returns:
            True if updates should not wait any more, and the ranks are to plan again.
        """
        name = self._observer.finds_threads()
        self.shared = self.shared or name
        if not name or not self.defers:
            return False
        self._warnings.thread(name)
        return self._settings.overlap == "auto"

    def stay_with_backward(self, reason: str) -> bool:
        """Under "auto", updates do not wait for the forward pass any more.

        Returns:
            True if the ranks are to plan again.
        """
        if self._settings.overlap != "auto" or self.against:
            return False
        self.against = reason
        return self.learned

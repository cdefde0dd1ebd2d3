# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks take the same steps.

Each rank says what it has done with the last sums by flags that travel with the next gradients, so
that no collective is added. Ranks that differ are told by a collective of their own; so is a step
after which all ranks change the plan. docs/design/step-consensus.md tells why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from usbyte.errors import MismatchError
from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.layout import NUM_VOTES
from usbyte.torch.optimizer.gradients.flat_buffer import FlatBuffer
from usbyte.torch.optimizer.gradients.step_checksum import StepChecksum
from usbyte.torch.optimizer.gradients.step_phase import StepPhase
from usbyte.torch.runtime.device import Device, Fetched
from usbyte.torch.runtime.format import name_ranks

_APPLIED = frozenset({StepPhase.APPLYING_SHARDS, StepPhase.APPLIED, StepPhase.COMPLETED})


class StepVote(Enum):
    """What a rank has done with sums."""

    STEPPED = b"taken"
    SKIPPED = b"left out"
    ABSTAIN = b""


class ControlChannel(Protocol):
    """The plan executor, as far as it carries the control tensor."""

    device: Device
    flat_buffer: FlatBuffer

    @property
    def steps(self) -> int:
        """Steps begun so far."""

    def gather_answers(self, name: str, answer: bytes) -> list[bytes]:
        """Returns the answers of all ranks, by rank. Collective."""

    def wait_for_control(self) -> None:
        """Waits for the sum of the control tensor."""


class PlanVotes(Protocol):
    """The life cycle of plans, as far as ranks vote for new ones.

    Attributes:
        learning: True until a plan is made from measurements.
    """

    learning: bool

    def plan_boundary_next(self, steps: int) -> bool:
        """Returns True if the plan may change after this step."""

    def record_votes(self, wanted: bool, joined: bool) -> None:
        """Hears whether some rank wants a new plan, and whether some rank has joined."""


class StepConsensus:
    """One rank's part in the agreement about steps.

    Args:
        label: Name of the optimizer, for messages.
        ranks: Numbers of the ranks in the world, by rank of the group.
        executor: Carries the control tensor, and asks ranks.
        lifecycle: Hears the votes for a new plan.
        check: Hears the flags of checksums.
        update_guard: Told when parameters of ranks have come to differ.

    Attributes:
        has_data: False while this rank contributes zeros, as after `join()`.
        is_joined: This rank contributed zeros to what was sent last.
    """

    def __init__(
        self,
        label: str,
        ranks: Sequence[int],
        executor: ControlChannel,
        lifecycle: PlanVotes,
        check: StepChecksum,
        update_guard: UpdateGuard,
    ) -> None:
        self._label, self._ranks = label, ranks
        self._executor, self._lifecycle = executor, lifecycle
        self._check, self._update_guard = check, update_guard
        self._device: Device = executor.device
        self.has_data, self.is_joined = True, False
        self._vote = StepVote.ABSTAIN  # on the sums before the last ones
        # By step whose votes were not looked at yet: this rank's, and those of all.
        self._votes: deque[tuple[StepVote, Fetched]] = deque()
        self._voted = False  # the control tensor holds votes that are not in `_votes`

    def begin_step(self, phase: StepPhase, compares_itself: bool) -> None:
        """Before gradients are sent: looks at votes, and chooses this rank's next one.

        Args:
            phase: Of the step before.
            compares_itself: A sharded step compares by itself whether ranks drop sums.

        Raises:
            MismatchError: On all ranks: some have skipped a step that others have taken.
        """
        # A rank that joins is given the parameters of the others.
        silent = self.is_joined or compares_itself or not self.has_data
        if silent or phase is StepPhase.NOTHING_SENT:
            vote = StepVote.ABSTAIN
        else:
            vote = StepVote.STEPPED if phase in _APPLIED else StepVote.SKIPPED
        incomplete = phase not in (StepPhase.NOTHING_SENT, StepPhase.COMPLETED)
        due = incomplete and self._lifecycle.plan_boundary_next(self._executor.steps)
        due = due and not self.any_joined()
        self.process_votes(0 if due or self._lifecycle.learning else self._device.lag)
        if due:
            self.all_ranks_step(vote)  # those that complete it ask, too
        self._vote = vote

    def record_participation(self) -> None:
        """From now on what is sent is that of the step which has begun."""
        self.is_joined = not self.has_data

    def flags(self, wants_plan: bool) -> list[float]:
        """Returns this rank's votes, as flags of the control tensor."""
        votes = (
            wants_plan,
            self.has_data,
            not self.has_data,
            self._vote is StepVote.STEPPED,
            self._vote is StepVote.SKIPPED,
        )
        checks = self._check.flags(self._executor.steps - 1, not self.has_data)
        self._voted = True
        return [*map(float, votes), *checks]

    def process_votes(self, lag: int) -> None:
        """Looks at the votes of all steps but the last `lag`, which may have yet to arrive.

        Raises:
            MismatchError: On all ranks: some have skipped a step that others have taken.
        """
        if self._voted:
            votes = self._device.fetch(self._executor.flat_buffer.votes)
            self._votes.append((self._vote, votes))
            self._voted = False
        while len(self._votes) > lag:
            own, fetched = self._votes.popleft()
            flags = fetched.get()
            wanted, _, joined, stepped, skipped = map(bool, flags[:NUM_VOTES])
            self._lifecycle.record_votes(wanted, joined)
            self._check.record_votes(flags[NUM_VOTES:])
            if stepped and skipped:
                self.all_ranks_step(own)  # they do not

    def any_joined(self) -> bool:
        """Returns True if some rank contributed zeros to what was sent last. Waits for the votes.

        Such a rank does not see whether the others take a step with the sums. They may skip it, as
        a GradScaler does, or run backward again before it.
        """
        self._executor.wait_for_control()
        return any(self._device.fetch(self._executor.flat_buffer.votes[2:3]).get())

    def all_ranks_step(self, vote: StepVote) -> bool:
        """Returns True if all ranks take the step. Collective.

        Raises:
            MismatchError: On all ranks: some have skipped what others have taken.
        """
        votes = self._executor.gather_answers("stepped", vote.value)
        if StepVote.STEPPED.value in votes and StepVote.SKIPPED.value in votes:
            self._refuse([r for r, v in enumerate(votes) if v == StepVote.SKIPPED.value])
        return set(votes) == {StepVote.STEPPED.value}

    def _refuse(self, skipped: Sequence[int]) -> None:
        named = name_ranks([self._ranks[rank] for rank in skipped])
        self._update_guard.spoil(
            f"{self._label}: {named} called no step() between two backward passes that sent "
            "gradients, and other ranks did, so that their parameters differ"
        )
        raise MismatchError(
            f"{self._update_guard.torn}: see that all ranks take and leave out the same steps "
            "(with a GradScaler or batches that are left out, all decide alike) and restart the "
            "job from its last checkpoint"
        )

# SPDX-License-Identifier: Apache-2.0
"""Step consensus: makes sure that all ranks take or skip the same steps.

Flags that travel with the next gradients say what each rank has done with the last sums, so that no
collective is added. Only if the flags show a difference, and before a change of plan, do the ranks
compare their votes in a separate collective. docs/design/step-consensus.md gives the reasons.
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
    """What a rank has done with the sums of a step: taken a step, skipped it, or no statement."""

    STEPPED = b"taken"
    SKIPPED = b"left out"
    ABSTAIN = b""


class ControlChannel(Protocol):
    """The parts of the plan executor that carry the control tensor.

    Attributes:
        device: Device of the flat buffer.
        flat_buffer: Flat buffer of the plan in force.
    """

    device: Device
    flat_buffer: FlatBuffer

    @property
    def steps(self) -> int:
        """Number of steps begun so far."""

    def gather_answers(self, name: str, answer: bytes) -> list[bytes]:
        """Returns the answers of all ranks, by rank. Collective."""

    def wait_for_control(self) -> None:
        """Waits for the sum of the control tensor."""


class PlanVotes(Protocol):
    """The parts of the plan lifecycle by which ranks vote for new plans.

    Attributes:
        learning: True until a plan is made from measurements.
    """

    learning: bool

    def plan_boundary_next(self, steps: int) -> bool:
        """Returns whether the plan may change after the current step."""

    def record_votes(self, wanted: bool, joined: bool) -> None:
        """Records whether some rank wants a new plan, and whether some rank has joined."""


class StepConsensus:
    """The step consensus of one rank.

    Args:
        label: Name of the optimizer, for messages.
        ranks: Numbers of the ranks in the world, by rank of the group.
        executor: Carries the control tensor and gathers answers of the ranks.
        lifecycle: Receives the votes for a new plan.
        check: Receives the checksum flags.
        update_guard: Receives the notice that parameters differ between ranks.

    Attributes:
        has_data: Whether this rank sends gradients; False while it contributes zeros after
            `join()`.
        is_joined: Whether this rank contributed zeros to the gradients that were sent last.
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
        self._vote = StepVote.ABSTAIN  # on the sums of the step before the last one sent
        # For each step whose votes are not processed yet: this rank's vote, and the summed flags.
        self._votes: deque[tuple[StepVote, Fetched]] = deque()
        self._voted = False  # the control tensor has votes that are not in `_votes`

    def begin_step(self, phase: StepPhase, compares_itself: bool) -> None:
        """Processes the votes that have arrived and chooses this rank's next vote.

        Called before gradients are sent.

        Args:
            phase: Phase that the previous step has reached.
            compares_itself: Whether updates are sharded; a sharded step itself detects that some
                ranks have dropped the sums.

        Raises:
            MismatchError: Some ranks have skipped a step that others have taken; raised on all
                ranks.
        """
        # A rank that has joined gets the parameters of the others, so its steps do not count.
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
            self.all_ranks_step(vote)  # ranks that complete the step call this too
        self._vote = vote

    def record_participation(self) -> None:
        """Records, for the step that begins, whether this rank contributes zeros."""
        self.is_joined = not self.has_data

    def flags(self, wants_plan: bool) -> list[float]:
        """Returns this rank's votes and checksum flags, each 0.0 or 1.0, for the control tensor."""
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
        """Processes the votes of all steps except the last `lag`, which may not have arrived yet.

        Args:
            lag: Number of steps to leave; 0 waits for the votes of all steps.

        Raises:
            MismatchError: Some ranks have skipped a step that others have taken; raised on all
                ranks.
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
                self.all_ranks_step(own)  # raises, and names the ranks

    def any_joined(self) -> bool:
        """Returns whether some rank contributed zeros to the gradients that were sent last.

        This waits for the votes. A rank that contributed zeros cannot know whether the others take
        a step with the sums. They may skip it, as a GradScaler does, or run backward again before
        it.
        """
        self._executor.wait_for_control()
        return any(self._device.fetch(self._executor.flat_buffer.votes[2:3]).get())

    def all_ranks_step(self, vote: StepVote) -> bool:
        """Returns whether all ranks take the step. Collective.

        Args:
            vote: This rank's vote.

        Raises:
            MismatchError: Some ranks have skipped a step that others have taken; raised on all
                ranks.
        """
        votes = self._executor.gather_answers("stepped", vote.value)
        if StepVote.STEPPED.value in votes and StepVote.SKIPPED.value in votes:
            self._refuse([r for r, v in enumerate(votes) if v == StepVote.SKIPPED.value])
        return set(votes) == {StepVote.STEPPED.value}

    def _refuse(self, skipped: Sequence[int]) -> None:
        named = name_ranks([self._ranks[rank] for rank in skipped])
        self._update_guard.mark_diverged(
            f"{self._label}: {named} called no step() between two backward passes that sent "
            "gradients, and other ranks did, so their parameters differ"
        )
        raise MismatchError(
            f"{self._update_guard.inconsistency}: let all ranks take and skip the same steps "
            "(with a GradScaler or skipped batches, all ranks must make the same decision) and "
            "restart the job from its last checkpoint"
        )

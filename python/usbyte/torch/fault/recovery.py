"""Whether what a fault leaves of the parameters is a state to go on from.

It is on a rank whose parameters are all those after the last step that every surviving rank has
completed, or still can, as everything that its updates need has arrived. Elsewhere they hold a part
of an update, or one that other ranks do not have: there they are dirty, and whoever reads them gets
an error, until they are written to, as by loading a checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from usbyte.errors import FaultError
from usbyte.torch.lazy_tensor import make_lazy, unwrap

# A rank needs less to find out what it has left, and as much to hear of the others.
_DECISION_S = 30.0


@dataclass
class RankProgress:
    """What a fault has left of an optimizer's parameters on a rank.

    Attributes:
        completed: The last step whose updates have all been applied, counted from 1.
        partial: Some updates of the next step have been applied too.
        completable: The rest of them can be applied.
    """

    completed: int
    partial: bool
    completable: bool

    @property
    def last_reachable_step(self) -> int:
        """The last step that can be completed."""
        return self.completed + self.completable


@dataclass
class RecoveryDecision:
    """What is to be done with the parameters of a rank.

    Attributes:
        reason: Why they are no state to go on from; empty if they are.
        completes: They are once the updates that are pending have been applied.
    """

    reason: str
    completes: bool = False


def decide_recovery(rank: int, lefts: Mapping[int, RankProgress] | None) -> RecoveryDecision:
    """What is to be done on `rank`.

    Args:
        rank: One of the job.
        lefts: By rank, of those that survive; None if that cannot be found out.
    """
    if lefts is None:
        return RecoveryDecision("how far the other ranks have come cannot be found out")
    if rank not in lefts:
        return RecoveryDecision("the others have gone on without this rank")
    mine = lefts[rank]
    last, least = min((left.last_reachable_step, other) for other, left in lefts.items())
    if mine.completable and last == mine.last_reachable_step:
        return RecoveryDecision("", completes=True)
    if mine.partial:
        step = mine.completed + 1
        return RecoveryDecision(f"step {step} was applied to some of the parameters, not to all")
    if last < mine.completed:
        return RecoveryDecision(f"step {mine.completed} was applied here, but not on rank {least}")
    return RecoveryDecision("")


def partial_step_error(status: Mapping[str, Any], applied: bool) -> bool:
    """Whether updates may have used sums that were not whole when the run failed.

    On a device, updates are enqueued behind operations that may never have ended, or ended early.

    Args:
        status: Of the engine; see `Engine.status`.
        applied: Updates of the current step may have been enqueued.
    """
    step = status["open_step"]
    return bool(step) and (applied or step < status["step"])


class ParamRecovery:
    """Keeps the parameters of a run that has failed from being read, until that is decided.

    Args:
        params: All of an optimizer's.
        is_updating: Whether the calling thread is inside an update, which is to end.
        on_clean: Called by the first who reads them, if they can be read; with whether updates
            are to be completed.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        is_updating: Callable[[], bool],
        on_clean: Callable[[bool], None],
    ) -> None:
        self._params, self._is_updating, self._on_clean = params, is_updating, on_clean
        self._decided = threading.Event()
        self._error = self._verdict = ""
        self._completes = False
        self._cleaning = threading.RLock()  # guards _begun
        self._begun = False  # the clean-up
        self._written = [False] * len(params)  # over, by the user
        self._over = False  # all can be read
        self.block_reads()

    def block_reads(self) -> None:
        """Has readers wait; also again, after an update that was going on has ended."""
        for i, param in enumerate(self._params):
            if not (self._over or self._written[i]):
                make_lazy(param, self._read, partial(self._overwritten, i), owner=self)

    def decide(self, verdict: str, judgement: RecoveryDecision) -> None:
        """Lets the readers go on, or fails them.

        Args:
            verdict: The fault.
            judgement: See `decide_recovery`.
        """
        self._verdict = verdict
        if judgement.reason:
            self._mark_unusable(judgement.reason)
        self._completes = judgement.completes
        self._decided.set()

    def check(self) -> None:
        """Raises FaultError unless the parameters are a state to go on from."""
        if not self._decided.wait(_DECISION_S):
            raise FaultError("the run has failed, and it takes too long to find out what is left")
        if self._error:
            raise FaultError(self._error)
        with self._cleaning:
            if self._error:  # by another reader's clean-up
                raise FaultError(self._error)
            if self._begun:
                return
            self._begun = True
            try:
                self._on_clean(self._completes)
            except BaseException as error:
                found = f"{type(error).__name__}: {error}"
                self._mark_unusable(f"their last updates ended with {found}")
                self.block_reads()
                raise
            self._over = True
            for param in self._params:
                unwrap(param, owner=self)

    def _mark_unusable(self, reason: str) -> None:
        self._error = (
            f"these parameters are not to be used or saved, as {reason}: load the last checkpoint "
            f"into them. The run has failed: {self._verdict}"
        )

    def _read(self, param: torch.Tensor) -> None:
        if not self._is_updating():
            self.check()
        unwrap(param, owner=self)

    def _overwritten(self, i: int, param: torch.Tensor) -> None:
        self._written[i] = True
        unwrap(param, owner=self)

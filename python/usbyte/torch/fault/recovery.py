"""Decides whether a rank's parameters are usable after a fault.

A rank's parameters are usable if all of them are those after the last common step. That is the last
step that every surviving rank has completed, or can still complete because everything that its
updates need has arrived. Otherwise the parameters are those of a partial step, or of a step that
other ranks do not have. A read of them then raises FaultError, until they are overwritten, for
example by loading a checkpoint.
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

# Limit for a read to wait for the recovery decision. A rank needs less to examine its own
# parameters, and up to this long to learn of the other ranks.
_DECISION_S = 30.0


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


def decide_recovery(rank: int, lefts: Mapping[int, RankProgress] | None) -> RecoveryDecision:
    """Decides whether the parameters of `rank` are usable.

    Args:
        rank: A rank of the run.
        lefts: Progress of the surviving ranks, by rank; None if it is not known.
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


def has_partial_step(status: Mapping[str, Any], applied: bool) -> bool:
    """Whether updates on a device may have used incomplete sums when the run failed.

    On a device, updates are enqueued behind ops that may never have completed, or were aborted.

    Args:
        status: The result of `Engine.status`.
        applied: Whether updates of the current step may have been enqueued.
    """
    step = status["open_step"]
    return bool(step) and (applied or step < status["step"])


class ParamRecovery:
    """Blocks reads of an optimizer's parameters after a fault, until the recovery decision.

    Args:
        params: All parameters of the optimizer.
        is_updating: Returns whether the calling thread is inside an update. Its reads are not
            blocked, so that the update can end.
        on_clean: Called once, by the first read of usable parameters. Its argument says whether
            to apply the pending updates.
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
        self._begun = False  # whether a thread has called on_clean
        self._written = [False] * len(params)  # whether the user has overwritten the parameter
        self._over = False  # whether all parameters can be read
        self.block_reads()

    def block_reads(self) -> None:
        """Makes the parameters lazy, so that reads wait for the recovery decision.

        Call it again when an update has ended that was running at the time of the fault, because
        an update makes parameters readable. Parameters that the user has overwritten stay readable.
        """
        for i, param in enumerate(self._params):
            if not (self._over or self._written[i]):
                make_lazy(param, self._read, partial(self._overwritten, i), owner=self)

    def decide(self, verdict: str, judgement: RecoveryDecision) -> None:
        """Ends the wait of all reads: they return, or raise FaultError.

        Args:
            verdict: The fault verdict.
            judgement: The recovery decision of this rank.
        """
        self._verdict = verdict
        if judgement.reason:
            self._mark_unusable(judgement.reason)
        self._completes = judgement.completes
        self._decided.set()

    def check(self) -> None:
        """Waits for the recovery decision; raises FaultError unless the parameters are usable."""
        if not self._decided.wait(_DECISION_S):
            raise FaultError(
                f"the run has failed, and after {_DECISION_S:g} s it is not known whether the "
                "parameters are usable: load the last checkpoint into them"
            )
        if self._error:
            raise FaultError(self._error)
        with self._cleaning:
            if self._error:  # set by another thread's on_clean meanwhile
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

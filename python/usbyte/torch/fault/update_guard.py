# SPDX-License-Identifier: Apache-2.0
"""Serializes updates of an optimizer's parameters and tracks their progress for fault recovery."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

import torch

from usbyte._util.transitions import advance
from usbyte.errors import Error, FaultError
from usbyte.torch.fault.decision import RankProgress, RecoveryDecision
from usbyte.torch.fault.recovery import ParamRecovery

_UPDATE_S = 5.0  # limit for an update that runs during a fault to end


class UpdatePhase(Enum):
    """How far the updates of the current step have come."""

    IDLE = "all updates are applied"
    STEPPING = "the wrapped optimizer's step updates all parameters"
    PENDING = "updates are deferred"
    APPLYING = "the wrapped optimizer's step applies some deferred updates"


UPDATE_TRANSITIONS: dict[UpdatePhase, frozenset[UpdatePhase]] = {
    UpdatePhase.IDLE: frozenset({UpdatePhase.STEPPING, UpdatePhase.PENDING}),
    UpdatePhase.STEPPING: frozenset({UpdatePhase.IDLE}),
    UpdatePhase.PENDING: frozenset({UpdatePhase.APPLYING, UpdatePhase.IDLE}),
    UpdatePhase.APPLYING: frozenset({UpdatePhase.PENDING, UpdatePhase.IDLE}),
}


_next_phase = partial(advance, "an optimizer's updates", UPDATE_TRANSITIONS)


class FaultPhase(Enum):
    """Whether updates may begin, before and after a fault."""

    TRAINING = "there was no fault"
    BLOCKED = "there was a fault, and no update may begin"
    COMPLETING = "there was a fault, and the recovery decision allows pending updates"


FAULT_TRANSITIONS: dict[FaultPhase, frozenset[FaultPhase]] = {
    FaultPhase.TRAINING: frozenset({FaultPhase.BLOCKED}),
    FaultPhase.BLOCKED: frozenset({FaultPhase.COMPLETING}),
    FaultPhase.COMPLETING: frozenset(),
}
_next_fault_phase = partial(advance, "recovery", FAULT_TRANSITIONS)


class UpdateGuard:
    """Counts the steps whose updates have been applied; after a fault, blocks reads of parameters.

    Attributes:
        lock: Guards updates and the counts of steps. Any thread that reads a lazy parameter may
            take it to apply the pending update.
        recovery: Blocks reads of the parameters after a fault; None before.
        phase: How far the updates of the current step have come.
        inconsistency: Why the parameters are not those of any step: a step ended half-way here, or
            ranks took different steps. Empty if they are.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.recovery: ParamRecovery | None = None
        self.inconsistency = ""
        self.phase, self._fault_phase = UpdatePhase.IDLE, FaultPhase.TRAINING
        self._completed = 0  # steps whose updates have all been applied
        self._failure = ""  # the fault verdict
        self._thread: int | None = None  # thread that is inside `updating`
        self.applier: int | None = None  # thread that is inside `applying`

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context for code that changes parameters. After a fault, `progress` waits for its end.

        Raises:
            FaultError: There was a fault, so the parameters must not change any more.
        """
        with self.lock:
            outer, self._thread = self._thread, threading.get_ident()
            try:
                if outer is None and self._fault_phase is FaultPhase.BLOCKED:
                    # The progress may have been reported to other ranks.
                    raise FaultError(self._failure)
                yield
            finally:
                self._thread = outer
                if outer is None and self.recovery is not None:
                    self.recovery.block_reads()

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Context for deferred updates, which any thread may apply; else like `updating`."""
        with self.updating():
            outer, self.applier = self.applier, threading.get_ident()
            try:
                yield
            finally:
                self.applier = outer

    @property
    def updating_in_other_thread(self) -> bool:
        """Whether another thread than the calling one is applying deferred updates.

        It is safe to wait for that thread: deferred updates run no closure of the user, which
        could itself wait for the calling thread.
        """
        applier = self.applier
        return applier is not None and applier != threading.get_ident()

    @contextmanager
    def updating_after_fault(self) -> Iterator[None]:
        """Context for pending updates that the recovery decision allows; later ones are, too."""
        self._fault_phase = _next_fault_phase(self._fault_phase, FaultPhase.COMPLETING)
        with self.updating():
            yield

    def step(self, call: Callable[..., Any], closure: Any, evaluates_first: bool) -> Any:
        """Runs the wrapped optimizer's step and marks a partial step if it raises.

        Args:
            call: Runs the step; takes the closure, if there is one.
            closure: The user's closure; None for none.
            evaluates_first: Whether the optimizer calls the closure before it changes parameters.
                An exception in that first evaluation leaves no partial step.

        Returns:
            The return value of `call`.
        """
        calls = 0
        evaluating = False

        def evaluate() -> Any:
            nonlocal calls, evaluating
            calls, evaluating = calls + 1, True
            loss = closure()
            evaluating = False
            return loss

        deferred = self.phase in (UpdatePhase.PENDING, UpdatePhase.APPLYING)
        self.phase = _next_phase(
            self.phase, UpdatePhase.APPLYING if deferred else UpdatePhase.STEPPING
        )
        try:
            if closure is None:
                return call()
            return call(evaluate if evaluates_first else closure)
        except BaseException as error:
            if not (evaluating and calls == 1):
                self.mark_partial_step(error)
            raise
        finally:
            if self.phase is UpdatePhase.STEPPING:
                self.phase = _next_phase(self.phase, UpdatePhase.IDLE)
            elif self.phase is UpdatePhase.APPLYING:  # else the updates were dropped meanwhile
                self.phase = _next_phase(self.phase, UpdatePhase.PENDING)

    def mark_partial_step(self, error: BaseException) -> None:
        """Records that a step raised `error` after it may have changed some parameters."""
        if not self.inconsistency:
            cause = f"a step ended half-way ({type(error).__name__}: {error})"
            self.inconsistency = f"{cause}, so that parameters are not those of any step"

    def mark_diverged(self, why: str) -> None:
        """Records that parameters differ between ranks and must not be used any more."""
        self.inconsistency = why

    def check_consistent(self) -> None:
        """Raises Error if the parameters are not those of any step."""
        if self.inconsistency:
            raise Error(f"{self.inconsistency}; restart the job from its last checkpoint")

    @property
    def completed(self) -> int:
        """Number of steps whose updates have all been applied."""
        return self._completed

    def count_step(self) -> None:
        """Counts a step whose updates were all applied at once."""
        self._completed += 1

    def defer_all(self) -> None:
        """Records that the updates of a step are deferred."""
        self.phase = _next_phase(self.phase, UpdatePhase.PENDING)

    def count_applied(self, pending: int) -> None:
        """Records that deferred updates were applied, and counts the step if it was the last.

        Args:
            pending: Number of deferred updates that are left.
        """
        if self.phase is UpdatePhase.PENDING and not pending:
            self.phase = _next_phase(self.phase, UpdatePhase.IDLE)
            self._completed += 1

    def forget(self) -> None:
        """Records that the pending deferred updates will never be applied."""
        if self.phase is not UpdatePhase.STEPPING:
            self.phase = _next_phase(self.phase, UpdatePhase.IDLE)

    def block_reads(
        self, verdict: str, params: Sequence[torch.Tensor], on_clean: Callable[[bool], None]
    ) -> None:
        """Blocks reads of parameters after a fault, until `apply_decision`.

        Args:
            verdict: The fault verdict.
            params: All parameters of the optimizer.
            on_clean: Called once, by the first read of usable parameters. Its argument says whether
                to apply the pending updates.
        """
        self._failure = verdict
        self.recovery = ParamRecovery(params, self._is_updating, on_clean)
        self._fault_phase = _next_fault_phase(self._fault_phase, FaultPhase.BLOCKED)
        # Again: an update that did not see `recovery` yet may have made parameters readable.
        self.recovery.block_reads()

    def progress(self, examine: Callable[[bool], tuple[bool, bool]]) -> RankProgress | None:
        """Returns the progress of the updates after a fault; None if no reads were blocked.

        Args:
            examine: Called with True if no update is running and no step has ended half-way; it
                then runs under the lock. Returns two flags: whether the parameters are those of a
                partial step, and whether the pending updates can be applied.
        """
        if self.recovery is None:
            return None
        ended = self.lock.acquire(timeout=_UPDATE_S)
        try:
            self.recovery.block_reads()
            in_step = self.phase in (UpdatePhase.STEPPING, UpdatePhase.APPLYING)
            in_part, completable = examine(ended and not (in_step or self.inconsistency))
            return RankProgress(self._completed, in_part, completable)
        finally:
            if ended:
                self.lock.release()

    def apply_decision(self, verdict: str, decision: RecoveryDecision) -> None:
        """Ends the block: reads of parameters go on, or raise FaultError.

        Args:
            verdict: The fault verdict.
            decision: The recovery decision of this rank.
        """
        if self.recovery is not None:
            self.recovery.apply_decision(verdict, decision)

    def _is_updating(self) -> bool:
        return self._thread == threading.get_ident()

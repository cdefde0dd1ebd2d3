"""Who changes an optimizer's parameters, how far that has come, and what a fault leaves of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from usbyte.errors import Error, FaultError
from usbyte.torch.fault.recovery import ParamRecovery, RankProgress, RecoveryDecision

_UPDATE_S = 5.0  # how long one may take to end after a fault


class UpdateGuard:
    """Counts an optimizer's steps by their updates; after a fault, stands before its parameters.

    Attributes:
        lock: Held while updates are applied: whoever reads a parameter may ask for that. Steps
            are counted under it.
        salvage: What a fault has left; None without one.
        torn: What a step has ended half-way with, here or on other ranks; empty if none has.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.recovery: ParamRecovery | None = None
        self.torn = ""
        self._completed = 0  # steps whose updates have all been applied
        self._unfinished = False  # those of the next one are being applied
        self._mid_step = False  # the wrapped optimizer's own step has begun and not returned
        self._failure = ""  # which it was
        self._thread: int | None = None  # that holds the lock to change parameters
        self._applier: int | None = None  # the same, for updates that have waited
        self._recovering = False  # updates do, after the fault

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around what changes parameters: it ends before a fault is told."""
        with self.lock:
            outer, self._thread = self._thread, threading.get_ident()
            try:
                if outer is None and self.recovery is not None and not self._recovering:
                    raise FaultError(self._failure)  # what is left has been told
                yield
            finally:
                self._thread = outer
                if outer is None and self.recovery is not None:
                    self.recovery.block_reads()

    @contextmanager
    def applying(self) -> Iterator[None]:
        """The same around updates that have waited, which any thread may come to apply."""
        with self.updating():
            outer, self._applier = self._applier, threading.get_ident()
            try:
                yield
            finally:
                self._applier = outer

    @property
    def updating_in_other_thread(self) -> bool:
        """Another thread than the calling one applies updates that have waited.

        That runs no closure, in which the calling thread might be wanted, so it can be waited for.
        """
        applier = self._applier
        return applier is not None and applier != threading.get_ident()

    @contextmanager
    def updating_after_fault(self) -> Iterator[None]:
        """Around updates that were judged to be in order; from now on there may be others."""
        self._recovering = True
        with self.updating():
            yield

    def step(self, call: Callable[..., Any], closure: Any, evaluates_first: bool) -> Any:
        """Has the wrapped optimizer take its step.

        Args:
            call: What does so.
            closure: What it is given; None for nothing.
            evaluates_first: It calls the closure before it changes anything.
        """
        calls = 0
        evaluating = False

        def evaluate() -> Any:
            nonlocal calls, evaluating
            calls, evaluating = calls + 1, True
            loss = closure()
            evaluating = False
            return loss

        self._mid_step = True
        try:
            if closure is None:
                return call()
            return call(evaluate if evaluates_first else closure)
        except BaseException as error:
            if not (evaluating and calls == 1):
                self.mark_partial_step(error)
            raise
        finally:
            self._mid_step = False

    def mark_partial_step(self, error: BaseException) -> None:
        """A step has ended half-way with this."""
        cause = f"a step ended half-way ({type(error).__name__}: {error})"
        self.torn = self.torn or f"{cause}, so that parameters are not those of any step"

    def spoil(self, why: str) -> None:
        """Parameters are not to be used any more, as ranks have come to train otherwise."""
        self.torn = why

    def check_whole(self) -> None:
        """Raises Error if a step has ended half-way."""
        if self.torn:
            raise Error(f"{self.torn}; restart the job from its last checkpoint")

    def count_step(self) -> None:
        """All updates of a step have been applied at once."""
        self._completed += 1

    def defer_all(self) -> None:
        """The updates of a step are to come one after the other."""
        self._unfinished = True

    def count_applied(self, pending: int) -> None:
        """Some of them have been applied, and so many are left."""
        if self._unfinished and not pending:
            self._unfinished = False
            self._completed += 1

    def forget(self) -> None:
        """Those that are left never come."""
        self._unfinished = False

    def fail(
        self, message: str, params: Sequence[torch.Tensor], on_clean: Callable[[bool], None]
    ) -> None:
        """From now on nobody reads parameters, until it is decided what they are.

        Args:
            message: Of the fault.
            params: The optimizer's.
            on_clean: See `ParamRecovery`.
        """
        self._failure = message
        self.recovery = ParamRecovery(params, self._is_updating, on_clean)
        self.recovery.block_reads()  # also what an update has released that did not know of it yet

    def left(self, examine: Callable[[bool], tuple[bool, bool]]) -> RankProgress | None:
        """What the fault has left, after `fail`; None if there was nothing to fail.

        Args:
            examine: Called with whether no update is going on, and none has ended half-way; if so,
                under the lock. Returns whether parameters hold a part of a step, and whether the
                pending updates can be applied.
        """
        if self.recovery is None:
            return None
        ended = self.lock.acquire(timeout=_UPDATE_S)
        try:
            self.recovery.block_reads()
            in_part, completable = examine(ended and not (self._mid_step or self.torn))
            return RankProgress(self._completed, in_part, completable)
        finally:
            if ended:
                self.lock.release()

    def settle(self, verdict: str, judgement: RecoveryDecision) -> None:
        """Whether what is left is a state to go on from; see `ParamRecovery.decide`."""
        if self.recovery is not None:
            self.recovery.decide(verdict, judgement)

    def _is_updating(self) -> bool:
        return self._thread == threading.get_ident()

# SPDX-License-Identifier: Apache-2.0
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
from functools import partial
from typing import Any

import torch

from usbyte.errors import FaultError
from usbyte.torch.fault.decision import RecoveryDecision
from usbyte.torch.lazy_tensor import make_lazy, unwrap

# Limit for a read to wait for the recovery decision. A rank needs less to examine its own
# parameters, and up to this long to learn of the other ranks.
_DECISION_S = 30.0


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

    def apply_decision(self, verdict: str, decision: RecoveryDecision) -> None:
        """Ends the wait of all reads: they return, or raise FaultError.

        Args:
            verdict: The fault verdict.
            decision: The recovery decision of this rank.
        """
        self._verdict = verdict
        if decision.reason:
            self._mark_unusable(decision.reason)
        self._completes = decision.completes
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
            f"these parameters must not be used or saved, because {reason}: load the last "
            f"checkpoint into them. The run has failed: {self._verdict}"
        )

    def _read(self, param: torch.Tensor) -> None:
        if not self._is_updating():
            self.check()
        unwrap(param, owner=self)

    def _overwritten(self, i: int, param: torch.Tensor) -> None:
        self._written[i] = True
        unwrap(param, owner=self)

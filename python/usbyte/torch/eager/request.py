# SPDX-License-Identifier: Apache-2.0
"""Requests and handles of eager operations, from submission to result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from usbyte.torch.eager.descriptors import Descriptor, MatchResult
from usbyte.torch.eager.operation_names import OperationName


@dataclass(frozen=True)
class Request:
    """An operation that a rank submits.

    Attributes:
        name: The name by which ranks match it; unique among the operations in flight on this rank.
        descriptor: The facts that must agree on all ranks.
        execute: Runs the collective. Called on the queue's thread, without autograd.
        postprocess: Turns the value that `execute` returned into the user's result. Called on the
            first thread that asks for the result; default: returns the value.
    """

    name: OperationName
    descriptor: Descriptor
    execute: Callable[[MatchResult], Any]
    postprocess: Callable[[Any], Any] = lambda value: value

    def __str__(self) -> str:
        return f"{self.descriptor.kind} '{self.name}'"


@dataclass(eq=False)
class Handle:
    """A submitted operation; `poll` and `synchronize` of the API take it.

    Attributes:
        request: The submitted request.
        next_check: When to check for a stall, in seconds of the monotonic clock.
        check_stall: The queue's function that checks for a stall and sets `next_check` anew.
        submitted: When it was submitted, in seconds of the monotonic clock.
    """

    request: Request
    next_check: float
    check_stall: Callable[[Handle], None]
    submitted: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _done: threading.Event = field(default_factory=threading.Event)
    _outcome: Any = None
    _finished: bool = False

    def done(self) -> bool:
        """Whether the operation has ended, with a result or an error."""
        return self._done.is_set()

    def poll(self) -> bool:
        """Whether the operation has ended, so that `synchronize` does not wait.

        Also checks for a stall when that is due.
        """
        if not self.done() and time.monotonic() >= self.next_check:
            self.check_stall(self)
        return self.done()

    def synchronize(self) -> Any:
        """Waits for the operation and returns its result. Signals can interrupt the wait.

        Raises:
            MismatchError: The ranks submitted different operations under this name; raised on
                every rank.
            FaultError: The operation stalled, a peer is lost, or another rank reported a fault.
        """
        self.wait()
        return self.result()

    __call__ = synchronize  # Horovod's sparse_allreduce_async returns a callable

    def wait(self) -> None:
        """Waits until the operation has ended, with a result or an error. Does not raise for it."""
        while not self.wait_for_check():
            self.check_stall(self)

    def wait_for_check(self) -> bool:
        """Waits for the end of the operation or for `next_check`; returns whether it has ended."""
        left = self.next_check - time.monotonic()
        return self._done.wait(max(0.0, min(left, threading.TIMEOUT_MAX)))

    def set_result(self, outcome: Any) -> None:
        """Ends the operation with a value or an exception. Only the first call has an effect."""
        with self._lock:
            if not self._done.is_set():
                self._outcome = outcome
                self._done.set()

    def result(self) -> Any:
        """Returns the result of an operation that has ended; the same object on every call.

        Raises:
            Error: The operation failed.
        """
        with self._lock:
            if isinstance(self._outcome, Exception):
                # Several threads may raise it, so each gets a fresh exception with its own
                # traceback.
                raise type(self._outcome)(*self._outcome.args)
            if not self._finished:
                self._outcome = self.request.postprocess(self._outcome)
                self._finished = True
            return self._outcome

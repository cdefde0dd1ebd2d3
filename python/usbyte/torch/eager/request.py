"""An eager operation from its submission to its result."""

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
    """An operation as its rank submits it.

    Attributes:
        name: What the ranks match it by; unique among the operations in flight.
        descriptor: What the ranks compare.
        execute: Runs the collective, on the queue's thread, without gradients.
        postprocess: Makes the user's result of what `execute` returned, on the thread that asks for
            it.
    """

    name: OperationName
    descriptor: Descriptor
    execute: Callable[[MatchResult], Any]
    postprocess: Callable[[Any], Any] = lambda value: value

    def __str__(self) -> str:
        return f"{self.descriptor.kind} '{self.name}'"


@dataclass(eq=False)
class Handle:
    """An operation in flight; what `poll` and `synchronize` take.

    Attributes:
        request: What was submitted.
        next_check: When to look for a stall, seconds on the monotonic clock.
        check_stall: Looks for one, and sets `next_check` again; the queue's.
        submitted: When it was submitted, on the same clock.
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
        """Whether the operation has ended, well or not."""
        return self._done.is_set()

    def poll(self) -> bool:
        """Whether the operation has ended, so that `synchronize` will not wait."""
        if not self.done() and time.monotonic() >= self.next_check:
            self.check_stall(self)
        return self.done()

    def synchronize(self) -> Any:
        """Waits for the operation, interruptibly, and returns its result.

        Raises:
            MismatchError: The ranks did not mean the same operation; raised on every rank.
            FaultError: The operation stalled, a peer is lost, or another rank reported a fault.
        """
        self.wait()
        return self.result()

    __call__ = synchronize  # as what Horovod's sparse_allreduce_async returns

    def wait(self) -> None:
        """Waits, interruptibly, until the operation has ended, well or not."""
        while not self.wait_for_check():
            self.check_stall(self)

    def wait_for_check(self) -> bool:
        """Waits, interruptibly, for the end or `next_check`; returns whether it is the end."""
        left = self.next_check - time.monotonic()
        return self._done.wait(max(0.0, min(left, threading.TIMEOUT_MAX)))

    def set_result(self, outcome: Any) -> None:
        """Ends the operation with a value or an exception; the first outcome stays."""
        with self._lock:
            if not self._done.is_set():
                self._outcome = outcome
                self._done.set()

    def result(self) -> Any:
        """The result of an operation that has ended, the same on every call.

        Raises:
            Error: The operation failed.
        """
        with self._lock:
            if isinstance(self._outcome, Exception):
                # A fresh exception each time: several threads may raise it, each with its own
                # traceback.
                raise type(self._outcome)(*self._outcome.args)
            if not self._finished:
                self._outcome = self.request.postprocess(self._outcome)
                self._finished = True
            return self._outcome

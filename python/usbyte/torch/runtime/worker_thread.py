"""Calls that may never return, such as one to the store of a host that cannot be reached."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class NoAnswerError(RuntimeError):
    """A call has not ended in time; it may yet."""


class SerialExecutor:
    """Makes calls one after another on a thread of its own, for whoever cannot wait for ever.

    The thread is started early: Python 3.12 and later start none while the interpreter ends.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._hangs = False  # a call has not ended in time
        self._closed = False
        threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True).start()

    def run(self, call: Callable[[], T], seconds: float, ignore_backlog: bool = False) -> T:
        """What the call returns; interruptible.

        Args:
            call: What to do.
            seconds: For the call, and those that were asked for before it.
            ignore_backlog: Wait that long even if one of those has taken too long already.

        Raises:
            NoAnswerError: The call did not end in time, or one before it does not.
            RuntimeError: `close` was called before.
            Exception: The call raised it.
        """
        result: list[Any] = []
        error: list[Exception] = []
        ended = threading.Event()

        def carry_out() -> None:
            try:
                result.append(call())
            except Exception as caught:
                error.append(caught)
            self._hangs = False
            ended.set()

        if self._closed:
            raise RuntimeError("the store is not asked any more")
        if self._hangs and not ignore_backlog:
            raise NoAnswerError("no answer to an earlier call")
        self._queue.put(carry_out)
        if not ended.wait(min(seconds, threading.TIMEOUT_MAX)):
            self._hangs = True
            raise NoAnswerError(f"no answer in {seconds:g} s")
        if error:
            raise error[0]
        answer: T = result[0]
        return answer

    def close(self) -> None:
        """Ends the thread, once it has made the calls asked for before."""
        self._closed = True
        self._queue.put(None)


def call_within(seconds: float, name: str, call: Callable[[], T]) -> T:
    """Makes one call on a thread of its own, which is left behind if the call does not return.

    Args:
        seconds: How long to wait.
        name: Name of the thread.
        call: What to do.

    Raises:
        NoAnswerError: The call did not end in time.
        Exception: The call raised it.
    """
    calls = SerialExecutor(name)
    try:
        return calls.run(call, seconds)
    finally:
        calls.close()


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := queue.get()) is not None:
        call()

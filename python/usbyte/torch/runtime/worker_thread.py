# SPDX-License-Identifier: Apache-2.0
"""Runs calls that may never return, such as to the store of an unreachable host, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class NoAnswerError(RuntimeError):
    """A call has not returned in time; it may return later."""


class SerialExecutor:
    """Makes calls one after another on a thread of its own, so that callers can time out.

    The thread starts in the constructor, because Python 3.12 and later start no thread while the
    interpreter ends.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._hangs = False  # whether a call has not returned in time
        self._closed = False
        threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True).start()

    def run(self, call: Callable[[], T], seconds: float, ignore_backlog: bool = False) -> T:
        """Makes a call on the thread and returns its result. Signals can interrupt the wait.

        Args:
            call: Function to call.
            seconds: Timeout for the call and the calls that are queued before it.
            ignore_backlog: If an earlier call has not returned in time, wait for up to `seconds`
                all the same. By default NoAnswerError is raised at once.

        Raises:
            NoAnswerError: The call did not return in time, or an earlier one still has not.
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
            raise RuntimeError("the store's connection is closed on this rank")
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
        """Ends the thread after the calls that are queued; does not wait for it."""
        self._closed = True
        self._queue.put(None)


def call_within(seconds: float, name: str, call: Callable[[], T]) -> T:
    """Makes one call on a new thread and returns its result.

    If the call does not return in time, the thread is abandoned and may run on.

    Args:
        seconds: Timeout in seconds.
        name: Name of the thread.
        call: Function to call.

    Raises:
        NoAnswerError: The call did not return in time.
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

# SPDX-License-Identifier: Apache-2.0
"""Threads that run tasks one after another, and calls with a timeout on such a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

log = logging.getLogger("usbyte")

T = TypeVar("T")


class NoAnswerError(RuntimeError):
    """A call has not returned in time; it may return later."""


class WorkerThread:
    """A thread, or several with one queue, that runs tasks in the order in which they were put.

    Tasks run without recording gradients. An exception of a task is logged, and the next task runs.

    The threads start in the constructor, because Python 3.12 and later start no thread while the
    interpreter ends. They are daemons, so that a task that hangs in a backend does not keep the
    process from ending. They refer to this object's queue only, so that the object can be
    collected; call `end` then, or they wait for good.

    Args:
        name: Name of the threads.
        count: Number of threads; default 1. Tasks then start, but need not end, in order.
        owner: An object that lives until the threads have ended; default None.
    """

    def __init__(self, name: str, count: int = 1, owner: object = None) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_serve, args=(self._tasks, owner), name=name, daemon=True)
            for _ in range(count)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # there are too many
            self.end()
            raise

    def put(self, task: Callable[[], None]) -> None:
        """Queues a task. Any thread may call this."""
        self._tasks.put(task)

    def end(self) -> None:
        """Ends the threads after the tasks that are queued; does not wait for them."""
        for _ in self._threads:
            self._tasks.put(None)

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the end of the threads, after `end`; returns whether all have ended.

        Args:
            timeout_s: Seconds to wait at most; default None for no limit.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class SerialExecutor:
    """Makes calls one after another on a thread of its own, so that callers can time out.

    For calls that may never return, such as to the store of an unreachable host.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._worker = WorkerThread(name)
        self._hangs = False  # whether a call has not returned in time
        self._closed = False

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
        self._worker.put(carry_out)
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
        self._worker.end()


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


def _serve(tasks: SimpleQueue[Callable[[], None] | None], owner: object) -> None:
    with torch.no_grad():
        while (task := tasks.get()) is not None:
            try:
                task()
            except Exception:
                log.exception("a task of the thread %s failed", threading.current_thread().name)
            del task  # releases its tensors before this blocks for the next task

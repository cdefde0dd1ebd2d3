"""Exceptions that nobody catches: the other ranks would wait for this one until the stall limit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from usbyte.errors import FaultError

_threads = threading.local()


class _Excepthook(Protocol):
    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, /
    ) -> Any: ...


def mark_training_thread() -> None:
    """The other ranks wait for what the calling thread does, and so are told if it dies.

    A thread that only logs or loads data may die without harm to the job.
    """
    _threads.trains = True


class UncaughtExceptions:
    """Tells the other ranks of exceptions that end the main thread or one that trains.

    Args:
        rank: This rank.
        announce: Called with what has happened.
    """

    def __init__(self, rank: int, announce: Callable[[str], None]) -> None:
        self._rank, self._announce = rank, announce
        self._of_main: _Excepthook = sys.excepthook
        self._of_threads = threading.excepthook
        self._installed = False

    def install(self) -> None:
        """Puts its hooks before those of Python or of the program, which are called too."""
        self._of_main, self._of_threads = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._on_main, self._on_thread
        self._installed = True

    def restore(self) -> None:
        """Puts back what was there. Where somebody has put a hook on top, this one goes quiet."""
        self._installed = False
        if sys.excepthook == self._on_main:
            sys.excepthook = self._of_main
        if threading.excepthook == self._on_thread:
            threading.excepthook = self._of_threads

    def tell(self, error: BaseException, who: str = "") -> None:
        """Tells the other ranks of an error that ends this one, or `who` on it."""
        self._announce(f"{who}rank {self._rank} ended with {type(error).__name__}: {error}")

    def _on_main(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._installed and not issubclass(kind, FaultError | SystemExit):
            self.tell(error)
        self._of_main(kind, error, trace)

    def _on_thread(self, args: threading.ExceptHookArgs) -> None:
        # Python calls this in the thread that ends.
        trains = getattr(_threads, "trains", False)
        if self._installed and trains and not issubclass(args.exc_type, FaultError | SystemExit):
            name = args.thread.name if args.thread is not None else "unknown"
            self.tell(args.exc_value or args.exc_type(), f"thread '{name}' of ")
        self._of_threads(args)

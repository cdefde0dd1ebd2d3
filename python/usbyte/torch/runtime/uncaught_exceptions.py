# SPDX-License-Identifier: Apache-2.0
"""Reports uncaught exceptions to the other ranks, which else wait until the stall limit."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

import usbyte
from usbyte.errors import FaultError, UsageError

log = logging.getLogger("usbyte")
_LIBRARIES = tuple(f"{Path(str(package.__file__)).parent}/" for package in (usbyte, torch))
_threads = threading.local()


class _Excepthook(Protocol):
    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, /
    ) -> Any: ...


def mark_training_thread() -> None:
    """Marks the calling thread as one that other ranks wait for.

    An uncaught exception in it is a fault. Other threads, which only log or load data, may die
    without harm to the job.
    """
    _threads.trains = True


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the calls inside usbyte and torch at its end.

    A misuse is in the user's line. The whole of it is shown at `USBYTE_LOG_LEVEL=debug`.
    """
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    users = list(entries)
    while users and users[-1].tb_frame.f_code.co_filename.startswith(_LIBRARIES):
        users.pop()
    shortened: TracebackType | None = None
    for entry in reversed(users or entries):
        shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened


class UncaughtExceptions:
    """Exception hooks that report the death of the main thread or of a marked training thread.

    Args:
        rank: This rank.
        announce: Called with a description of the exception.
    """

    def __init__(self, rank: int, announce: Callable[[str], None]) -> None:
        self._rank, self._announce = rank, announce
        self._of_main: _Excepthook = sys.excepthook
        self._of_threads = threading.excepthook
        self._installed = False

    def install(self) -> None:
        """Installs the hooks; each calls the previous hook afterwards."""
        self._of_main, self._of_threads = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._on_main, self._on_thread
        self._installed = True

    def restore(self) -> None:
        """Restores the previous hooks.

        If other code has installed a hook since, that stays in place and this object's hook
        reports nothing any more.
        """
        self._installed = False
        if sys.excepthook == self._on_main:
            sys.excepthook = self._of_main
        if threading.excepthook == self._on_thread:
            threading.excepthook = self._of_threads

    def tell(self, error: BaseException, who: str = "") -> None:
        """Reports an error that ends this rank, or a part of it.

        Args:
            error: The uncaught exception.
            who: Empty, or the part of this rank that ended, such as "thread 'x' of ".
        """
        self._announce(f"{who}rank {self._rank} ended with {type(error).__name__}: {error}")

    def _on_main(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._installed and not issubclass(kind, FaultError | SystemExit):
            self.tell(error)
        if self._installed and issubclass(kind, UsageError) and not log.isEnabledFor(logging.DEBUG):
            error.__traceback__ = trace = users_part(trace)
        self._of_main(kind, error, trace)

    def _on_thread(self, args: threading.ExceptHookArgs) -> None:
        # Python calls this in the thread that dies, so the thread-local mark is that thread's.
        trains = getattr(_threads, "trains", False)
        if self._installed and trains and not issubclass(args.exc_type, FaultError | SystemExit):
            name = args.thread.name if args.thread is not None else "unknown"
            self.tell(args.exc_value or args.exc_type(), f"thread '{name}' of ")
        self._of_threads(args)

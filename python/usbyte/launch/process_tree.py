# SPDX-License-Identifier: Apache-2.0
"""Finds and ends all descendants of this process (Linux)."""

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from usbyte.launch.worker import die_with

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.05


def adopt_orphans() -> None:
    """Makes this process the new parent of descendants whose own parent ends.

    So `descendants` also finds a process that has left its session, or whose parent is gone.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A daemon that started this process may ignore SIGCHLD, which is inherited. The kernel would
    # then discard the exit codes of children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def descendants(spare: Collection[int] = ()) -> list[int]:
    """Returns the ids of the running descendants of this process, parents before children.

    Args:
        spare: Processes to leave out, with their descendants.
    """
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with suppress(OSError):  # The process has ended in the meantime.
            stat = Path("/proc", entry, "stat").read_bytes()
            # The process name, in parentheses, may itself have spaces and parentheses.
            state, parent = stat[stat.rindex(b")") + 1 :].split()[:2]
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
    found = [os.getpid()]
    for pid in found:
        found += [child for child in children.get(pid, ()) if child not in spare]
    return found[1:]


def end_descendants(
    grace: float,
    hurry: Callable[[], bool] = lambda: False,
    spare: Collection[int] = (),
) -> list[int]:
    """Sends SIGTERM to all descendants, and SIGKILL to those that still run after `grace`.

    Args:
        grace: Seconds between the two signals; 0 sends SIGKILL at once.
        hurry: Polled during the grace time; True ends it.
        spare: Processes to leave alone, with their descendants.

    Returns:
        Processes that SIGKILL did not end in five seconds, because they hang in the kernel.
    """
    if grace > 0:
        _signal(descendants(spare), signal.SIGTERM)
        deadline = time.monotonic() + grace
        while descendants(spare) and time.monotonic() < deadline and not hurry():
            time.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + _KILL_SECONDS
    # A loop, because a process may fork after it was found and before it is killed.
    while (pids := descendants(spare)) and time.monotonic() < deadline:
        _signal(pids, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return pids


class ExitOrder:
    """Tells in which order processes end. `os.wait` knows only that several have ended.

    Args:
        pids: The processes. On Linux before 5.3 none of them is watched.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._poll = select.epoll()
        self._pids: dict[int, int] = {}
        for pid in pids:
            with suppress(OSError):
                fd = os.pidfd_open(pid)
                self._pids[fd] = pid
                # The kernel queues a descriptor when its process ends, the first to end first.
                self._poll.register(fd, select.EPOLLIN)

    def take(self) -> list[int]:
        """Returns the processes that have ended since the last call, the first to end first."""
        ended = []
        for fd, _ in self._poll.poll(0):
            self._poll.unregister(fd)
            os.close(fd)
            ended.append(self._pids.pop(fd))
        return ended


def reap() -> None:
    """Reaps all children that have ended. Other code must not wait for a child."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def guard() -> None:
    """Forks, and returns in the child. When the child ends, the parent kills its descendants.

    This is for a remote host, where no launcher does the clean-up. Call it before any thread is
    started.
    """
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        die_with(guardian)
        return
    adopt_orphans()

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):  # The child has ended; its descendants come next.
            os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    while os.wait()[0] != child:
        pass
    end_descendants(0)
    os._exit(0)


def open_standard_descriptors() -> None:
    """Opens closed ones of stdin, stdout and stderr on /dev/null.

    Otherwise the next file that is opened would get the number of a standard descriptor.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


class SignalWake:
    """Makes a file descriptor readable when a signal arrives.

    The interpreter's C-level handler writes to it. So another thread can react to a signal while
    the main thread is in a long call of a C++ library.

    Attributes:
        fd: Readable when a signal has arrived or `poke` was called.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self._signals = signals
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self.handle()

    def handle(self) -> None:
        """Installs the handlers; call it again after a library has replaced them."""
        for number in self._signals:
            # A signal that was ignored from the start, as under nohup, stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    def poke(self) -> None:
        """Makes `fd` readable."""
        with suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def take(self) -> list[signal.Signals]:
        """Returns the signals that have arrived since the last call."""
        with suppress(BlockingIOError):
            return [signal.Signals(byte) for byte in os.read(self.fd, 4096) if byte]
        return []

"""Finding and ending every process below this one (Linux)."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from usbyte.launch.worker import die_with

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.05


def adopt_orphans() -> None:
    """Makes this process the parent of all descendants whose own parent ends.

    A rank's grandchild that has left its session, or whose parent is gone, is then still found
    below this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Some daemons ignore it, which their descendants inherit, and then exit codes are lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def descendants(spare: Collection[int] = ()) -> list[int]:
    """Ids of the running processes below this one, parents before children.

    Args:
        spare: Processes to leave out, with all that is below them.
    """
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with suppress(OSError):  # it has ended meanwhile
            stat = Path("/proc", entry, "stat").read_bytes()
            # The name, in parentheses, may itself hold spaces and parentheses.
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
        grace: Seconds between the two; 0 sends SIGKILL at once.
        hurry: Asked again and again; True ends the grace.
        spare: Processes to leave alone, with all that is below them.

    Returns:
        Processes that even SIGKILL did not end in five seconds: they hang in the kernel.
    """
    if grace > 0:
        _signal(descendants(spare), signal.SIGTERM)
        deadline = time.monotonic() + grace
        while descendants(spare) and time.monotonic() < deadline and not hurry():
            time.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + _KILL_SECONDS
    # Again and again, for a process may fork between being found and being killed.
    while (pids := descendants(spare)) and time.monotonic() < deadline:
        _signal(pids, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return pids


def reap() -> None:
    """Takes the exit codes of children that have ended; nobody else waits for any."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def guard() -> None:
    """Returns in a child of this process, after whose death everything below it is ended.

    For a host without a launcher that would do it. Must be called before any thread is started.
    """
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        die_with(guardian)
        return
    adopt_orphans()

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):  # it has ended, and what it left must still be ended
            os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    while os.wait()[0] != child:
        pass
    end_descendants(0)
    os._exit(0)


def open_standard_descriptors() -> None:
    """Opens those of stdin, stdout and stderr that are closed, or what is opened next gets them."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


class SignalWake:
    """Turns signals into a file descriptor that becomes readable.

    The interpreter's C handler writes to it, so that another thread learns of a signal even while
    the main thread is inside a long call of a C++ library.

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
        """Installs the handlers, again if a library has replaced them."""
        for number in self._signals:
            # One that was ignored from the start (nohup) stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    def poke(self) -> None:
        """Makes `fd` readable."""
        with suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def take(self) -> list[signal.Signals]:
        """The signals that have arrived since the last call."""
        with suppress(BlockingIOError):
            return [signal.Signals(byte) for byte in os.read(self.fd, 4096) if byte]
        return []

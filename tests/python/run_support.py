# SPDX-License-Identifier: Apache-2.0
"""Starts usbyterun as a user does, and finds what it leaves behind."""

import ctypes
import importlib.util
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[2] / "python"
if importlib.util.find_spec("usbyte") is None:
    sys.path.insert(0, str(PACKAGE_ROOT))
    known = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_ROOT), *known])

# A guard against hangs, not a measure: a loaded machine may take long for what takes a second.
PATIENCE_SECONDS = 60
_PR_SET_CHILD_SUBREAPER = 36
_CLEARED = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "USBYTE_TIMELINE")


def has_ipv6() -> bool:
    """Whether this host talks to itself over IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


class Running:
    """A running usbyterun."""

    def __init__(self, arguments: list[str], cwd: Path, env: dict[str, str]) -> None:
        inherited = {name: text for name, text in os.environ.items() if name not in _CLEARED}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "usbyte.launch", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env={**inherited, "PWD": str(cwd), **env},
            preexec_fn=_set_signals,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.out = self.err = ""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.process.stdout, selectors.EVENT_READ)
        self._selector.register(self.process.stderr, selectors.EVENT_READ)

    def expect(self, *texts: str) -> None:
        """Reads until all texts have been printed."""
        while not all(text in self.out + self.err for text in texts):
            assert self._read(), f"ended before {texts}\n{self.out}\n{self.err}"

    def finish(self) -> int:
        """Reads to the end and returns the exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_SECONDS)

    def hang_up(self) -> None:
        """Closes the reading end of stdout."""
        self._selector.unregister(self.process.stdout)
        self.process.stdout.close()

    def children(self) -> list[int]:
        return [pid for pid, parent in parents().items() if parent == self.process.pid]

    def _read(self) -> bool:
        if not self._selector.get_map():
            return False
        ready = self._selector.select(PATIENCE_SECONDS)
        assert ready, f"nothing happens\n{self.out}\n{self.err}"
        for key, _ in ready:
            text = os.read(key.fd, 1 << 16).decode(errors="surrogateescape")
            if not text:
                self._selector.unregister(key.fileobj)
            elif key.fileobj is self.process.stdout:
                self.out += text
            else:
                self.err += text
        return True


class Starter:
    """Starts usbyterun in a directory."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.started: list[Running] = []

    def __call__(self, *arguments: str, **env: str) -> Running:
        self.started.append(Running(list(arguments), self.cwd, env))
        return self.started[-1]


@contextmanager
def starter(cwd: Path) -> Iterator[Starter]:
    """Yields a Starter; afterwards no process of what it started may be left.

    Orphans of the test become children of this process instead of init's, so that also those are
    found that have left their session and their parents.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    earlier = _below_this_process()
    start = Starter(cwd)
    try:
        yield start
        left = _wait_for_none_but(earlier)
    finally:
        for pid in _below_this_process() - earlier:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for running in start.started:
            running.process.wait()
            running.process.stdout.close()
            running.process.stderr.close()
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert not left, f"processes are left: {left}"


def _set_signals() -> None:
    # A test run in the background of a script ignores it, and so would all below.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # As some daemons do; exit codes must not get lost.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def parents() -> dict[int, int]:
    """The parent of every process on this machine that is not a zombie."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):
                stat = Path("/proc", entry, "stat").read_bytes()
                state, parent = stat[stat.rindex(b")") + 1 :].split()[:2]
                if state != b"Z":
                    found[int(entry)] = int(parent)
    return found


def _below_this_process() -> set[int]:
    tree = parents()
    below: set[int] = set()
    while more := {pid for pid, up in tree.items() if up in below | {os.getpid()}} - below:
        below |= more
    return below


def _wait_for_none_but(earlier: set[int]) -> dict[int, str]:
    """The commands of processes that are still there after a while."""
    deadline = time.monotonic() + 20
    while (left := _below_this_process() - earlier) and time.monotonic() < deadline:
        time.sleep(0.05)
    commands = {}
    for pid in left:
        with suppress(OSError):
            words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
            commands[pid] = b" ".join(words).decode(errors="replace")
    return commands

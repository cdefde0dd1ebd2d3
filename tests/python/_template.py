# SPDX-License-Identifier: Apache-2.0
"""Processes that begin with torch and usbyte imported, as copies of one that has done so.

Importing takes a core for three seconds, more than most tests do. Strings hash by chance in each
interpreter, so that what depends on that differs between ranks; three templates keep it so.

Run as a script, this file is such a template.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20  # of a request


class Process:
    """A copy of a template, in a session of its own.

    Attributes:
        pid: Of the process.
        pidfd: Readable once it has ended, until `close`.
        returncode: As of `subprocess.Popen`, once `wait` or `close` has returned.
    """

    def __init__(self, rank: int, call: Any, env: Mapping[str, str], output: Path) -> None:
        """Has `_ranks.main(call)` called.

        Args:
            rank: Of the job; those three apart share a template.
            call: Whatever JSON can carry.
            env: The whole environment.
            output: File for what it prints.
        """
        self._template, _ = _template(rank % 3)
        self.returncode: int | None = None
        stdin, self._stdin = os.pipe()  # closes when this process ends, however it ends
        request = {"call": call, "env": dict(env), "path": sys.path, "cwd": os.getcwd()}
        with output.open("wb") as file:
            self.pid = int(_ask(self._template, request, [stdin, file.fileno()]))
        os.close(stdin)
        self.pidfd = os.pidfd_open(self.pid)

    def wait(self) -> int:
        """Waits for its end; negative numbers are signals that killed it."""
        if self.returncode is None:
            self.returncode = int(_ask(self._template, {"wait": self.pid}))
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.returncode is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Ends it, and what it has started."""
        if self.pidfd < 0:
            return
        if self.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has yet to become the leader of its group
                self.send_signal(signal.SIGKILL)
            self.wait()
        os.close(self._stdin)
        os.close(self.pidfd)
        self.pidfd = -1


def start_template() -> None:
    """Starts the template of rank 0, unless it runs: a process that outlives the test."""
    _template(0)


@functools.cache
def _template(_number: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-u", __file__, str(its.fileno())],
            pass_fds=[its.fileno()],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl+C is for the tests
        )
    return ours, process


def _ask(template: socket.socket, request: Any, fds: list[int] | None = None) -> str:
    socket.send_fds(template, [json.dumps(request).encode()], fds or [])
    answer = template.recv(_MOST_BYTES).decode()
    assert answer, "a template of ranks has ended; what it printed says why"
    return answer


def _serve(requests: socket.socket) -> Any:
    """The template's loop; returns in its copies, with what they are to call."""
    while True:
        text, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, 2)
        if not text:
            sys.exit()
        request = json.loads(text)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            requests.close()
            _become(request, *fds)
            return request["call"]
        for fd in fds:
            os.close(fd)
        requests.send(str(pid).encode())


def _become(request: Mapping[str, Any], stdin: int, output: int) -> None:
    os.setsid()
    for source, target in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(stdin)
    os.close(output)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = request["path"]


def _main() -> None:
    # The second one is what optimizers import when the first of them is made, the last one what
    # files of tests do.
    for name in ("torch", "torch._dynamo", "usbyte.torch", "pytest"):
        importlib.import_module(name)
    from _models import short_probes
    from _ranks import main

    short_probes()
    assert len(os.listdir("/proc/self/task")) == 1, "threads are not copied"
    gc.freeze()  # or each copy, as it ends, goes through all that was imported, for half a second
    start: Callable[[Any], None] = main
    start(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    _main()

# SPDX-License-Identifier: Apache-2.0
"""Runs a function in several fresh processes, as the ranks of one job.

results = run_ranks(3, work, 42, timeout=30)     # work(rank, size, 42) in three processes
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import inspect
import json
import os
import random
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _template import Process

# Once a rank has failed the others may wait for it; this is how long they get to fail too.
_GRACE_S = 5.0
_SLOWNESS = 3.0  # of a loaded machine: timeouts guard against hangs, and measure nothing
_TAIL_CHARS = 12000  # of a rank's output, in a failure's text


def run_ranks(
    n: int,
    target: str | Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    dies: Collection[int] = (),
) -> list[Any]:
    """Calls target(rank, size, *args) in n new processes and returns what they returned.

    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. No process
    outlives the call, nor the death of the caller.

    Args:
        n: Number of ranks.
        target: A function at the top level of a file, or "module:function".
        args: Whatever JSON can carry; so must the results be.
        timeout: Seconds for all ranks together; thrice as long is waited.
        env: More environment variables.
        dies: Ranks that may die or freeze without a result; theirs is None.

    Raises:
        AssertionError: A rank raised, died or was too slow. The text holds every rank's story.
    """
    with tempfile.TemporaryDirectory(prefix="usbyte-ranks-") as folder, _free_port() as port:
        ranks: list[_Rank] = []
        try:
            for r in range(n):
                ranks.append(_Rank(Path(folder), r, n, target, args, port, env or {}))
            _wait(ranks, timeout, dies)
        finally:
            for rank in ranks:
                rank.process.close()
        stories = [story for rank in ranks if (story := rank.story(rank.rank in dies))]
        assert not stories, "\n".join(stories)
        return [rank.result() for rank in ranks]


class _Rank:
    """One process and the files it leaves."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        target: str | Callable[..., Any],
        args: tuple[Any, ...],
        port: int,
        env: Mapping[str, str],
    ) -> None:
        self.rank = rank
        self._answer = folder / f"answer-{rank}.json"
        self._output = folder / f"output-{rank}.txt"
        self._late = False
        spec = [*_locate(target), str(self._answer), rank, size, args]
        base = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # torch asks for the name of every peer that connects to a store; where the answer is
            # lost, that costs 5 s. No rank needs names that are not in files.
            "RES_OPTIONS": "attempts:0",
            # Small enough that of tests' small models some operations do and some do not.
            "USBYTE_ONE_SHOT_BYTES": "2048",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        self.process = Process(rank, spec, os.environ | base | env, self._output)

    def returned(self) -> bool:
        """Whether the process has ended with a result."""
        return self.process.wait() == 0 and self._answer.exists()

    def expire(self) -> None:
        """Lets the process print where its threads are; it is to be killed."""
        self._late = True
        self.process.send_signal(signal.SIGUSR1)

    def story(self, may_die: bool) -> str:
        """What went wrong, or ""."""
        code = self.process.wait()
        died = not self._late and (code < 0 or (code == 0 and may_die))
        if self.returned() or (died and may_die):
            return ""
        if self._late:
            ending = "had not ended"
        elif died:
            ending = f"was killed by {signal.Signals(-code).name}"
        else:
            ending = "failed"
        output = self._output.read_text(errors="replace")[-_TAIL_CHARS:]
        return f"--- rank {self.rank} {ending}:\n{output}"

    def result(self) -> Any:
        """What the target returned."""
        return json.loads(self._answer.read_text()) if self._answer.exists() else None


def _wait(ranks: list[_Rank], timeout: float, dies: Collection[int]) -> None:
    running = {rank.process.pidfd: rank for rank in ranks}
    poller = select.poll()
    for pidfd in running:
        poller.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + _SLOWNESS * timeout
    while any(rank.rank not in dies for rank in running.values()):
        ended = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ended:
            break
        for pidfd, _ in ended:
            poller.unregister(pidfd)
            rank = running.pop(pidfd)
            if not rank.returned() and rank.rank not in dies:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    late = [rank for rank in running.values() if rank.rank not in dies]
    for rank in late:
        rank.expire()
    if late:
        time.sleep(0.5)  # to print in


def _locate(target: str | Callable[..., Any]) -> tuple[str, str]:
    """File and function name."""
    if isinstance(target, str):
        module, _, function = target.partition(":")
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"no module '{module}'"
        assert spec.origin is not None, f"module '{module}' is not a file"
        return spec.origin, function
    assert "." not in target.__qualname__, f"{target.__qualname__} is not at its file's top level"
    return inspect.getfile(target), target.__name__


@contextmanager
def _free_port() -> Iterator[int]:
    """A port that nobody listens on, outside the range from which connections get theirs.

    Inside, no other caller on this host gets it.
    """
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0usbyte-tests-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            probe.close()
            yield port
            return


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock the interpreter wants at its end
    os._exit(3)


def main(call: list[Any]) -> None:
    """What the process of a rank does."""
    file, function, answer, rank, size, args = call
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Shells start what runs in the background with it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    own = os.getpid()
    try:
        result = getattr(module, function)(rank, size, *args)
    except BaseException:
        if os.getpid() != own:  # one that the test has forked
            raise
        traceback.print_exc()
        sys.stderr.flush()
        # Peers would otherwise wait in torch's exit handlers, and so would this rank for them.
        os._exit(1)
    Path(answer).write_text(json.dumps(result))
    chosen = zlib.crc32(function.encode()) % 8 == 0 or not Path(file).name.startswith("test_")
    if rank > 0 or not chosen:
        _end_without_clearing_up()


def _end_without_clearing_up() -> None:
    # All that was imported is taken apart otherwise, which copies most of the template's memory, a
    # third of a second. After faults and soaks, and of one other function in eight, a rank does so,
    # as users' processes do.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

# SPDX-License-Identifier: Apache-2.0
"""How every rank ends when one of them fails. Real processes without a launcher, short limits.

What they report of each fault, and what is left of the parameters, is in test_reliability.py.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from _ranks import run_ranks

_SCRIPT = """
import os, signal, sys, time
import torch
import usbyte.torch as ub

what, overlap, kind = sys.argv[1:]
sys.path.insert(0, TESTS)
from _models import short_probes
short_probes()
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
ub.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
inputs = torch.ones(8, 64)
if kind == "sparse":
    model[0] = torch.nn.Embedding(64, 64, sparse=True)
    inputs = torch.arange(8)
opt = ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                              overlap=overlap)

def die(grad):
    os.kill(os.getpid(), signal.SIGKILL)

print("started", flush=True)
for step in range(1000000):
    if ub.rank() == 1 and step == 6:
        if what == "last":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "kill":
            model[0].weight.register_hook(die)  # in the middle of backward
        elif what == "sleep":
            time.sleep(1000)
        elif what == "raise":
            raise ZeroDivisionError("a bug in the user's code")
    if what == "leave" and (ub.rank(), step) == (1, 5):
        time.sleep(1000)
    if what in ("last", "leave") and step == 6:
        print("leaves", flush=True)
        break  # the update of step 5 is pending, and rank 1 is gone or elsewhere
    opt.zero_grad()
    model(inputs).sum().mul(1e-9).backward()
    opt.step()
    if what != "last":
        time.sleep(0.01)
"""
SCRIPT = _SCRIPT.replace("TESTS", repr(str(Path(__file__).parent)))


PARAMETER = re.compile(r"\b[01]\.(weight|bias)\b|usbyte\.used")


class Job:
    """Ranks started by hand, without a launcher that would end the others."""

    def __init__(
        self, tmp_path: Path, what: str, overlap: str, size: int = 3, kind: str = "dense"
    ) -> None:
        script = tmp_path / "job.py"
        script.write_text(SCRIPT)
        # Short only where the limit is what ends the job: ranks of a busy machine are slow too.
        limit_s = {"sleep": 8, "leave": 60}.get(what, 20)
        env = {
            **os.environ,
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "USBYTE_STALL_WARNING_S": "1.5",
            "USBYTE_STALL_LIMIT_S": str(limit_s),
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(script), what, overlap, kind],
                env={**env, "RANK": str(r)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for r in range(size)
        ]

    def finish(self, seconds: float, ignore: tuple[int, ...] = ()) -> list[tuple[int, str]]:
        """Exit code and stderr of each rank; kills what is left at the end."""
        deadline = time.monotonic() + seconds
        try:
            return [
                (-99, "") if r in ignore else self._end(p, deadline)
                for r, p in enumerate(self.ranks)
            ]
        finally:
            for p in self.ranks:
                p.kill()
                p.communicate()

    @staticmethod
    def _end(process: subprocess.Popen[str], deadline: float) -> tuple[int, str]:
        _, err = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        return process.returncode, err


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def last_line(text: str) -> str:
    # torch prefixes the lines of an uncaught exception with the rank.
    bare = [line.split("]: ", 1)[-1] for line in text.splitlines()]
    lines = [line for line in bare if line.startswith("usbyte.errors")]
    assert len(lines) == 1, text  # one clear error
    return lines[0]


def test_a_killed_rank_is_named_by_all_others(tmp_path):
    ends = Job(tmp_path, "kill", "forward").finish(60)
    assert ends[1][0] == -signal.SIGKILL
    for code, err in (ends[0], ends[2]):
        line = last_line(err)
        assert code == 1
        assert "FaultError: rank 1 (host " in line
        assert "does not answer" in line
        assert re.search(r"op \d+ \((all_reduce|reduce_scatter|all_gather), ", line)
        assert PARAMETER.search(line)


@pytest.mark.parametrize("what", ["kill", "sleep"])
def test_ranks_that_wait_for_rows_are_told(tmp_path, what):
    ends = Job(tmp_path, what, "forward", kind="sparse").finish(60, ignore=(1,))
    told = "does not answer" if what == "kill" else "rank 1 has not begun backward of step 7"
    for code, err in (ends[0], ends[2]):
        assert code == 1
        assert told in last_line(err)


def test_a_rank_that_never_calls_backward_is_named(tmp_path):
    ends = Job(tmp_path, "sleep", "backward").finish(60, ignore=(1,))
    for code, err in (ends[0], ends[2]):
        line = last_line(err)
        assert code == 1
        assert "rank 1 has not begun backward of step 7" in line
        assert "stall limit" in line
        assert PARAMETER.search(line)
    errors = "".join(err for _, err in ends)
    assert re.search(
        r"a rank may be slow, stuck or lost: rank 1 has not begun backward of step 7", errors
    )
    assert errors.count("the last operations of each rank:") == 1
    assert re.search(r"rank 1: step 6, \w+, (\d+) of \1 done", errors)
    assert re.search(r"  step 7 op \d+ .*: launched [\d.]+ s ago, not completed", errors)


def test_an_exception_on_one_rank_reaches_all(tmp_path):
    ends = Job(tmp_path, "raise", "forward").finish(60)
    assert "ZeroDivisionError: a bug" in ends[1][1].splitlines()[-1]
    for code, err in ends:
        assert code == 1
        assert "a bug in the user's code" in err
    for _, err in (ends[0], ends[2]):
        assert "rank 1 ended with ZeroDivisionError" in last_line(err)


def test_losing_a_peer_before_the_last_update_fails_at_exit(tmp_path):
    ends = Job(tmp_path, "last", "forward").finish(60)
    assert ends[1][0] == -signal.SIGKILL
    for code, err in (ends[0], ends[2]):
        # The update may have arrived before the peer died; if not, the exit code must say so.
        assert code == (1 if "FaultError" in err else 0), err


def test_ctrl_c_interrupts_a_waiting_rank(tmp_path):
    job = Job(tmp_path, "sleep", "forward")
    for p in job.ranks:
        assert p.stdout is not None
        assert p.stdout.readline() == "started\n"
    time.sleep(1.5)  # steps 0-6; the others now wait for rank 1
    for p in job.ranks:
        p.send_signal(signal.SIGINT)
    for code, err in job.finish(30):
        assert code != 0
        assert "KeyboardInterrupt" in err or "FaultError" in err


def test_ctrl_c_interrupts_a_rank_that_waits_at_exit(tmp_path):
    job = Job(tmp_path, "leave", "forward", size=2)
    leaving = job.ranks[0]
    assert leaving.stdout is not None
    while leaving.stdout.readline() != "leaves\n":
        assert leaving.poll() is None
    time.sleep(4)
    leaving.send_signal(signal.SIGINT)
    code, err = job.finish(45, ignore=(1,))[0]  # well before the stall limit
    assert code == 1  # the last update is lost
    assert "KeyboardInterrupt" in err


@pytest.mark.parametrize("what", ["kill", "sleep", "raise"])
def test_under_the_launcher_nothing_is_left(tmp_path, what):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "USBYTE_STALL_LIMIT_S": "3", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "usbyte.launch", "-np", "3"]
    worker = [sys.executable, str(script), what, "forward", "dense"]
    run = subprocess.run(launcher + worker, env=env, capture_output=True, text=True, timeout=90)
    assert run.returncode != 0
    assert "rank 1" in run.stdout + run.stderr
    left = [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])]
    assert not left


def survives(rank: int, size: int, faults: int) -> list[tuple[int, int]]:
    """How many threads and descriptors the process has after each fault and shutdown."""
    import torch

    import usbyte.torch as ub
    from usbyte.errors import FaultError

    counts = []
    for _ in range(faults):
        ub.init()
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 3)
        optimizer = ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        loss = model(torch.ones(2, 6)).sum()
        waits = partial(ub.allreduce, torch.ones(3), name="odd") if rank == 1 else loss.backward
        with pytest.raises(FaultError):
            waits()
        ub.shutdown()
        process = psutil.Process()
        counts.append((process.num_threads(), process.num_fds()))
    return counts


def test_faults_that_are_survived_leave_no_threads_and_few_descriptors():
    for rank, counts in enumerate(run_ranks(2, survives, 4, env={"USBYTE_STALL_LIMIT_S": "2"})):
        more_threads, more_files = (b - a for a, b in zip(counts[0], counts[-1], strict=True))
        assert more_threads < 4, counts
        # Rank 0 serves the store that all others are connected to.
        assert rank == 0 or more_files < 5 * 3, counts

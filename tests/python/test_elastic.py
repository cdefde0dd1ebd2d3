# SPDX-License-Identifier: Apache-2.0
"""Ranks and hosts that are lost under --max-restarts, and training that goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from run_support import PATIENCE_SECONDS, Starter, parents, starter

ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "usbyterun": ["-m", "usbyte.launch", "-np", "2", "--max-restarts", "3", sys.executable],
    "torchrun": [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "3"),
    ],
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    with starter(tmp_path) as start:
        yield start


def test_ranks_start_anew_until_none_fails(start: Starter) -> None:
    script = (
        'echo "$MASTER_PORT attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS"; '
        "[ $RANK != 1 ] || [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 7"
    )
    options = ["-np", "2", "--max-restarts", "5", "--output-filename", "out"]
    running = start(*options, "bash", "-c", script)
    assert running.finish() == 0, running.err
    assert running.err.splitlines() == [
        f"usbyterun: rank 1 on host localhost exited with code 7; restart {n} of 5" for n in (1, 2)
    ]
    lines = (start.cwd / "out" / "rank.1" / "stdout").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [f"attempt {n} of 5" for n in range(3)]


def test_restarts_come_to_an_end(start: Starter) -> None:
    running = start("-np", "2", "--max-restarts", "2", "bash", "-c", "echo up; kill -9 $$")
    assert running.finish() == 128 + signal.SIGKILL
    assert running.out.count("up") >= 3
    assert running.err.splitlines()[-1].endswith("(SIGKILL) (after 2 of 2 restarts)")


def test_who_ends_a_job_gets_no_restart(start: Starter) -> None:
    running = start("-np", "2", "--max-restarts", "3", "bash", "-c", "echo up; sleep 600")
    running.expect("[0] up", "[1] up")
    running.process.send_signal(signal.SIGTERM)
    assert running.finish() == 128 + signal.SIGTERM
    assert running.err == "usbyterun: ended by SIGTERM\n"


def test_who_ends_a_job_while_it_ends_gets_no_restart(start: Starter) -> None:
    script = (
        "if [ $RANK = 0 ]; then until [ -e trapped ]; do sleep 0.1; done; exit 5; fi; "
        "trap 'echo asked' TERM; touch trapped; while :; do sleep 0.1; done"
    )
    running = start("-np", "2", "--max-restarts", "3", "bash", "-c", script)
    running.expect("[1] asked")
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 5
    assert "restart" not in running.err


def test_a_job_that_cannot_start_is_not_tried_again(start: Starter) -> None:
    running = start("-np", "1", "--max-restarts", "3", "--network-interface", "none7", "true")
    assert running.finish() == 1
    assert "no network interface 'none7'" in running.err
    assert "restart" not in running.err


def ranks_below(launcher: int) -> dict[int, int]:
    """The process id of each rank that runs digits.py below a process."""
    tree = parents()
    found = {}
    for pid in tree:
        above = pid
        while above in tree and above != launcher:
            above = tree[above]
        with suppress(OSError):
            words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
            texts = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
            variables = dict(text.partition(b"=")[::2] for text in texts)
            if above == launcher and any(word.endswith(b"digits.py") for word in words[:3]):
                found[int(variables.get(b"RANK", b"-1"))] = pid
    return found


def trained(
    tmp_path: Path, launcher: str, *options: str, draw: random.Random | None, first: int = 1
) -> str:
    """The digest of the parameters in the end; `draw` kills some rank at some time.

    Training begins in the epoch `first`.
    """
    checkpoint = tmp_path / "digits.pt"
    before = checkpoint.read_bytes() if checkpoint.exists() else None
    for _ in range(5):
        digest = trained_once(tmp_path, launcher, *options, draw=draw, first=first)
        if digest is not None:
            return digest
        checkpoint.unlink()
        if before is not None:
            checkpoint.write_bytes(before)
    pytest.fail("this process is always late")


def trained_once(
    tmp_path: Path, launcher: str, *options: str, draw: random.Random | None, first: int
) -> str | None:
    """The same; None if this process was so slow that nobody was left to kill."""
    result = tmp_path / "result.json"
    command = [sys.executable, *LAUNCHERS[launcher], str(ROOT / "examples" / "digits.py")]
    command += ["--epochs", "6", "--policy", "wfbp", *options, "--json", str(result)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    guard = threading.Timer(4 * PATIENCE_SECONDS, process.kill)
    guard.start()
    after = draw.randrange(first + 1, 5) if draw else None
    text, late = "", False
    for line in process.stdout:
        text += line
        if after is not None and f"epoch {after:2d} " in line:
            time.sleep(draw.uniform(0, 0.2))
            try:
                os.kill(ranks_below(process.pid)[draw.randrange(2)], signal.SIGKILL)
            except (KeyError, ProcessLookupError):
                late = True
            after = None
    code = process.wait()
    guard.cancel()
    assert code == 0, text
    assert after is None, text
    assert text.count(f"epoch {first:2d} ") == 1, f"training began anew\n{text}"
    if late:
        return None
    return json.loads(result.read_text())["parameters_sha256"]


def test_killed_training_ends_as_training_that_was_not(tmp_path: Path) -> None:
    whole = trained(tmp_path, "usbyterun", draw=None)
    saved = ["--checkpoint", str(tmp_path / "digits.pt"), "--resume"]
    killed = trained(tmp_path, "torchrun", *saved, draw=random.Random(0))
    assert killed == whole
    (tmp_path / "digits.pt").unlink()
    trained(tmp_path, "usbyterun", *saved, "--steps", "29", draw=None)  # inside the second epoch
    killed = trained(tmp_path, "usbyterun", *saved, draw=random.Random(1), first=2)
    assert killed == whole
    assert not list(tmp_path.glob("*.part"))

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
from pathlib import Path

import pytest

from run_support import PATIENCE_SECONDS, Starter, starter

ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "usbyterun": ["-m", "usbyte.run", "-np", "2", "--max-restarts", "3", sys.executable],
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
    script = "[ $RANK = 0 ] && sleep 1 && exit 5; trap 'echo asked' TERM; while :; do sleep 1; done"
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


class Killer(threading.Thread):
    """Kills one of the ranks at some time after an epoch has been told."""

    def __init__(self, draw: random.Random, epochs: int) -> None:
        super().__init__(daemon=True)
        self.after = draw.randrange(2, epochs - 2)
        self.rank = draw.randrange(2)
        self.delay = draw.uniform(0, 0.2)
        self.due = threading.Event()

    def run(self) -> None:
        assert self.due.wait(PATIENCE_SECONDS)
        time.sleep(self.delay)
        os.kill(self._victim(), signal.SIGKILL)

    def _victim(self) -> int:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"RANK={self.rank}".encode() in variables and any(
                word.endswith(b"digits.py") for word in words[:3]
            ):
                return int(entry.name)
        raise AssertionError("no rank to kill")


def trained(tmp_path: Path, name: str, launcher: str, *options: str, killers: list[Killer]) -> str:
    """The digest of the parameters in the end."""
    result = tmp_path / f"{name}.json"
    command = [sys.executable, *LAUNCHERS[launcher], str(ROOT / "examples" / "digits.py")]
    command += ["--epochs", "12", "--policy", "wfbp", *options, "--json", str(result)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    guard = threading.Timer(4 * PATIENCE_SECONDS, process.kill)
    guard.start()
    text = ""
    waiting = list(killers)
    for killer in killers:
        killer.start()
    for line in process.stdout:
        text += line
        if waiting and f"epoch {waiting[0].after:2d} " in line:
            waiting.pop(0).due.set()
    code = process.wait()
    guard.cancel()
    assert code == 0, text
    assert not waiting, text
    return json.loads(result.read_text())["parameters_sha256"]


def test_killed_training_ends_as_training_that_was_not(tmp_path: Path) -> None:
    whole = trained(tmp_path, "whole", "usbyterun", killers=[])
    for seed, launcher in enumerate(LAUNCHERS):
        killer = Killer(random.Random(seed), epochs=12)
        saved = ["--checkpoint", str(tmp_path / launcher), "--resume"]
        assert trained(tmp_path, "killed", launcher, *saved, killers=[killer]) == whole, launcher
    assert not list(tmp_path.glob("*.part"))

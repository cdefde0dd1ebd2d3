# SPDX-License-Identifier: Apache-2.0
"""Jobs whose ranks have more connections than a shell allows at first."""

from __future__ import annotations

import resource
import subprocess
import sys

from usbyte._util.fd_limit import allow_open_files

TRAINS = """
import torch
import usbyte.torch as ub

ub.init()
print("sum", ub.allreduce(torch.ones(1), op=ub.Sum).item())
"""
LIMITED = """
import resource
from usbyte._util.fd_limit import allow_open_files

resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(repr(allow_open_files({ranks})), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limited(soft: int, hard: int, ranks: int) -> list[str]:
    """What is printed where limits are so."""
    code = LIMITED.format(soft=soft, hard=hard, ranks=ranks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.rsplit(maxsplit=2)


def test_a_low_soft_limit_does_not_keep_ranks_from_meeting() -> None:
    job = [sys.executable, "-m", "usbyte.launch", "-np", "4", sys.executable, "-c", TRAINS]
    shell = ["bash", "-c", 'ulimit -Sn 32 && exec "$@"', "bash", *job]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 4.0") == 4


def test_no_more_is_asked_for_than_the_job_may_need() -> None:
    assert limited(64, 8192, 4) == ["''", "1152", "8192"]
    assert limited(4096, 8192, 4) == ["''", "4096", "8192"]


def test_a_hard_limit_that_is_too_low_is_told() -> None:
    text, *limits = limited(64, 2048, 1000)
    assert limits == ["2048", "2048"]
    assert "may open 2048 files and connections here, and in a job of 1000 ranks" in text
    assert "as with ulimit -n" in text


def test_a_launcher_that_cannot_start_ranks_does_not_ask_whether_python_is_installed() -> None:
    shell = [
        "bash",
        "-c",
        'ulimit -n 10 && exec "$@"',
        "bash",
        sys.executable,
        "-m",
        "usbyte.launch",
    ]
    done = subprocess.run(
        [*shell, "-np", "2", "true"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "raise the limit before it starts, as with ulimit -n" in done.stderr
    assert f"cannot run {sys.executable}: Too many open files\n" in done.stderr


def test_a_system_that_refuses_to_raise_the_limit_does_not_end_the_job(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 8192))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert allow_open_files(2) == ""
    assert "may open 64 files and connections here" in allow_open_files(4)

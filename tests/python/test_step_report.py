# SPDX-License-Identifier: Apache-2.0
"""USBYTE_REPORT: rank 0 of a real job writes the page of a step by itself."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from run_support import Starter, starter
from usbyte.errors import EnvError, FaultError

SCRIPT = """
import os, sys
import torch
from torch import nn
import usbyte.torch as ub

ub.init()
os.chdir("elsewhere")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
optimizer = ub.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), policy="ddp",
    overlap="backward",
)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().mul(1e-6).backward()
    optimizer.step()
print(os.path.exists("../report.html"), flush=True)
"""

#: Steps until the plan is final. The first step under it is left out.
LEARNING = 2


@pytest.fixture
def start(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "temporary").mkdir()
    with starter(tmp_path) as start:
        yield start


def job(start: Starter, steps: int, ranks: int = 2, **env: str):
    """Runs SCRIPT; returns what it printed, the log and the page or None."""
    running = start(
        "-np", str(ranks), sys.executable, "-c", SCRIPT, str(steps),
        USBYTE_REPORT="report.html", USBYTE_LEARNING_STEPS=str(LEARNING), OMP_NUM_THREADS="1",
        TMPDIR=str(start.cwd / "temporary"), **env,
    )  # fmt: skip
    assert running.finish() == 0, running.err
    assert not list((start.cwd / "temporary").glob("usbyte-report-*"))
    page = start.cwd / "report.html"
    return running.out, running.err, page.read_text() if page.exists() else None


def milliseconds(page, key):
    [text] = re.findall(rf'<dd id="{key}"[^>]*>([\d.]+) ms</dd>', page)
    return float(text)


def shown_step(page):
    [number] = re.findall(r"The measured step is step (\d+)", page)
    return int(number)


def test_the_page_is_there_before_training_ends(start):
    env = {"USBYTE_TIMELINE": "trace.json", "USBYTE_LOG_LEVEL": "info"}
    steps = LEARNING + 15
    out, err, page = job(start, steps, **env)
    assert "[0] True" in out
    assert page is not None
    assert f"wrote '{start.cwd}/report.html'" in err
    assert LEARNING + 2 <= shown_step(page) <= LEARNING + 11
    for key in ("step", "measured", "ddp"):
        assert milliseconds(page, key) > 0
    measured = page.partition('class="lane compute measured"')[2].partition("</g>")[0]
    assert re.findall(r'<rect class="bar (\w+)"', measured) == ["forward", "backward"]
    # The timeline that the script wants is another one, and has every step.
    events = json.loads((start.cwd / "trace.json").read_text())
    for kind in ("communication", "compute"):
        found = {e["args"]["step"] for e in events if e.get("cat") == kind}
        assert found == set(range(1, steps + 1))


def test_the_last_step_writes_the_page_of_a_short_run(start):
    out, _, page = job(start, LEARNING + 4)
    assert "True" not in out
    assert page is not None
    assert LEARNING + 2 <= shown_step(page) <= LEARNING + 4


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (LEARNING - 1, ["no plan was final when training ended", "train for more steps"]),
        (LEARNING + 1, ["the plan was final too late", f"train for {LEARNING + 11} steps or more"]),
    ],
)
def test_too_few_steps(start, steps, words):
    _, err, page = job(start, steps)
    assert page is None
    [line] = [line for line in err.splitlines() if "USBYTE_REPORT" in line]
    assert line.startswith("[0] ")
    assert all(word in line for word in words), line


def test_a_single_rank_sends_nothing(start):
    _, err, page = job(start, LEARNING + 15, ranks=1)
    assert page is None
    assert "a single rank sends nothing: start two or more" in err


def loses_its_folder(rank, size, folder):
    logged = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("usbyte").addHandler(handler)
    ub.init()
    if rank == 0:
        Path(folder, "pages").rmdir()
    model = nn.Linear(8, 8)
    optimizer = ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy="ddp")
    for _ in range(LEARNING + 15):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    ub.shutdown()
    assert optimizer.settled
    return [text for text in logged if "USBYTE_REPORT" in text]


def test_a_page_that_cannot_be_written_ends_no_training(tmp_path):
    (tmp_path / "pages").mkdir()
    env = {
        "USBYTE_REPORT": f"{tmp_path}/pages/report.html",
        "USBYTE_LEARNING_STEPS": str(LEARNING),
    }
    [text], nothing = run_ranks(2, loses_its_folder, str(tmp_path), env=env)
    assert "pages/report.html' could not be written: " in text
    assert "Free space, or name another" in text
    assert nothing == []


def cannot_write(rank, size, folder):
    os.environ["USBYTE_REPORT"] = folder
    if rank == 0:
        with pytest.raises(EnvError, match=r'USBYTE_REPORT=".*" cannot be used: '):
            ub.init()
        assert not ub.is_initialized()
    else:  # it writes no page, and hears of rank 0's error
        ub.init()
        with pytest.raises(FaultError, match=r"rank 0 .* USBYTE_REPORT"):
            ub.allreduce(torch.ones(2))


@pytest.mark.parametrize("place", ["", "none/report.html"])
def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path, place):
    run_ranks(2, cannot_write, str(tmp_path / place), timeout=60)

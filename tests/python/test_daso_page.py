# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/daso.py` on two ranks that are two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import usbyte

pytestmark = pytest.mark.evidence

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "daso.py"


def daso(*options, nodes):
    command = [sys.executable, "-m", "usbyte.launch", "-np", "2"]
    command += ["env", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1"] if nodes == 2 else []
    known = [str(Path(usbyte.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, known))}
    env |= {"OMP_NUM_THREADS": "1"}
    command += [sys.executable, str(SCRIPT), *map(str, options)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_the_page_has_all_variants(tmp_path):
    path = tmp_path / "daso.md"
    options = ["--quick", "--jobs", "digits", "--network", "two cans", "-o", path]
    done = daso(*options, nodes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text()
    assert "2 nodes of 1 ranks (two cans) on one machine" in text
    measured = text.partition("## Measured")[2]
    rows = [line.split(" | ") for line in measured.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == [
        "| synchronous", *(f"| DASO, B = {b}, S = {s}" for b, s in [(8, 2), (4, 1), (1, 1)])
    ]  # fmt: skip
    assert {len(row) for row in rows} == {7}


def test_one_node_has_nothing_to_show():
    done = daso("--quick", nodes=1)
    assert done.returncode != 0
    assert "DASO is about several nodes" in done.stderr + done.stdout

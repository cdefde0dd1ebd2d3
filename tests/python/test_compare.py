# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/compare.py` on two ranks: it runs, checks values, and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click.testing
import pytest

import usbyte
from usbyte import _core
from usbyte.cli import main
from usbyte.planning.layout import tensor_specs

pytestmark = pytest.mark.evidence

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare.py"


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    tensors = tensor_specs((f"layer{i}.weight", 1000 + i, "float32") for i in range(4))
    need, ready = [0.0, 0.001, 0.002, 0.003], [0.016, 0.013, 0.01, 0.007]
    path.write_text(_core.Profile(tensors, need, ready, model="tiny").to_json())
    return path


def compare(*options, code=None):
    program = [str(SCRIPT)] if code is None else ["-c", code]
    command = [
        sys.executable,
        "-m",
        "usbyte.launch",
        "-np",
        "2",
        sys.executable,
        *program,
        *options,
    ]
    known = [str(Path(usbyte.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, known))}
    env |= {"OMP_NUM_THREADS": "1", "USBYTE_LEARNING_STEPS": "3"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_all_contenders(profile, tmp_path):
    result, table = tmp_path / "result.json", tmp_path / "table.md"
    saved = tmp_path / "saved"
    done = compare(
        "--profile", str(profile), "--rounds", "1", "--steps", "4", "--warmup", "5", "--ring",
        "2,1ms,1gbit", "--policies", "auto,auto:wfbp,backward:ddp,sharded:auto",
        "--json", str(result), "--markdown", str(table), "--save", str(saved),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backward() waits for all gradients" not in done.stderr
    found = json.loads(result.read_text())
    policies = {"forward:auto", "auto:wfbp", "backward:ddp", "sharded:auto"}
    ran = {"alone", "ddp:5", "ddp:25", "ddp:100", *policies}
    others = {"fsdp", "horovod"}
    assert ran <= set(found["results"]) <= ran | others
    assert set(found["results"]) | set(found["skipped"]) == ran | others
    assert found["ranks"] == 2
    assert found["bytes"] == 4 * (4000 + 6)
    assert found["network"]["ranks"] == 2
    assert found["bytes_bound_s"] >= found["compute_s"] == pytest.approx(0.016)
    assert found["best_ddp"].startswith("ddp:")
    for name, result in found["results"].items():
        assert len(result["step_s"]) == 4
        assert (result["predicted_s"] is not None) == (name in policies)
        assert min(result["step_s"]) >= found["compute_s"]
        assert min(result["step_s"]) <= result["median_s"] <= max(result["step_s"])
    lines = table.read_text().splitlines()
    assert "tiny on 2 ranks" in lines[0]
    assert "bound" in lines[0]
    assert sum(line.startswith("| PyTorch DDP") for line in lines) == 1
    assert "1.00x" in next(line for line in lines if line.startswith("| PyTorch DDP"))
    assert "auto:wfbp" in done.stdout
    # What it has saved is what a report is made of.
    page = tmp_path / "report.html"
    kinds = ("plan", "profile", "network", "trace")
    plan, job, network, trace = (str(saved / f"auto-wfbp.{kind}.json") for kind in kinds)
    options = ["--network", network, "--trace", trace, "-o", str(page)]
    arguments = ["report", plan, job, *options]
    report = click.testing.CliRunner().invoke(main, arguments)
    assert report.exit_code == 0, report.output
    assert 'id="measured"' in page.read_text()


def test_wrong_values_are_an_error(profile):
    # A rank whose gradients are not what they should be.
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import compare, _contenders
from usbyte.lab.replay import Replay
_contenders.Replay = lambda profile, value: Replay(profile, value + (value == 2.0))
compare.main()
"""
    done = compare(
        "--profile", str(profile), "--policies", "wfbp", "--others", "", "--ddp-buckets", "",
        "--rounds", "1", "--steps", "1", "--warmup", "4", code=code,
    )  # fmt: skip
    assert done.returncode == 1
    assert "4 of 4 tensors hold wrong values, layer0.weight is the first" in done.stderr


def test_bad_options():
    done = compare("--policies", "magic")
    assert done.returncode == 2
    assert "unknown policy 'magic'" in done.stderr

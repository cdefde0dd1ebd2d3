# SPDX-License-Identifier: Apache-2.0
"""The benchmarks for a GPU, tried on CPUs; the shapes of the models they train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import usbyte

pytestmark = pytest.mark.evidence

FOLDER = Path(__file__).parents[2] / "benchmarks"

# In a process of its own: there is another `_models` beside this file.
_SHAPES = """
import json, torch
from _gpu_models import GPU_JOBS
found = {}
for name, job in GPU_JOBS.items():
    with torch.device("meta"):
        model = job.model()
        sample = torch.zeros(job.batch, 3, 224, 224)
        if job.tokens:
            sample = torch.zeros(job.batch, job.tokens, dtype=torch.int64)
        logits = model(sample)
    numbers = [p.numel() for p in model.parameters()]
    found[name] = [sum(numbers), len(numbers), job.batch, job.tokens, list(logits.shape)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def shapes():
    """By model: parameters, tensors, batch, tokens, shape of the logits."""
    env = {**os.environ, "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-c", _SHAPES]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run(script, results, *options):
    known = [str(Path(usbyte.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, known))}
    env |= {"OMP_NUM_THREADS": "1", "USBYTE_LEARNING_STEPS": "3"}
    command = [sys.executable, str(FOLDER / script), "--device", "cpu", "--models", "tiny"]
    done = subprocess.run([*command, "--json", str(results), *options], env=env,
                          capture_output=True, text=True, timeout=150)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(results.read_text())


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    # As published: 25.6, 109.5 (with the head for masked words, without the pooler) and 124.4 M.
    [("resnet50", 25_557_032, 161), ("bert-base", 109_514_298, 202), ("gpt2", 124_439_808, 148)],
)
def test_models_have_the_published_shapes(name, parameters, tensors, shapes):
    assert shapes[name][:2] == [parameters, tensors]


def test_models_map_their_samples_to_logits(shapes):
    for name, (*_, batch, tokens, logits) in shapes.items():
        vocabulary = {"bert-base": 30522, "gpt2": 50257}.get(name, 1000)
        assert logits == ([batch, vocabulary, tokens] if tokens else [batch, 1000]), name


def test_training_against_ddp(tmp_path):
    found = run(
        "gpu_training.py", tmp_path / "results.json", "--rates", "", "--rounds", "2",
        "--steps", "6", "--contenders", "alone,ddp:25,forward:auto", "--tune-steps", "2",
    )  # fmt: skip
    assert (found["ranks"], found["backend"], found["skipped"]) == (2, "gloo", {})
    rows = {row["contender"]: row for row in found["rows"]}
    assert list(rows) == ["alone", "ddp:25", "forward:auto"]
    for row in rows.values():
        assert row["network"] == "loopback, unshaped"
        assert 0 < row["least_s"] <= row["median_s"] <= row["most_s"]
        assert row["turns"] == 2
    assert rows["ddp:25"]["against_ddp"] == 1.0
    assert rows["forward:auto"]["bound_s"] > 0
    details = found["details"]["tiny, loopback, unshaped"]
    assert details["wrong"] == []
    assert details["measured_network"]["ranks"] == 2


def test_training_tells_what_it_left_out(tmp_path):
    found = run(
        "gpu_training.py", tmp_path / "results.json", "--rates", "", "--budget", "12",
        "--contenders", "ddp:25",
    )  # fmt: skip
    assert found["rows"] == []
    assert "time was over" in found["skipped"]["tiny, loopback, unshaped"]


def test_overhead(tmp_path):
    found = run("gpu_overhead.py", tmp_path / "results.json", "--turns", "3", "--steps", "3")
    [single] = found["single rank"]
    assert single["overhead"] == pytest.approx(single["wrapped_s"] / single["bare_s"] - 1)
    wfbp, ddp = found["two ranks"]
    assert (wfbp["policy"], ddp["policy"]) == ("wfbp", "ddp")
    assert wfbp["blocks"] >= wfbp["gradients"] > ddp["blocks"] >= 1
    assert len(found["targets"]) == 3
    assert all(set(t) == {"what", "measured", "wanted", "met"} for t in found["targets"])


def test_tests_of_the_gpu_run_on_a_cpu():
    folder = FOLDER.parent / "tests" / "gpu"
    chosen = [
        "test_ranks_equal_ddp.py::test_two_ranks_bit_for_bit",
        "test_streams.py::test_delays_change_nothing[sharded]",
    ]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
    command += ["--device", "cpu", *(f"{folder}/{name}" for name in chosen)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout

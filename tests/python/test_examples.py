# SPDX-License-Identifier: Apache-2.0
"""The examples on their real data, as a user starts them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
common = importlib.import_module("_common")
FEW_WORDS = ["--batch-size", "512", "--width", "16", "--text-bytes", "1000000"]
NODE = ["env", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1"]  # each worker alone on its host
SMALL_GPT = ["--layers", "2", "--width", "64", "--context", "64", "--text-bytes", "100000"]


def start(tmp_path, launcher, workers, script, *options):
    """Runs an example and returns what it wrote with --json."""
    result = tmp_path / "result.json"
    program = [str(ROOT / "examples" / script), *options, "--json", str(result)]
    command = {
        "plain": [sys.executable, *program],
        "usbyterun": [sys.executable, "-m", "usbyte.launch", "-np", str(workers), sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
        "nodes": [
            sys.executable,
            "-m",
            "usbyte.launch",
            "-np",
            str(workers),
            *NODE,
            sys.executable,
        ],
    }[launcher]
    if launcher in ("usbyterun", "nodes"):
        command += program
    elif launcher == "torchrun":
        command += ["--nproc-per-node", str(workers), *program]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(result.read_text())


def test_digits_reaches_97_percent_with_two_workers(tmp_path):
    result = start(tmp_path, "usbyterun", 2, "digits.py", "--overlap", "forward")
    assert result["world_size"] == 2
    assert result["history"][-1]["test_accuracy"] >= 0.97


def test_a_checkpoint_that_was_cut_short_is_named(tmp_path):
    options = ["--steps", "1", "--warmup", "0", "--overlap", "backward"]
    file = tmp_path / "run.pt"
    start(tmp_path, "plain", 1, "digits.py", *options, "--checkpoint", str(file))
    whole = file.read_bytes()
    torch.save([1], file)
    for data in (b"", whole[:1], whole[:5000], whole[:-1], file.read_bytes()):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=f"{file} is no checkpoint of this script, or was cut"):
            common.load_checkpoint(file, None, None, {})


@pytest.mark.parametrize("option", ["--steps", "--epochs", "--batch-size"])
@pytest.mark.parametrize("text", ["0", "-1", "few"])
def test_counts_of_nothing_are_refused(option, text, capsys):
    with pytest.raises(SystemExit):
        common.parser("", epochs=1, batch_size=1, lr=1.0).parse_args([option, text])
    assert f"{option}: {text!r} is no whole number of 1 or more" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = common.parser("", epochs=1, batch_size=1, lr=1.0).parse_args(["--device", "cuda"])
    with pytest.raises(ValueError, match="--device cuda: torch sees no GPU here"):
        common.set_up(args, SimpleNamespace(local_size=lambda: 1, local_rank=lambda: 0))


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("digits.py", ["--epochs", "2", "--steps", "30"]),
        ("char_gpt.py", ["--steps", "12", *SMALL_GPT]),
    ],
)
def test_two_workers_end_with_ddps_parameters_bit_for_bit(tmp_path, script, options):
    ddp = start(tmp_path, "torchrun", 2, script, "--ddp", *options)
    forward = start(tmp_path, "torchrun", 2, script, "--overlap", "forward", *options)
    backward = start(tmp_path, "usbyterun", 2, script, "--overlap", "backward", *options)
    assert ddp["parameters_sha256"] == forward["parameters_sha256"]
    assert ddp["parameters_sha256"] == backward["parameters_sha256"]


@pytest.mark.parametrize("script", ["digits.py", "char_gpt.py", "words.py"])
def test_one_and_four_workers_follow_the_same_loss(tmp_path, script):
    options = ["--epochs", "1", "--steps", "16"]
    options += {"char_gpt.py": SMALL_GPT, "words.py": FEW_WORDS}.get(script, [])
    one = start(tmp_path, "plain", 1, script, *options)
    four = start(tmp_path, "usbyterun", 4, script, *options)
    for key, value in one["history"][-1].items():
        if key.endswith("_loss"):
            assert four["history"][-1][key] == pytest.approx(value, rel=1e-2)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("digits.py", ["--epochs", "10"]),
        ("char_gpt.py", ["--epochs", "1", "--log-every", "2", "--steps", "20", *SMALL_GPT]),
    ],
)
def test_daso_trains_on_two_nodes(tmp_path, script, options):
    result = start(tmp_path, "nodes", 2, script, "--daso", *options)
    assert result["mode"] == "daso"
    assert result["world_size"] == 2
    losses = [row["train_loss"] for row in result["history"]]
    assert losses[-1] < 0.8 * losses[0]
    if script == "digits.py":
        assert result["history"][-1]["test_accuracy"] >= 0.95

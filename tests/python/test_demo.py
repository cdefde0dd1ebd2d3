# SPDX-License-Identifier: Apache-2.0
"""`usbyte demo`: DDP and usbyte train in turns on an emulated network, and end equal."""

import os
import re
import subprocess
import sys

import pytest

from usbyte.cli import demo

COMMAND = [sys.executable, "-c", "from usbyte.cli import main; main()", "demo"]
# One plan without trials, so that few steps are enough.
ENV = {"USBYTE_POLICY": "us-byte", "USBYTE_LEARNING_STEPS": "2"}


@pytest.mark.parametrize("shaped", [True, False])
def test_demo_trains_and_draws(tmp_path, shaped):
    env = os.environ | ENV
    if not shaped:  # Without the commands that make a network.
        env |= {"PATH": str(tmp_path)}
    elif demo.unshapable():
        pytest.skip(demo.unshapable())
    command = [*COMMAND, "--rounds", "1", "--steps", "2", "-o", "step.svg"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all losses are equal, to the last bit" in done.stdout
    assert re.search(r"usbyte's step is \d+\.\d\d times as fast as that of DDP, 25 MB", done.stdout)
    assert (tmp_path / "step.svg").read_text().lstrip().startswith("<?xml")
    assert bool(re.search(r"2 ranks at \d+ Mb/s", done.stdout)) == shaped
    assert ("expect no gain: the command 'unshare' is missing" in done.stderr) == (not shaped)


def messages(usbyte_s, losses):
    yield {"kind": "setup", "parameters": 10, "ranks": 2, "compute_s": 0.1, "bytes_per_s": 1e6}
    yield {"kind": "warmup", "name": "usbyte", "steps": 5}
    times = {"DDP, 25 MB buckets": 0.3, "DDP, 1 MB buckets": 0.2, "usbyte": usbyte_s}
    for (name, step_s), loss in zip(times.items(), losses, strict=True):
        yield {"kind": "block", "name": name, "round": 0, "step_s": step_s, "loss": loss}
    yield {"kind": "end", "steps": 7}


def summary(usbyte_s, losses):
    run = demo._Run(1)
    for message in messages(usbyte_s, losses):
        run.take(message)
    return run.summary()


def test_gain_over_each_bucket_size():
    text = summary(0.1, [2.0, 2.0, 2.0])
    assert "3.00 times as fast as that of DDP, 25 MB buckets" in text
    assert "2.00 times as fast as that of DDP, 1 MB buckets" in text
    assert "does not pay" not in text


def test_a_loss_is_not_hidden():
    text = summary(0.25, [2.0, 2.0, 2.0])
    assert "0.80 times as fast as that of DDP, 1 MB buckets" in text
    assert "does not pay" in text


def test_different_losses_are_told():
    assert "Losses differ" in summary(0.1, [2.0, 2.0, 2.5])


def test_ranks_that_fail_are_told(tmp_path):
    env = os.environ | ENV | {"USBYTE_POLICY": "nonsense"}
    done = subprocess.run(
        [*COMMAND, "-o", "step.svg"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "nonsense" in done.stderr + done.stdout
    assert not (tmp_path / "step.svg").exists()

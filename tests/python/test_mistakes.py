# SPDX-License-Identifier: Apache-2.0
"""Common mistakes: the message names the cause and a remedy."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import click.testing
import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _models import warnings_from_now_on
from _ranks import run_ranks
from usbyte.errors import FaultError, UsageError
from usbyte.launch.cli import main as usbyterun
from usbyte.launch.foreign_options import REMEDIES

DTYPE_CHANGED = r"'(weight|bias)' is of torch\.float64, and was of torch\.float32.*wrap it again"


def wrapped(model):
    return ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )


def test_an_optimizer_is_wrapped_once(single):
    model = nn.Linear(2, 1)
    optimizer = wrapped(model)
    with pytest.raises(UsageError, match="is a DistributedOptimizer already: wrap the torch"):
        ub.DistributedOptimizer(optimizer, model.named_parameters())


def test_arguments_by_position_as_horovod_has_them(single):
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"by name, such as compression=ub\.Compression\.fp16"):
        ub.DistributedOptimizer(inner, model.named_parameters(), ub.Compression.fp16)


def test_one_rank_has_nothing_to_send(single, caplog):
    with caplog.at_level(logging.INFO, logger="usbyte"):
        wrapped(nn.Linear(2, 1))
    assert "there is one rank: nothing is sent" in caplog.text


def test_a_model_that_was_made_anew(single, caplog):
    optimizer = wrapped(nn.Linear(2, 1))
    model = nn.Linear(2, 1)  # not the one that the optimizer has
    with caplog.at_level(logging.WARNING, logger="usbyte"):
        for step in range(12):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            assert ("no parameter of this optimizer had a gradient" in caplog.text) == (step >= 9)
    assert caplog.text.count("was the model made anew") == 1


def test_a_model_that_changes_its_dtype(single):
    model = nn.Linear(2, 1)
    optimizer = wrapped(model)
    model.to(torch.float64)(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    with pytest.raises(UsageError, match=DTYPE_CHANGED):
        optimizer.step()


def test_complex_parameters(single):
    with pytest.raises(UsageError, match=r"'weight' has dtype torch\.complex64.*view_as_real"):
        wrapped(nn.Linear(2, 1, dtype=torch.complex64))


def test_a_timeline_of_one_rank(single, caplog, tmp_path):
    ub.start_timeline(str(tmp_path / "timeline.json"))
    assert "timeline.json' stays empty: start two or more" in caplog.text


def makes_mistakes(rank, size):
    """Those that need two ranks, and that a run survives."""
    ub.init()
    told = warnings_from_now_on()
    # Two steps for each backward are the two steps of torch, with the mean of the gradients.
    model, plain = nn.Linear(2, 1), nn.Linear(2, 1)
    ub.broadcast_parameters(model.state_dict())
    plain.load_state_dict(model.state_dict())
    optimizer, reference = wrapped(model), torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.full((1, 2), 1.0 + 2 * rank)).sum().backward()
        optimizer.step()
        optimizer.step()
        reference.zero_grad()
        plain(torch.full((1, 2), 2.0)).sum().backward()
        reference.step()
        reference.step()
    assert torch.allclose(model.weight, plain.weight)
    optimizer.close()
    assert not any("optimizer" in text for text in told), told
    # A model that is made anew. Its backward sends nothing, so that step() has nothing to apply.
    optimizer = wrapped(nn.Linear(2, 1))
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    optimizer.close()
    assert sum("so nothing trains: was the model made anew" in text for text in told) == 1
    # At last, as it ends communication: another dtype.
    optimizer = wrapped(model)
    model.to(torch.float64)
    with pytest.raises(UsageError, match=DTYPE_CHANGED):
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()


def test_mistakes_of_two_ranks():
    run_ranks(2, makes_mistakes)


def has_fewer_batches(rank, size):
    ub.init()
    model = nn.Linear(2, 1)
    optimizer = wrapped(model)

    def epoch():
        for _ in range(4 - rank):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        ub.allreduce(torch.ones(1), name="accuracy")

    told = r"rank 1 has not begun backward of step 4 and has allreduce 'acc.* in flight.* ub\.join"
    with pytest.raises(FaultError, match=told):
        epoch()


def test_a_rank_with_fewer_batches_before_a_collective():
    limits = {"USBYTE_STALL_WARNING_S": "1", "USBYTE_STALL_LIMIT_S": "3"}
    run_ranks(2, has_fewer_batches, env=limits)


def test_steps_before_the_first_gradient_are_fine(single, caplog):
    model = nn.Linear(2, 1)
    optimizer = wrapped(model)
    with caplog.at_level(logging.WARNING, logger="usbyte"):
        for _ in range(9):
            optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(12):
            optimizer.step()
    assert "gradient" not in caplog.text


@pytest.mark.parametrize("option", REMEDIES)
def test_options_of_other_launchers(option):
    done = click.testing.CliRunner().invoke(usbyterun, [option, "2", "python", "train.py"])
    assert done.exit_code == 2
    assert f"usbyterun has no {option}; {REMEDIES[option]}" in " ".join(done.output.split())


def test_a_script_without_python(tmp_path):
    (tmp_path / "train.py").write_text("print('trains')\n")
    done = subprocess.run(
        [sys.executable, "-m", "usbyte.launch", "-np", "1", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "a Python script is started by: python train.py" in done.stdout + done.stderr


MISUSE = """
import torch
import usbyte.torch as ub

def build():
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return ub.DistributedOptimizer(inner, model.named_parameters(), overlap="foward")  # here

ub.init()
build()
"""


@pytest.mark.parametrize("level", ["warning", "debug"])
def test_a_misuse_shows_the_line_of_the_user(tmp_path, level):
    script = tmp_path / "train.py"
    script.write_text(MISUSE)
    env = os.environ | {"USBYTE_LOG_LEVEL": level}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert any(line.endswith("# here") for line in lines)
    [message] = [line for line in lines if "UsageError: " in line]
    assert "foward" in message
    assert any("distributed_optimizer.py" in line for line in lines) == (level == "debug")

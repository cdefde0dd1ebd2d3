# SPDX-License-Identifier: Apache-2.0
"""The trace of real ranks: valid JSON at any moment, with names."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import FaultError, UsageError


def trace(rank, size, steps, kill_at):
    ub.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), overlap="forward",
        policy="bytescheduler",
        partition_bytes=100_000,
    )  # fmt: skip
    for step in range(steps):
        opt.zero_grad()
        model(torch.ones(2, 256)).sum().mul(1e-6).backward()
        opt.step()
        if step == kill_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_range_of_steps_with_names(tmp_path):
    env = {"USBYTE_TIMELINE": f"{tmp_path}/trace.%r.json", "USBYTE_TIMELINE_STEPS": "6:9"}
    run_ranks(2, trace, 12, None, env=env, timeout=60)
    for rank in range(2):
        events = json.loads((tmp_path / f"trace.{rank}.json").read_text())
        spans = [e for e in events if e["ph"] == "X"]
        assert {e["args"]["step"] for e in spans} == {6, 7, 8}
        assert {e["pid"] for e in spans} == {rank}
        assert all(e["dur"] >= 0 for e in spans)
        kinds = {e["cat"] for e in spans}
        assert (
            {"queue", "communication", "update"}
            <= kinds
            <= {"queue", "communication", "wait", "update"}
        )
        communication = [e for e in spans if e["cat"] == "communication"]
        # Each weight of 262,144 bytes goes in three parts, in each of three steps.
        assert sum("0.weight" in e["name"] for e in communication) == 9
        assert sum(e["args"]["bytes"] for e in communication) >= 3 * 4 * 256 * 256 * 4
        assert any("3.bias" in e["name"] for e in spans if e["cat"] == "update")
    # The two ranks' clocks are comparable: the collectives of one step overlap.
    both = [json.loads((tmp_path / f"trace.{r}.json").read_text()) for r in range(2)]
    starts = [min(e["ts"] for e in events if e["ph"] == "X") for events in both]
    assert abs(starts[0] - starts[1]) < 10e6  # microseconds


def describes(rank, size, full):
    if full:  # as a full disk

        def refuse(self, name, args):
            raise UsageError("no space left")

        _core.TimelineWriter.describe = refuse
    ub.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), policy="ddp",
        overlap="backward", compression=ub.Compression.dgc(0.001, warmup_steps=16),
    )  # fmt: skip
    for _ in range(24):
        opt.zero_grad()
        model(torch.ones(2, 64)).sum().mul(1e-6).backward()
        opt.step()
    plan = opt.plan.to_json()
    ub.shutdown()
    return plan


@pytest.mark.parametrize("full", [False, True])
def test_each_plan_is_described(tmp_path, full):
    env = {"USBYTE_TIMELINE": f"{tmp_path}/trace.%r.json", "USBYTE_LEARNING_STEPS": "2"}
    plan, _ = run_ranks(2, describes, full, env=env, timeout=60)
    events = json.loads((tmp_path / "trace.0.json").read_text())
    told = [e["args"]["decision"]["plan"] for e in events if e["name"] == "usbyte_decision"]
    if full:  # training went on
        assert told == []
    else:  # the warm-up has plans of its own
        assert len(set(told)) >= 3
        assert told[-1] == plan


def test_a_killed_rank_leaves_valid_json(tmp_path):
    env = {"USBYTE_TIMELINE": f"{tmp_path}/%r.json", "USBYTE_STALL_LIMIT_S": "20"}
    with pytest.raises(AssertionError, match="rank 0"):
        run_ranks(2, trace, 12, 8, env=env, timeout=60)
    events = json.loads((tmp_path / "1.json").read_text())
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} >= {1, 2, 5}


def says_where_it_records(rank, size):
    ub.init()
    model = nn.Linear(64, 64)
    opt = ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        opt.step()


def test_without_a_place_for_the_rank_only_the_first_records(tmp_path):
    env = {"USBYTE_TIMELINE": f"{tmp_path}/one.json"}
    run_ranks(2, says_where_it_records, env=env, timeout=60)
    events = json.loads((tmp_path / "one.json").read_text())
    assert {e["pid"] for e in events} == {0}
    assert any(e["ph"] == "X" for e in events)


def cannot_record(rank, size, folder):
    os.environ["USBYTE_TIMELINE"] = f"{folder}/{'none/' * (rank == 1)}%r.json"
    if rank == 1:
        with pytest.raises(UsageError, match="cannot create the timeline"):
            ub.init()
        assert not ub.is_initialized()
    else:
        ub.init()
        with pytest.raises(FaultError, match=r"rank 1 .* cannot create the timeline"):
            ub.allreduce(torch.ones(2))


def test_a_rank_that_cannot_record_tells_the_others(tmp_path):
    run_ranks(2, cannot_record, str(tmp_path), timeout=60)


def starts_and_stops(rank, size, folder):
    ub.init()
    path = Path(folder) / "run.%r.json"
    model = nn.Linear(64, 64)
    opt = ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), overlap="backward")

    def step():
        opt.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        opt.step()

    for _ in range(5):
        step()
    ub.start_timeline(str(path), steps="0:")
    step()
    step()
    ub.stop_timeline()
    step()
    ub.start_timeline(str(Path(folder) / "other.%r.json"))
    ub.start_timeline(str(Path(folder) / "last.json"))  # which ends the one before on all ranks
    step()
    ub.stop_timeline()
    for name, wanted in (("other.%r", False), ("last", rank == 0)):
        file = Path(folder) / f"{name}.json".replace("%r", str(rank))
        if wanted or "%r" in name:
            events = json.loads(file.read_text())
            assert any(e["ph"] == "X" for e in events) == wanted, name
    written = Path(str(path).replace("%r", str(rank)))
    events = json.loads(written.read_text())
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {6, 7}
    with pytest.raises(UsageError, match="no/such"):
        ub.start_timeline(f"{folder}/no/such/%r.json")
    with pytest.raises(UsageError, match="9:3"):
        ub.start_timeline(str(path), steps="9:3")


def test_start_and_stop(tmp_path):
    run_ranks(2, starts_and_stops, str(tmp_path), timeout=60)

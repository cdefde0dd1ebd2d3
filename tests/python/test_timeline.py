# SPDX-License-Identifier: Apache-2.0
"""The trace of real ranks: valid JSON at any moment, with names."""

from __future__ import annotations

import copy
import io
import json
import os
import signal
from itertools import pairwise
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
        must = {"compute", "queue", "communication", "update"}
        assert must <= kinds <= must | {"wait"}
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


class Hidden:
    """An output in which no tensor is found."""

    def __init__(self, value):
        self.value = value


class Hides(nn.Linear):
    def forward(self, x):
        return Hidden(super().forward(x))


class Raises(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        raise ValueError("no output")


def layers(kind):
    torch.manual_seed(0)
    if kind == "scripted":
        return torch.jit.script(nn.Linear(64, 64))
    if kind == "hidden":
        return Hides(64, 64)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def records_passes(rank, size, path, overlap, kind, accumulates):
    ub.init()
    model = layers(kind)
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), policy="ddp",
        overlap=overlap,
    )  # fmt: skip

    def loss():
        output = model(torch.ones(2, 64))
        return (output.value if kind == "hidden" else output).sum().mul(1e-6)

    for step in range(10):
        if step == 4:
            ub.start_timeline(path)
        opt.zero_grad()
        if overlap == "backward":  # else it would apply the updates
            with torch.no_grad():
                loss()  # no part of a step
        if accumulates:
            with opt.no_sync():
                loss().backward()
        loss().backward()
        opt.step()
    ub.shutdown()


def recorded(path):
    """The events of each step that a timeline has, by kind."""
    steps = {}
    for event in json.loads(path.read_text()):
        if event["ph"] in ("X", "i"):
            event["end"] = event["ts"] + event.get("dur", 0)
            kinds = steps.setdefault(event["args"]["step"], {})
            kinds.setdefault(event["cat"], []).append(event)
    return steps


LATE = 0.01  # time stamps are rounded to nanoseconds, and then are floats of microseconds


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_passes_of_each_step(tmp_path, overlap):
    path = tmp_path / "trace.json"
    env = {"USBYTE_LEARNING_STEPS": "2"}
    run_ranks(2, records_passes, str(path), overlap, "plain", False, env=env, timeout=60)
    steps = recorded(path)
    assert sorted(steps) == [5, 6, 7, 8, 9, 10]
    for number, step in steps.items():
        forward, backward = step["compute"]
        assert (forward["name"], backward["name"]) == ("forward", "backward")
        assert forward["end"] <= backward["ts"] + LATE
        [mark] = step["step"]
        assert mark["name"] == f"step {number}"
        assert mark["ts"] == pytest.approx(forward["ts"], abs=LATE)
        for op in step["queue"]:  # gradients are ready in backward, flags at its end
            assert backward["ts"] <= op["ts"] + LATE
            assert "usbyte.used" in op["name"] or op["ts"] <= backward["end"] + LATE
        if number < 10:
            following, _ = steps[number + 1]["compute"]
            assert backward["end"] <= following["ts"] + LATE
            assert all(op["ts"] <= following["ts"] + LATE for op in step["queue"])
            if overlap == "forward":  # each update comes with its layer in the next forward pass
                assert step["update"]
                for update in step["update"]:
                    assert following["ts"] - LATE <= update["ts"]
                    assert update["end"] <= following["end"] + LATE
            else:
                assert "update" not in step
                ends = [op["end"] for op in step["communication"]]
                assert max(ends) <= following["ts"] + LATE


@pytest.mark.parametrize(
    ("kind", "accumulates", "names"),
    [
        ("plain", True, ["forward", "backward", "forward", "backward"]),
        ("hidden", False, ["forward", "backward"]),
        ("scripted", False, ["backward"]),
    ],
)
def test_passes_that_are_known(tmp_path, kind, accumulates, names):
    path = tmp_path / "trace.json"
    run_ranks(2, records_passes, str(path), "backward", kind, accumulates, timeout=60)
    for step in recorded(path).values():
        assert [event["name"] for event in step["compute"]] == names
        assert all(a["end"] <= b["ts"] + LATE for a, b in pairwise(step["compute"]))
        assert step["step"][0]["ts"] == pytest.approx(step["compute"][0]["ts"], abs=LATE)


def leaves_no_hooks(rank, size, path):
    ub.init()
    model = layers("plain")
    broken = Raises(model)
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), overlap="backward"
    )

    def step():
        opt.zero_grad()
        model(torch.ones(2, 64)).sum().mul(1e-6).backward()
        opt.step()

    def hooks(module):
        return len(module._forward_pre_hooks) + len(module._forward_hooks)

    for _ in range(7):
        step()
    assert hooks(model) == 0
    ub.start_timeline(path)
    assert hooks(model) == (2 if rank == 0 else 0)
    with pytest.raises(ValueError, match="no output"):
        broken(torch.ones(2, 64))
    step()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        other(torch.ones(2, 64)).sum().backward()  # is not recorded
    step()
    ub.stop_timeline()
    assert hooks(model) == 0
    step()
    ub.shutdown()


def test_hooks_are_there_only_while_a_timeline_is_recorded(tmp_path):
    path = tmp_path / "trace.json"
    run_ranks(2, leaves_no_hooks, str(path), timeout=60)
    steps = recorded(path)
    assert sorted(steps) == [8, 9]
    for step in steps.values():
        assert [event["name"] for event in step["compute"]] == ["forward", "backward"]


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

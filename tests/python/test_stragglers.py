# SPDX-License-Identifier: Apache-2.0
"""`usbyte stragglers`: which rank the others wait for."""

from __future__ import annotations

import json
import time

import click.testing
import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.cli import main
from usbyte.cli._traces import Span
from usbyte.cli.stragglers import find_delays, typical_step_s, verdict
from usbyte.errors import UsageError


def invoke(*arguments):
    return click.testing.CliRunner().invoke(main, ["stragglers", *map(str, arguments)])


def flight(rank, step, op, start_s, end_s):
    # Clocks of hosts differ.
    return Span(rank, step, "communication", op, start_s + 100 * rank, end_s + 100 * rank, {})


def test_the_rank_with_the_shortest_operations_is_late():
    spans = []
    for step in range(3):
        for op, done_s in (("a", 0.5), ("b", 0.9)):
            spans.append(flight(0, step, op, step, step + done_s))
            spans.append(flight(1, step, op, step + 0.2 + 0.1 * step, step + done_s))
        spans.append(Span(0, step, "wait", "w", step + 0.1, step + 0.35, {}))
        spans.append(Span(0, step, "wait", "v", step + 0.4, step + 0.45, {}))
        spans.append(Span(0, step, "queue", "a", step - 0.1, step, {}))
    first, second = find_delays(spans)
    assert (first.rank, first.late_s) == (0, 0)
    assert first.wait_s == pytest.approx(0.3)
    assert (second.rank, second.step, second.wait_s) == (1, 2, 0)
    assert second.late_s == pytest.approx(0.3)
    assert second.most_late_s == pytest.approx(0.4)
    assert typical_step_s(spans) == pytest.approx(1)
    assert "wait for rank 1" in verdict([first, second], 1)
    assert "300.0 ms after the first rank, 30% of a step" in verdict([first, second], 1)
    assert "No rank is a straggler" in verdict([first, second], 20)


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([flight(0, 1, "a", 0, 1)], "of 1 ranks, and two are needed"),
        ([flight(0, 1, "a", 0, 1), flight(1, 2, "a", 0, 1)], "in the traces of all ranks"),
    ],
)
def test_traces_that_cannot_be_compared_are_refused(spans, text):
    with pytest.raises(UsageError, match=text):
        find_delays(spans)


@pytest.mark.parametrize("text", ["{}", "[", '[{"ph": "X", "name": "a"}]', "[1]"])
def test_files_that_are_no_traces_are_refused(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    done = invoke(path)
    assert done.exit_code == 1
    assert f"cannot read the trace '{path}'" in done.output


def sleeps(rank, size, overlap):
    ub.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), policy="ddp",
        overlap=overlap,
    )  # fmt: skip
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).sum()
        if rank == 1:
            time.sleep(0.3)
        loss.backward()
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_a_rank_that_sleeps_is_found(tmp_path, overlap):
    traces = [tmp_path / f"trace.{rank}.json" for rank in range(2)]
    run_ranks(2, sleeps, overlap, env={"USBYTE_TIMELINE": str(tmp_path / "trace.%r.json")})
    done = invoke(*traces)
    assert done.exit_code == 0, done.output
    assert "The others wait for rank 1" in done.output
    events = json.loads(traces[0].read_text())
    waits = [event for event in events if event.get("cat") == "wait"]
    assert {event["name"] for event in waits} <= {"all gradients", "0.weight", "0.bias", "1.bias"}
    assert max(event["dur"] for event in waits) > 0.15e6  # rank 0 has waited for rank 1

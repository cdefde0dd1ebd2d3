# SPDX-License-Identifier: Apache-2.0
"""`usbyte stragglers`: which rank the others wait for."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click.testing
import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.cli import main
from usbyte.cli.stragglers import find_delays, one_of_each_rank, only, typical_step_s, verdict
from usbyte.errors import UsageError
from usbyte.report.chrome_trace import Span


def invoke(*arguments):
    return click.testing.CliRunner().invoke(main, ["stragglers", *map(str, arguments)])


def flight(rank, step, op, start_s, end_s):
    # Clocks of hosts differ.
    return Span(rank, step, "communication", op, start_s + 20 * rank, end_s + 20 * rank, {})


def two_ranks(late_s, steps=3):
    """Bars of two ranks, of which the second one launches both ops later; steps of 1 s."""
    ranks = {0: [], 1: []}
    for step in range(steps):
        for op, done_s in (("a", 0.5), ("b", 0.9)):
            ranks[0].append(flight(0, step, op, step, step + done_s))
            ranks[1].append(flight(1, step, op, step + late_s(step), step + done_s))
        ranks[0].append(Span(0, step, "wait", "w", step + 0.1, step + 0.35, {}))
        ranks[0].append(Span(0, step, "wait", "v", step + 0.4, step + 0.45, {}))
        ranks[0].append(Span(0, step, "queue", "a", step - 0.1, step, {}))
    return ranks


def test_the_rank_with_the_shortest_operations_is_late():
    ranks = two_ranks(lambda step: 0.2 + 0.1 * step)
    first, second = find_delays(ranks)
    assert (first.rank, first.late_s, first.most_late_s) == (0, 0, 0)
    assert first.wait_s == pytest.approx(0.3)
    assert (second.rank, second.step, second.wait_s) == (1, 2, 0)
    assert second.late_s == pytest.approx(0.3)
    assert second.most_late_s == pytest.approx(0.4)
    assert first.most_wait_s == pytest.approx(0.3)
    assert typical_step_s(ranks) == pytest.approx(1)
    told = verdict([first, second], 1.0)
    assert told.startswith("The others wait for rank 1 (300.0 ms late, 30% of a step): ")


def test_ranks_that_are_late_in_turn_wait_for_the_network():
    # Each completes an op a little earlier than the other one.
    ranks = {r: [flight(r, 0, op, 0, 0.5 + 0.1 * (op == "ab"[r])) for op in "ab"] for r in (0, 1)}
    delays = find_delays(ranks)
    assert [delay.late_s for delay in delays] == pytest.approx([0, 0])
    waiting = [delay._replace(wait_s=0.3) for delay in delays]
    assert "what they wait for is the network" in verdict(waiting, 1.0)


def test_nobody_is_blamed_where_nobody_waits():
    delays = find_delays(two_ranks(lambda step: 0.3))
    hidden = [delay._replace(wait_s=0.001) for delay in delays]
    assert (
        verdict(hidden, 1.0) == "No rank waits for more than 0.1% of a step: compute sets the pace."
    )


def test_one_step_alone():
    ranks = two_ranks(lambda step: 0.2 + 0.1 * step)
    ranks[0].append(Span(0, 2, "wait", "u", 2.6, 2.7, {}))
    first, second = find_delays(ranks)
    assert (first.wait_s, first.most_wait_s, first.wait_step) == pytest.approx((0.3, 0.4, 2))
    first, second = find_delays(only(1, ranks))
    assert (first.wait_s, first.most_wait_s, first.wait_step) == pytest.approx((0.3, 0.3, 1))
    assert (second.late_s, second.most_late_s, second.step) == pytest.approx((0.3, 0.3, 1))
    with pytest.raises(UsageError, match=r"the trace of rank 0 has no step 7, but steps 0 to 2"):
        only(7, ranks)


def test_traces_that_cannot_be_compared_are_refused():
    ranks = two_ranks(lambda step: 0.1)
    files = {Path("a"): ranks[0], Path("b"): ranks[1]}
    assert one_of_each_rank(files) == ranks
    later = [span._replace(start_s=1e3, end_s=1e3) for span in ranks[1]]
    for traces, text in [
        ({Path("a"): ranks[0]}, "two traces are needed"),
        (files | {Path("c"): []}, "'c' has no steps"),
        (files | {Path("c"): ranks[0]}, "'a' and 'c' are both of rank 0"),
        (files | {Path("b"): later}, "'a' ended 997 s before 'b' began"),
    ]:
        with pytest.raises(UsageError, match=text):
            one_of_each_rank(traces)
    other = [span._replace(name=f"other {span.name}") for span in ranks[1]]
    with pytest.raises(UsageError, match="in the traces of all ranks"):
        find_delays({0: ranks[0], 1: other})
    with pytest.raises(UsageError, match="rank 0 has 'a' twice in step 0"):
        find_delays({0: 2 * ranks[0], 1: ranks[1]})
    with pytest.raises(UsageError, match="no two steps in a row"):
        typical_step_s(two_ranks(lambda step: 0.1, steps=1))


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
    for _ in range(10):
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
    waits = [event for event in events if event.get("cat") == "wait" and event["dur"] > 0.15e6]
    names = {event["name"] for event in waits}  # for which rank 0 has waited for rank 1
    assert "all gradients" in names  # while the job is measured, and with overlap="backward"
    assert bool(names - {"all gradients", "usbyte.used"}) == (overlap == "forward")

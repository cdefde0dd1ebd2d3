"""Policies that try plans and keep the fastest, on the simulator and in the running job."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import sys
from itertools import pairwise

import click.testing
import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _models import difference, train
from _ranks import run_ranks
from usbyte import _core, tuning
from usbyte.cli import main
from usbyte.cli.options import all_schemes, parse_scheme
from usbyte.errors import UsageError
from usbyte.lab import profiles
from usbyte.torch import drift
from usbyte.torch.stopwatch import Stopwatch
from usbyte.tuning import searches

MIB = 1 << 20


@pytest.fixture(scope="module")
def job():
    """A small job, on a network that makes sizes matter."""
    profile = profiles.scaled(profiles.vgg16_half(), time=0.1)
    return tuning.Job(profile, _core.NetworkModel.ring(16, 200e-6, 1.25e9), {})


def run(search, measure, seed=0):
    """Tunes; returns the tuner."""
    tuner = tuning.Tuner(search, seed)
    while (candidate := tuner.ask()) is not None:
        assert tuner.ask() is candidate
        tuner.tell(measure(candidate.plan))
    return tuner


def sizes(tuner):
    """The MiB in the words of each trial."""
    words = [trial.candidate.what for trial in tuner.trials]
    return [[float(x) for x in re.findall(r"([0-9.e+]+) MiB", text)] for text in words]


def test_bytescheduler_is_tuned_within_its_bounds_to_nearly_the_best(job):
    poor = {"partition_bytes": 30 * MIB, "credit_bytes": 30 * MIB}
    search = tuning.POLICIES["tune:bytescheduler"](dataclasses.replace(job, options=poor))
    tuner = run(search, job.simulated_s)
    assert len(tuner.trials) == 15
    assert sizes(tuner)[0] == [30, 30]
    for partition, credit in sizes(tuner):
        assert 2 <= partition <= 32
        assert 4 <= credit <= 64
        assert partition <= credit
    grid = [job.simulated_s(search.at((i / 16, j / 16)).plan) for i in range(17) for j in range(17)]
    assert tuner.trials[0].step_s > 1.05 * min(grid)  # there is something to find
    assert job.simulated_s(tuner.best().plan) <= 1.01 * min(grid)


def test_dear_is_tuned_within_its_bounds_to_nearly_the_best(job):
    search = tuning.POLICIES["tune:dear"](job)
    tuner = run(search, job.simulated_s)
    assert len(tuner.trials) <= 10
    assert sizes(tuner)[0] == [25]
    assert all(1 <= fusion <= 256 for [fusion] in sizes(tuner))
    grid = [job.simulated_s(search.at((i / 256,)).plan) for i in range(257)]
    assert tuner.trials[0].step_s > 1.02 * min(grid)
    assert job.simulated_s(tuner.best().plan) <= 1.02 * min(grid)


@pytest.mark.parametrize("partition", [1, 2 * MIB, 32 * MIB, 1 << 40])
@pytest.mark.parametrize("credit", [1, 64 * MIB, 1 << 40])
def test_no_point_has_a_credit_that_holds_no_part(job, partition, credit):
    options = {"partition_bytes": partition, "credit_bytes": credit}
    job = tuning.Job(job.profile, job.network, options)
    search = tuning.POLICIES["tune:bytescheduler"](job)
    points = [(i / 7, j / 7) for i in range(8) for j in range(8)]
    for candidate in [*search.starts, *map(search.at, points)]:
        [credit] = {op.window_bytes for op in candidate.plan.ops}
        assert max(map(candidate.plan.bytes, candidate.plan.ops)) <= credit
        assert 4 * MIB <= credit <= 64 * MIB
        assert max(map(candidate.plan.bytes, candidate.plan.ops)) <= 32 * MIB


def test_costs_that_the_probe_got_wrong_are_made_up_for(job):
    # Ops cost ten times the startup inside the job, and what is measured is noisy.
    true = tuning.Job(
        job.profile,
        _core.NetworkModel(
            16, [_core.AlphaBeta(10 * c.alpha_s, c.beta_s_per_byte) for c in job.network.all_reduce]
        ),
        {},
    )
    noise = torch.Generator().manual_seed(1)

    def measure(plan):
        return true.simulated_s(plan) * (1 + 0.005 * torch.randn(1, generator=noise).item())

    tuner = run(tuning.POLICIES["tune"](job), measure)
    assert tuner.trials[0].candidate.what == "auto"
    mistaken, tuned = true.simulated_s(job.plan("auto")), true.simulated_s(tuner.best().plan)
    best = true.simulated_s(true.plan("auto"))
    assert mistaken > 1.05 * best
    assert tuned <= 1.03 * best


def test_noise_alone_moves_nothing(job):
    for seed in range(3):
        noise = torch.Generator().manual_seed(seed)
        tuner = run(
            tuning.POLICIES["tune"](job),
            lambda _, n=noise: 1 + 0.009 * torch.rand(1, generator=n).item(),
        )
        assert tuner.best() is tuner.trials[0].candidate


def test_a_lead_must_be_confirmed(job):
    search = dataclasses.replace(tuning.POLICIES["tune"](job), trials=4)
    for again, wins in [([1.0, 0.9], True), ([0.9, 0.9], False), ([0.8, 0.9], False)]:
        tuner = tuning.Tuner(search)
        times = [1.0, 0.5] + [2.0] * (search.trials - 2) + again
        for time in times:
            assert tuner.ask() is not None
            tuner.tell(time)
        assert tuner.ask() is None
        assert (tuner.best() is tuner.trials[1].candidate) is wins
        assert tuner.best() in (tuner.trials[0].candidate, tuner.trials[1].candidate)


@pytest.mark.parametrize("policy", tuning.POLICIES)
def test_equal_measurements_lead_to_equal_plans(job, policy):
    first, second = (run(tuning.POLICIES[policy](job), job.simulated_s) for _ in range(2))
    assert [t.candidate for t in first.trials] == [t.candidate for t in second.trials]


@pytest.mark.parametrize("policy", tuning.POLICIES)
@pytest.mark.parametrize("tensors", [1, 3])
def test_no_plan_is_measured_twice(policy, tensors):
    specs = [_core.TensorSpec(f"t{i}", 1000, "float32", 1000 * i) for i in range(tensors)]
    need = [float(i) for i in range(tensors)]
    profile = _core.Profile(specs, need, [20.0 - t for t in need], 21.0)
    small = tuning.Job(profile, _core.NetworkModel.ring(4, 1.0, 1e3), {})
    tuner = run(tuning.POLICIES[policy](small), small.simulated_s)
    hashes = [trial.candidate.plan.hash() for trial in tuner.trials]
    assert len(set(hashes)) == len(hashes)
    if policy == "tune:bytescheduler":  # every size gives the same plan, but for its window
        assert {len(t.candidate.plan.ops) for t in tuner.trials} == {tensors}


def test_what_is_no_time_is_an_error(job):
    tuner = tuning.Tuner(tuning.POLICIES["tune:dear"](job))
    with pytest.raises(UsageError, match="call ask"):
        tuner.tell(1.0)
    with pytest.raises(UsageError, match="before it was told"):
        tuner.best()
    candidate = tuner.ask()
    for broken in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(UsageError, match=r"'fusion 25 MiB' was measured to take"):
            tuner.tell(broken)
    assert tuner.ask() is candidate


def test_without_the_library_the_remedy_is_named(job, monkeypatch, single):
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    with pytest.raises(UsageError, match=r"pip install 'usbyte\[tune\]'"):
        tuning.make_plan("tune:dear", job.profile, job.network, {})
    with pytest.raises(UsageError, match=r"pip install 'usbyte\[tune\]'"):
        ub.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))]), policy="tune")


def test_trials_must_have_an_interval_to_time(single):
    with pytest.raises(UsageError, match="tune_steps needs one of the policies tune"):
        ub.DistributedOptimizer(
            torch.optim.SGD([nn.Parameter(torch.ones(1))]), policy="auto", tune_steps=4
        )
    with pytest.raises(UsageError, match="tune_steps must be 2 at least"):
        ub.DistributedOptimizer(
            torch.optim.SGD([nn.Parameter(torch.ones(1))]), policy="tune", tune_steps=1
        )


def test_a_stopwatch_takes_the_median_without_the_first_interval():
    watch = Stopwatch(5)
    for now in (100.0, 109.0, 110.0, 112.0):
        watch.step(now)
        assert not watch.done
    watch.step(115.0)
    assert watch.done
    assert watch.step_s == 2.0
    short = Stopwatch(2)
    short.step(1.0)
    short.step(4.0)
    assert (short.done, short.step_s) == (True, 3.0)


def test_the_tools_take_tuned_policies_when_asked(tmp_path):
    assert parse_scheme("tune") == ("forward", "tune")
    assert parse_scheme("tune:dear") == ("forward", "tune:dear")
    assert parse_scheme("backward:tune:dear") == ("backward", "tune:dear")
    with pytest.raises(ValueError, match="unknown policy 'tune:magic'"):
        parse_scheme("forward:tune:magic")
    assert not any(policy in tuning.POLICIES for _, policy in all_schemes())
    runner, ring = click.testing.CliRunner(), ["--ring", "16,200us,10gbit"]
    done = runner.invoke(main, ["plan", "vgg16-half", *ring, "--policy", "tune:dear"])
    assert done.exit_code == 0, done.output
    assert "tune:dear" in done.output
    output = tmp_path / "steps.csv"
    options = ["--policies", "dear,tune:dear,backward:tune:bytescheduler", "--workers", "16"]
    done = runner.invoke(main, ["simulate", "vgg16-half", *options, "--csv", str(output)])
    assert done.exit_code == 0, done.output
    rows = [line.split(",") for line in output.read_text().splitlines()]
    step = rows[0].index("step_s")
    assert float(rows[2][step]) <= float(rows[1][step])


def tunes(rank, size, cases):
    ub.init()
    searches._MIB = 1 << 10  # the model is small
    drift._THRESHOLD = math.inf  # a busy machine's own drift would add phases
    seen, lines = [], []
    log = logging.getLogger("usbyte")
    log.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    for overlap, policy, trials, shard, variant in cases:
        plans, left = [], []
        lines.clear()

        def on_step(step, _model, opt, plans=plans, left=left):
            plans.append(opt.plan.hash())
            left.append(opt.decision.trial_steps if opt.decision else -1)
            if opt._reducer._drift and left[-1]:
                opt._reducer._drift.wanted = True  # must not matter while plans are on trial

        steps = 2 + 2 * (trials + 2) + 3
        expected = train("ddp", "adam", rank, size, steps=steps, **variant)
        got = train(
            overlap, "adam", rank, size, steps, on_step=on_step, policy=policy, tune_steps=2,
            shard_optimizer=shard, **variant,
        )  # fmt: skip
        assert difference(got, expected) == 0, (overlap, policy, variant)
        phases = [left[0], *(b for a, b in pairwise(left) if a != b)]
        assert phases == [-1, 2, 0], phases
        # For so small a job, auto under other costs may always plan alike.
        assert len(set(plans)) >= (2 if policy == "tune" else 4)
        measured = [line for line in lines if ": trial " in line]
        ends = [line for line in lines if line.count("' stays;")]
        assert len(ends) == (rank == 0), lines
        assert len(measured) == left.count(2) / 2 * (rank == 0), lines
        seen += plans
    return seen


MIXED, ACCUMULATE = {"mixed": True, "set_to_none": False}, {"accumulate": 2}


@pytest.mark.parametrize(
    "cases",
    [
        [("backward", "tune", 12, False, {}), ("backward", "tune:dear", 10, False, ACCUMULATE)],
        [("forward", "tune", 12, False, ACCUMULATE), ("forward", "tune:dear", 10, False, MIXED)],
        [("forward", "tune:bytescheduler", 15, False, {})],
        [("forward", "tune", 12, True, {}), ("forward", "tune:dear", 10, True, MIXED)],
        [("forward", "tune:dear", 10, True, ACCUMULATE)],
    ],
    ids=["backward", "forward", "bytescheduler", "sharded", "accumulating"],
)
def test_results_stay_ddps_while_plans_are_tried(cases):
    plans = run_ranks(2, tunes, cases, timeout=120, env={"USBYTE_LEARNING_STEPS": "2"})
    assert plans[0] == plans[1]


def tunes_again(rank, size):
    ub.init()
    drift._THRESHOLD = math.inf
    for shard in (False, True):
        left = []

        def on_step(step, _model, opt, left=left):
            left.append(opt.decision.trial_steps if opt.plan.policy == "tune" else -1)
            if rank == 1 and left.count(-1) == 1 and left[-1] == 0:  # one rank alone notices
                opt._reducer._drift.wanted = True

        expected = train("ddp", "adam", rank, size, steps=50)
        got = train(
            "forward", "adam", rank, size, 50, on_step=on_step, policy="tune", tune_steps=2,
            shard_optimizer=shard,
        )  # fmt: skip
        assert difference(got, expected) == 0
        phases = [left[0], *(b for a, b in pairwise(left) if a != b)]
        assert phases == [-1, 2, 0, -1, 2, 0], phases
        # Auto's plan and the last winner, and both again.
        again = left[len(left) - left[::-1].index(-1) :]
        assert again.count(2) <= 4 * 2, left


def test_a_new_plan_is_tried_against_what_won_before():
    run_ranks(2, tunes_again, timeout=120, env={"USBYTE_LEARNING_STEPS": "2"})


def test_what_won_before_is_all_that_is_tried_again(job):
    search = tuning.POLICIES["tune"](job)
    for best, plans in [("auto", 1), ("ddp", 2)]:
        [candidate] = [start for start in search.starts if start.what == best]
        tuner = run(tuning.narrowed(search, candidate), job.simulated_s)
        assert len(tuner.trials) == plans
        assert tuner.trials[-1].candidate.plan == candidate.plan
    point = search.at((0.9, 0.5))
    assert run(tuning.narrowed(search, point), job.simulated_s).trials[1].candidate == point

# SPDX-License-Identifier: Apache-2.0
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
from usbyte import _core
from usbyte.cli import main
from usbyte.cli._options import all_policy_specs, parse_policy_spec
from usbyte.errors import UsageError
from usbyte.planning import profiles, tuning
from usbyte.planning.tuning import searches
from usbyte.torch import testing
from usbyte.torch.plan import drift, lifecycle
from usbyte.torch.plan.stopwatch import StepTimer

MIB = 1 << 20


@pytest.fixture(scope="module")
def job():
    """A small job, on a network that makes sizes matter."""
    profile = profiles.scaled(profiles.vgg16_half(), time=0.1)
    return tuning.TuningTask(profile, _core.NetworkModel.ring(16, 200e-6, 1.25e9), {})


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
    search = tuning.TUNED["tune:bytescheduler"](dataclasses.replace(job, options=poor))
    tuner = run(search, job.simulated_s)
    assert len(tuner.trials) == 15
    assert sizes(tuner)[0] == [30, 30]
    for partition, credit in sizes(tuner):
        assert 8 <= partition <= 128
        assert 16 <= credit <= 256
        assert partition <= credit
    grid = [
        job.simulated_s(search.space.at((i / 16, j / 16)).plan)
        for i in range(17)
        for j in range(17)
    ]
    assert tuner.trials[0].step_s > 1.05 * min(grid)  # there is something to find
    assert job.simulated_s(tuner.best().plan) <= 1.01 * min(grid)


def test_dear_is_tuned_within_its_bounds_to_nearly_the_best(job):
    search = tuning.TUNED["tune:dear"](job)
    tuner = run(search, job.simulated_s)
    assert len(tuner.trials) <= 10
    assert sizes(tuner)[0] == [25]
    assert all(1 <= fusion <= 256 for [fusion] in sizes(tuner))
    grid = [job.simulated_s(search.space.at((i / 256,)).plan) for i in range(257)]
    assert tuner.trials[0].step_s > 1.02 * min(grid)
    assert job.simulated_s(tuner.best().plan) <= 1.02 * min(grid)


@pytest.mark.parametrize("policy", ["us-byte", "dcredit"])
def test_units_are_tuned_to_the_best_power_of_two(job, policy):
    tuner = run(tuning.TUNED[f"tune:{policy}"](job), job.simulated_s)
    tried = [unit for [unit] in sizes(tuner)]  # of equal plans only the first
    assert tried[:4] == [0.25, 0.5, 1, 2]
    assert set(tried) <= {0.25 * 2**k for k in range(8)}
    steps_s = [job.simulated_s(job.plan(policy, unit_bytes=MIB // 4 << k)) for k in range(8)]
    assert job.simulated_s(tuner.best().plan) == min(steps_s) < max(steps_s)


@pytest.mark.parametrize("tensors", [1, 2, 3, 4, 30, 161])
def test_mergecomp_finds_the_boundary_by_few_trials(tensors):
    specs = [_core.TensorSpec(f"t{i}", 1000, "float32", 1000 * i) for i in range(tensors)]
    ready = [2.0 * tensors - t for t in range(tensors)]
    profile = _core.Profile(specs, [0.0] * tensors, ready, 3.0 * tensors)
    coded = tuning.TuningTask(
        profile, _core.NetworkModel.ring(4, 1e-3, 1e6), {}, codecs=["fp16"] * tensors
    )
    search = tuning.TRIED["mergecomp_online"]
    for best in {1, 2, tensors // 2, tensors - 1} & set(range(1, tensors)):

        def seconds(plan, best=best):
            assert {op.codec for op in plan.ops} == {"fp16"}
            if len(plan.ops) == 1:
                return 2.0 * tensors
            first, second = plan.ops  # what backward produces first is last on the line
            assert first.blocks[0][0] == second.blocks[0][1]
            assert second.fence
            return 1.0 + abs((plan.numel - first.blocks[0][0]) // 1000 - best)

        tuner = run(search(coded), seconds)
        assert tuner.best().what == f"{best} of {tensors} tensors before the rest"
        assert len(tuner.trials) <= 3 + 1.45 * math.log2(tensors)
    [alone] = run(search(coded), lambda _: 1.0).trials[:1]
    assert alone.candidate.what == "one group"


@pytest.mark.parametrize("partition", [1, 8 * MIB, 128 * MIB, 1 << 40])
@pytest.mark.parametrize("credit", [1, 256 * MIB, 1 << 40])
def test_no_point_has_a_credit_that_holds_no_part(job, partition, credit):
    options = {"partition_bytes": partition, "credit_bytes": credit}
    job = tuning.TuningTask(job.profile, job.network, options)
    search = tuning.TUNED["tune:bytescheduler"](job)
    points = [(i / 7, j / 7) for i in range(8) for j in range(8)]
    for candidate in [*search.starts, *map(search.space.at, points)]:
        [credit] = {op.window_bytes for op in candidate.plan.ops}
        assert max(map(candidate.plan.bytes, candidate.plan.ops)) <= credit
        assert 16 * MIB <= credit <= 256 * MIB
        assert max(map(candidate.plan.bytes, candidate.plan.ops)) <= 128 * MIB


@pytest.fixture
def unhurried(monkeypatch):
    """On a busy machine, the clock must not decide what is tried."""
    monkeypatch.setattr(searches, "_PLANNING_S", math.inf)


def test_auto_tries_what_the_model_holds_for_equal_and_ddps_plan(job, unhurried):
    first, *others, usual = tuning.auto(job).starts
    assert (first.what, first.plan) == ("auto", job.plan("auto"))
    assert (usual.what, usual.plan.ops) == ("ddp", job.plan("ddp").ops)
    variants = [each.plan for each in others if each.what.startswith("auto with startups")]
    assert 1 <= len(variants) <= searches._VARIANTS
    assert len({each.plan.hash() for each in [first, *others]}) == len(others) + 1
    limit_s = job.simulated_s(first.plan) * (1 + searches._ALMOST)
    assert all(job.simulated_s(plan) <= limit_s for plan in variants)


def test_auto_tries_the_best_plans_of_other_policies(job, unhurried):
    starts = tuning.auto(job).starts
    rivals = {s.what.removeprefix("plan of "): s for s in starts if s.what.startswith("plan of ")}
    limit_s = job.simulated_s(starts[0].plan) * (1 + searches._RIVAL)
    tried = {s.plan.hash() for s in starts if s not in rivals.values()}
    steps = {}
    for policy in set(_core.policies()) - {"auto", "ddp"}:
        plan = job.plan(policy)
        alike = _core.Plan("auto", plan.tensors, plan.ops)
        if alike.hash() not in tried and job.simulated_s(plan) <= limit_s:
            steps[alike.hash()] = job.simulated_s(plan)
    best = sorted(steps.values())[: searches._RIVALS]
    assert [job.simulated_s(rival.plan) for rival in rivals.values()] == best
    assert all(rival.plan.ops == job.plan(policy).ops for policy, rival in rivals.items())
    assert rivals
    small = dataclasses.replace(job, options={"partition_bytes": 64})
    with pytest.raises(UsageError, match="parts of 64 bytes"):
        small.plan("bytescheduler")
    assert not any(s.what == "plan of bytescheduler" for s in tuning.auto(small).starts)
    coded = dataclasses.replace(job, codecs=["powersgd:2"] * len(job.profile.tensors))
    assert not any(s.what.startswith("plan of ") for s in tuning.auto(coded).starts)


def test_auto_also_tries_to_end_in_backward_where_it_may(job, unhurried):
    cheap = dataclasses.replace(job, network=job.network.scaled(1.0, 0.57))
    free = dataclasses.replace(cheap, may_end_in_backward=True)
    starts = tuning.auto(free).starts
    assert [s.overlap for s in tuning.auto(cheap).starts if s.overlap] == []
    ended = dataclasses.replace(free, overlap="backward")
    found = {s.what: s for s in starts if s.overlap == "backward"}
    assert set(found) == {"ddp", "auto, gradients final after backward"}
    plan = found["auto, gradients final after backward"].plan
    assert plan == ended.plan("auto")
    assert ended.simulated_s(plan) <= 1.05 * free.simulated_s(starts[0].plan)
    assert len({s.key for s in starts}) == len(starts)
    # Where the model says that it takes too long, it is not tried.
    slow = tuning.auto(dataclasses.replace(job, may_end_in_backward=True)).starts
    assert [s.what for s in slow if s.overlap == "backward"] == ["ddp"]


def test_auto_tries_nothing_with_shards_or_where_nothing_is_to_be_won(job):
    hidden = _core.NetworkModel.ring(16, 1e-6, 1e12)
    for alone in ({"sharded": True}, {"network": hidden}):
        other = dataclasses.replace(job, **alone)
        assert [start.plan for start in tuning.auto(other).starts] == [other.plan("auto")]


def test_auto_stops_planning_variants_in_time(job, monkeypatch):
    monkeypatch.setattr(searches, "_PLANNING_S", -1.0)
    assert [start.what for start in tuning.auto(job).starts] == ["auto", "ddp"]


def test_the_plan_that_was_measured_fastest_stays(job, unhurried):
    search = tuning.auto(job)
    for winner in search.starts:
        tuner = run(search, lambda plan, w=winner: 1.0 if plan == w.plan else 1.1)
        assert tuner.best() is winner
        assert len(tuner.trials) == len(search.starts)


def test_the_faster_half_is_measured_again(job):
    policies = ("wfbp", "ddp", "mgwfbp", "p3", "us-byte")
    starts = [tuning.Candidate(policy, job.plan(policy)) for policy in policies]
    tuner = tuning.Tuner(tuning.Search(starts, steps=7, halve=True))
    asked = []
    for time in (5, 4, 3, 2, 1, 4, 2, 1.2, 3, 1):
        asked.append(tuner.ask().what)
        tuner.tell(time)
    assert tuner.ask() is None
    assert asked == [*policies, "us-byte", "p3", "mgwfbp", "p3", "mgwfbp"]
    assert tuner.best().what == "mgwfbp"  # 5.2 s in three measurements, as against 7 s
    assert len(tuner.trials) == 5
    assert tuner.measurements == 10


def test_no_plan_wins_by_a_single_measurement(job):
    starts = [tuning.Candidate(policy, job.plan(policy)) for policy in ("wfbp", "ddp")]
    for again, best in (([1.1, 2], "ddp"), ([4, 2], "wfbp")):
        tuner = tuning.Tuner(tuning.Search(starts, steps=7, halve=True))
        asked = []
        for time in (2, 1, *again):
            asked.append(tuner.ask().what)
            tuner.tell(time)
        assert tuner.ask() is None
        assert asked == ["wfbp", "ddp", "ddp", "wfbp"]
        assert tuner.best().what == best


@pytest.mark.parametrize("policy", tuning.TRIED)
def test_equal_measurements_lead_to_equal_plans(job, policy, unhurried):
    first, second = (run(tuning.TRIED[policy](job), job.simulated_s) for _ in range(2))
    assert [(t.candidate, t.times_s) for t in first.trials] == [
        (t.candidate, t.times_s) for t in second.trials
    ]
    assert first.best() == second.best()


@pytest.mark.parametrize("policy", tuning.TUNED)
@pytest.mark.parametrize("tensors", [1, 3])
def test_no_plan_is_measured_twice(policy, tensors):
    specs = [_core.TensorSpec(f"t{i}", 1000, "float32", 1000 * i) for i in range(tensors)]
    need = [float(i) for i in range(tensors)]
    profile = _core.Profile(specs, need, [20.0 - t for t in need], 21.0)
    small = tuning.TuningTask(profile, _core.NetworkModel.ring(4, 1.0, 1e3), {})
    tuner = run(tuning.TUNED[policy](small), small.simulated_s)
    assert tuner.measurements == len(tuner.trials)
    if policy == "tune:bytescheduler":  # every size gives the same plan, but for its window
        assert {len(t.candidate.plan.ops) for t in tuner.trials} == {tensors}


def test_what_is_no_time_is_an_error(job):
    tuner = tuning.Tuner(tuning.TUNED["tune:dear"](job))
    with pytest.raises(UsageError, match="call ask"):
        tuner.tell(1.0)
    with pytest.raises(UsageError, match="measure at least one"):
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
        ub.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))]), policy="tune:dear")


@pytest.mark.parametrize(
    ("policy", "steps", "message"),
    [
        ("ddp", 4, "tune_steps needs one of the policies auto, mergecomp_online, tune:"),
        ("auto", 1, "tune_steps must be 2 at least"),
        ("tune:dear", 0, "tune_steps must be 2 at least"),
    ],
)
def test_trials_must_have_an_interval_to_time(single, policy, steps, message):
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(UsageError, match=message):
        ub.DistributedOptimizer(inner, policy=policy, tune_steps=steps)


def test_a_stopwatch_takes_the_median_without_the_first_interval():
    watch = StepTimer(5)
    for now in (100.0, 109.0, 110.0, 112.0):
        watch.step(now)
        assert not watch.done
    watch.step(115.0)
    assert watch.done
    assert watch.step_s == 2.0
    short = StepTimer(2)
    short.step(1.0)
    short.step(4.0)
    assert (short.done, short.step_s) == (True, 3.0)


def test_the_tools_take_tuned_policies_when_asked(tmp_path):
    assert parse_policy_spec("tune:dear") == ("forward", "tune:dear")
    assert parse_policy_spec("backward:tune:dear") == ("backward", "tune:dear")
    with pytest.raises(ValueError, match="unknown policy 'tune:magic'"):
        parse_policy_spec("forward:tune:magic")
    assert not any(policy in tuning.TUNED for _, policy in all_policy_specs())
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


def fixed_trials(job):
    """In place of auto's, which a job as small as here may not have."""
    plans = [job.plan(policy) for policy in ("wfbp", "ddp", "mgwfbp")]
    starts = [
        tuning.Candidate(plan.policy, _core.Plan("auto", plan.tensors, plan.ops)) for plan in plans
    ]
    return tuning.Search(starts, steps=7, halve=True)


def tunes(rank, size, cases):
    ub.init()
    tuning.TRIED["auto"] = fixed_trials
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

        def on_step(step, _model, opt, plans=plans, left=left, adapts=policy == "auto"):
            plans.append(opt.plan.hash())
            left.append(opt.decision.trial_steps if opt.decision else -1)
            assert opt.settled == (left[-1] == 0)
            if adapts and left[-1]:
                testing.simulate_step_time_change(opt)  # must not matter while plans are on trial
            elif adapts:
                assert testing.expected_step_s(opt) is None  # one interval is not enough

        steps = 2 + 2 * (trials + 2) + 3
        expected = train("ddp", "adam", rank, size, steps=steps, **variant)
        got = train(
            overlap, "adam", rank, size, steps, on_step=on_step, policy=policy, tune_steps=2,
            shard_optimizer=shard, **variant,
        )  # fmt: skip
        assert difference(got, expected) == 0, (overlap, policy, variant)
        phases = [left[0], *(b for a, b in pairwise(left) if a != b)]
        assert phases == [-1, 2, 0], phases
        tried = {plan for plan, steps in zip(plans, left, strict=True) if steps == 2}
        assert len(tried) >= (2 if policy == "auto" else 3)
        measured = [line for line in lines if ": trial " in line]
        ends = [line for line in lines if " plans tried; " in line]
        assert len(ends) == (rank == 0), lines
        assert len(measured) == left.count(2) / 2 * (rank == 0), lines
        seen += plans
    return seen


MIXED, ACCUMULATE = {"mixed": True, "set_to_none": False}, {"accumulate": 2}


@pytest.mark.parametrize(
    "cases",
    [
        [("backward", "auto", 3, False, {}), ("backward", "tune:dear", 10, False, ACCUMULATE)],
        [("forward", "auto", 3, False, ACCUMULATE), ("forward", "tune:dear", 10, False, MIXED)],
        [
            ("forward", "tune:bytescheduler", 15, False, {}),
            ("backward", "mergecomp_online", 8, False, {}),
        ],
        [("forward", "tune:dear", 10, True, MIXED)],
        [("forward", "tune:dear", 10, True, ACCUMULATE)],
    ],
    ids=["backward", "forward", "bytescheduler", "sharded", "accumulating"],
)
def test_results_stay_ddps_while_plans_are_tried(cases):
    plans = run_ranks(2, tunes, cases, timeout=120, env={"USBYTE_LEARNING_STEPS": "2"})
    assert plans[0] == plans[1]


def tries_again(rank, size):
    ub.init()
    tuning.TRIED["auto"] = fixed_trials
    drift._THRESHOLD = math.inf
    left = []

    def on_step(step, _model, opt):
        left.append(opt.decision.trial_steps if opt.plan.policy == "auto" else -1)
        if rank == 1 and left.count(-1) == 1 and left[-1] == 0:  # one rank alone notices
            testing.simulate_step_time_change(opt)

    expected = train("ddp", "adam", rank, size, steps=35)
    got = train("forward", "adam", rank, size, 35, on_step=on_step, tune_steps=2)
    assert difference(got, expected) == 0
    phases = [left[0], *(b for a, b in pairwise(left) if a != b)]
    assert phases == [-1, 2, 0, -1, 2, 0], phases


def test_a_new_plan_is_tried_against_others_too():
    run_ranks(2, tries_again, timeout=120, env={"USBYTE_LEARNING_STEPS": "2"})


def knows_its_first_trial(rank, size):
    ub.init()
    tuning.TRIED["auto"] = fixed_trials
    took = iter([4.0, 3.0, 2.0, 4.5, 2.5])  # three plans; the two fastest again
    lifecycle.StepTimer = type("Fixed", (StepTimer,), {"step_s": property(lambda _: next(took))})
    seen = []

    def on_step(_step, _model, opt):
        seen.append(
            (
                opt.decision and opt.decision.trial_steps,
                testing.expected_step_s(opt),
            )
        )

    train("forward", "adam", rank, size, 2 + 5 * 3 + 2, on_step=on_step, tune_steps=3)
    return seen


def test_drift_is_measured_from_the_first_trial():
    for seen in run_ranks(2, knows_its_first_trial, env={"USBYTE_LEARNING_STEPS": "2"}):
        assert seen[-1] == [0, 4.0]


def untried(rank, size):
    ub.init()
    tuning.TRIED["auto"] = fixed_trials
    left = []
    train(
        "forward", "adam", rank, size, 8, tune_steps=0,
        on_step=lambda _s, _m, opt: left.append(opt.decision and opt.decision.trial_steps),
    )  # fmt: skip
    return left


def test_auto_tries_nothing_when_told_so():
    left, _ = run_ranks(2, untried, timeout=120, env={"USBYTE_LEARNING_STEPS": "2"})
    assert left[-1] == 0
    assert set(left) == {None, 0}

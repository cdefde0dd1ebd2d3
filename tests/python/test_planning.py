# SPDX-License-Identifier: Apache-2.0
"""Learning, probing, planning, and planning anew while training goes on."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _models import difference, train
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import UsageError
from usbyte.planning.cost_fit import Measured, fit
from usbyte.torch import testing
from usbyte.torch.comm.pack_buffers import PackBufferPool
from usbyte.torch.plan.drift import StepTimeMonitor
from usbyte.torch.plan.measurement import NEVER, Iteration, StepProfiler


def every_policy(rank, size, tolerance, double):
    ub.init()
    expected = train("ddp", "adamw", rank, size, steps=9, double=double)
    for policy in _core.policies():
        got = train(
            "forward", "adamw", rank, size, steps=9, policy=policy, double=double,
            partition_bytes=2048, bucket_bytes=4096,
        )  # fmt: skip
        assert difference(got, expected) <= tolerance, policy


def test_every_policy_equals_ddp_bit_for_bit():
    env = {"USBYTE_LEARNING_STEPS": "2"}
    run_ranks(2, every_policy, 0.0, False, timeout=180, env=env)


def test_every_policy_equals_ddp_closely_on_four_ranks():
    env = {"USBYTE_LEARNING_STEPS": "2"}
    run_ranks(4, every_policy, 1e-6, True, timeout=280, env=env)


def in_thirds(profile, _network):
    """Every third tensor of one dtype in one op: nothing but operations of many blocks."""
    by_dtype = {}
    for t in profile.tensors:
        by_dtype.setdefault(t.dtype, []).append((t.offset, t.end))
    ops = [
        _core.Op("all_reduce", blocks[first::3], 1 << 62)
        for blocks in by_dtype.values()
        for first in range(min(len(blocks), 3))
    ]
    return _core.Plan("thirds", profile.tensors, ops)


def packs(rank, size, tolerance, double):
    ub.init()
    expected = train("ddp", "adam", rank, size, steps=12, double=double)
    got = train("forward", "adam", rank, size, steps=12, policy=in_thirds, double=double)
    assert difference(got, expected) <= tolerance


def test_operations_of_many_blocks_equal_ddp():
    run_ranks(2, packs, 0.0, False, env={"USBYTE_LEARNING_STEPS": "2"})
    run_ranks(4, packs, 1e-6, True, env={"USBYTE_LEARNING_STEPS": "2"})


def test_memory_to_pack_in_is_kept_for_as_many_as_are_in_flight():
    staging = PackBufferPool()
    flat_buffer = torch.arange(12.0)
    first = staging.pack([flat_buffer[:2], flat_buffer[6:9]])
    second = staging.pack([flat_buffer[2:4], flat_buffer[5:6]])
    assert first.message.tolist() == [0, 1, 6, 7, 8]
    assert second.message.tolist() == [2, 3, 5]
    assert first.buffer is not second.buffer
    first.message.neg_()
    staging.unpack(first)
    assert flat_buffer.tolist() == [0, -1, 2, 3, 4, 5, -6, -7, -8, 9, 10, 11]
    staging.unpack(second)
    doubles = staging.pack([torch.ones(1, dtype=torch.float64)])
    assert doubles.buffer is second.buffer  # the smallest that fits
    assert doubles.message.tolist() == [1]
    again = staging.pack([flat_buffer[0:2], flat_buffer[3:6]])
    assert again.buffer is first.buffer
    # One that is too small gives way; one that is not unpacked is nobody's.
    staging.unpack(again)
    larger = staging.pack([flat_buffer[0:5], flat_buffer[6:]])
    assert larger.message.tolist() == [*flat_buffer[0:5].tolist(), *flat_buffer[6:].tolist()]
    staging.unpack(larger)
    assert [buffer is larger.buffer for buffer in staging._free] == [True]


def replans(rank, size):
    ub.init()
    for mode in ("backward", "forward"):
        plans = []

        def on_step(step, _model, opt, plans=plans):
            plans.append(opt.plan.policy)
            if step == 6 and rank == 1:  # one rank alone notices
                testing.simulate_step_time_change(opt)

        expected = train("ddp", "adam", rank, size, steps=16)
        got = train(mode, "adam", rank, size, steps=16, on_step=on_step, tune_steps=0)
        assert difference(got, expected) == 0, mode
        learning, auto = ["learning"], ["auto"]
        # Two steps are learned, the next ones planned; step 7 votes, step 8 hears it.
        assert plans == learning + 7 * auto + 2 * learning + 6 * auto, plans


def test_a_new_plan_in_the_middle_changes_no_number():
    run_ranks(2, replans, timeout=120, env={"USBYTE_LEARNING_STEPS": "2"})


def decides(rank, size):
    ub.init()
    network = ub.probe((1 << 16) - 3)
    assert network.ranks == size
    assert all(cost.beta_s_per_byte > 0 for cost in network.all_reduce)
    assert network.reduce_scatter
    assert network.all_gather
    texts = ub.allgather(torch.tensor([hash(network.to_json()) % 1000]))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    opt = ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), overlap="forward")
    for _ in range(6):
        assert opt.decision is None
        opt.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        opt.step()
        if opt.plan.policy == "auto":
            break
    decision = opt.decision
    assert decision.plan == opt.plan
    assert decision.predicted_s >= decision.bound_s >= decision.profile.iteration_s > 0
    names = [t.name for t in decision.profile.tensors]
    assert names[0] == "usbyte.used"
    first, last = names.index("group0.param0"), names.index("group0.param3")
    assert decision.profile.need_s[first] < decision.profile.need_s[last]
    assert decision.profile.ready_s[first] > decision.profile.ready_s[last]
    return [network.to_json(), decision.to_json(), texts.numel()]


def test_all_ranks_know_the_same_network_and_decision():
    answers = run_ranks(3, decides, timeout=60)
    assert answers[0] == answers[1] == answers[2]


def fails_to_plan(rank, size):
    ub.init()
    made = []

    def policy(profile, network):
        made.append(profile)
        tensors = [_core.TensorSpec(t.name, t.numel + 1, offset=0) for t in profile.tensors[:1]]
        wrong = [None, _core.Plan("mine", tensors, [_core.Op("all_reduce", [(0, tensors[0].end)])])]
        if len(made) <= len(wrong):
            return wrong[len(made) - 1]
        return _core.make_plan("wfbp", profile, network)

    model = nn.Linear(3, 2, bias=False)
    opt = ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), policy=policy)
    errors = []
    for step in range(6):
        opt.zero_grad()
        model(torch.full((1, 3), float(step + rank))).sum().backward()
        # What the ranks agree on, also after a probe without a plan.
        assert torch.equal(model.weight.grad, torch.full((2, 3), step + 0.5))
        try:
            opt.step()
        except UsageError as error:
            errors.append(str(error))
    return [errors, opt.plan.policy]


def test_training_goes_on_when_no_plan_comes_of_a_probe():
    answers = run_ranks(2, fails_to_plan, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})
    for errors, policy in answers:
        assert policy == "wfbp"
        assert "the policy gave a NoneType instead of a Plan" in errors[0]
        assert "the policy's plan is not for the profile's tensors" in errors[1]
        assert len(errors) == 2


def calls_a_closure(rank, size):
    ub.init()
    model = nn.Linear(2, 2)
    opt = ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def closure():
        opt.zero_grad()
        time.sleep(0.3)  # what the step computes, long enough to be told from an update
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    while opt.decision is None:
        opt.step(closure)
    return opt.decision.profile.update_s


def test_a_closure_is_no_part_of_the_update():
    for update_s in run_ranks(2, calls_a_closure, timeout=60, env={"USBYTE_LEARNING_STEPS": "6"}):
        assert 0 < update_s < 0.3


def test_one_process_needs_no_probe(single):
    assert ub.probe().ranks == 1
    assert ub.DistributedOptimizer(
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)
    ).decision is None  # fmt: skip


def test_learning_takes_medians_and_leaves_out_the_first_step_and_the_network():
    learning = StepProfiler()
    # Forward begins at 0, 100, 110, 121: steps of 10, 10, 11 s, of which 2 s wait for the network.
    for start, slow in [(0.0, 50.0), (100.0, 0.0), (110.0, 0.0), (121.0, 1.0)]:
        need = [start, NEVER, start + 1]
        ready = [start + 6 + slow, start + 5, start + 4]
        learning.add(Iteration(need, ready, comm_wait_s=2.0, update_s=0.5))
    times = learning.times()
    assert times.need_s == [0.0, 0.0, 1.0]
    assert times.ready_s == [6.0, 5.0, 4.0]
    assert times.update_s == 0.5
    assert times.step_s == pytest.approx(8.5)
    assert times.ready_spread_s[0] > times.ready_spread_s[1] == 0


def test_the_windows_of_a_probe_become_costs_by_ops_in_flight():
    rows = [
        Measured("all_reduce", window, size, window * 1e-3 + size * 1e-8)
        for window in (1, 2, 4)
        for size in (1, 100_000_000)
    ] + [Measured("all_gather", 1, 10, 1.0), Measured("reduce_scatter", 1, 10, 2.0)]
    network = fit(4, rows)
    alphas = [cost.alpha_s for cost in network.all_reduce]
    assert alphas == pytest.approx([1e-3, 2e-3, 4e-3, 4e-3], rel=1e-3)
    assert network.all_gather == [_core.AlphaBeta(0, 0.1)]


def drive(drift, step_s, steps, now=0.0):
    """Steps of that time until a new plan is wanted; returns how many, and the time."""
    for k in range(steps):
        now += step_s
        drift.step(now)
        if drift.wanted:
            return k + 1, now
    return None, now


def test_drift_wants_a_plan_soon_after_steps_have_changed_for_good():
    drift = StepTimeMonitor()
    drift.reset()
    quiet, now = drive(drift, 1.0, 20)  # not many after the first plan
    assert quiet is None
    assert drift.baseline_s == pytest.approx(1.0)
    after, now = drive(drift, 4.0, 30, now)
    assert after is not None
    drift.reset()
    assert drive(drift, 4.0, 500, now)[0] is None


def test_drift_waits_until_a_plan_would_have_been_paid():
    for step_s, cost_s in ((1.5, 30.0), (0.5, 30.0), (4.0, 300.0)):
        drift = StepTimeMonitor()
        drift.cost_s = cost_s
        drift.reset(1.0)
        after, _ = drive(drift, step_s, 1000)
        lost_s = after * abs(step_s - 1.0)
        assert cost_s <= lost_s <= 1.2 * cost_s + 8 * abs(step_s - 1.0), (step_s, cost_s)


def test_drift_knows_what_steps_took_on_trial():
    drift = StepTimeMonitor()
    drift.reset(1.0)
    assert drive(drift, 1.0, 100)[0] is None
    drift = StepTimeMonitor()
    drift.reset(1.0)
    assert drive(drift, 1.5, 30)[0] is not None  # the network became slower while plans were tried


def test_drift_bears_noise_and_short_changes():
    drift = StepTimeMonitor()
    drift.reset()
    now = 0.0
    for k in range(400):
        now += 1.0 + 0.2 * (k % 3) + (5.0 if k % 7 == 0 else 0.0)
        drift.step(now)
        assert not drift.wanted
    _, now = drive(drift, 3.0, 6, now)
    assert drive(drift, 1.2, 100, now)[0] is None


def test_drift_asks_ever_more_seldom_where_steps_vary_by_nature():
    drift = StepTimeMonitor()
    drift.reset()
    now, asked = 0.0, []
    for k in range(3000):
        now += 1.0 if (k // 40) % 2 else 2.0
        drift.step(now)
        if drift.wanted:
            asked.append(k)
            drift.reset()
    gaps = [b - a for a, b in pairwise(asked)]
    assert 2 <= len(asked) <= 6
    assert gaps == sorted(gaps)

# SPDX-License-Identifier: Apache-2.0
"""States that are enums: which may follow which, and what the parts do to be in them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from usbyte import _core
from usbyte._util.transitions import advance
from usbyte.errors import Error, FaultError
from usbyte.torch.compression.state import COMMIT_TRANSITIONS, CodecState, CommitPhase
from usbyte.torch.fault.decision import RecoveryDecision
from usbyte.torch.fault.update_guard import (
    FAULT_TRANSITIONS,
    UPDATE_TRANSITIONS,
    UpdateGuard,
    UpdatePhase,
)
from usbyte.torch.optimizer.gradients.step_phase import TRANSITIONS
from usbyte.torch.plan.decision import Decision
from usbyte.torch.plan.lifecycle import PLAN_TRANSITIONS, PlanLifecycle, PlanPhase
from usbyte.torch.runtime.device import Device

TABLES = [TRANSITIONS, UPDATE_TRANSITIONS, FAULT_TRANSITIONS, COMMIT_TRANSITIONS, PLAN_TRANSITIONS]


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_every_state_and_none_is_out_of_reach(table):
    states = list(type(next(iter(table))))
    assert list(table) == states
    reached, new = set(), {states[0]}
    while new:
        reached |= new
        new = set().union(*(table[state] for state in new)) - reached
    assert reached == set(states)


@pytest.mark.parametrize("table", TABLES)
def test_other_changes_are_errors_that_name_both_states(table):
    for before, after in product(table, table):
        if after is before or after in table[before]:
            assert advance("a step", table, before, after) is after
        else:
            with pytest.raises(Error, match=r"a step cannot go from '.*' to '.*'.*bug") as raised:
                advance("a step", table, before, after)
            assert f"from '{before.value}' to '{after.value}'" in str(raised.value)


def progress(guard):
    """Its progress after a fault: completed steps, and whether no update is going on."""
    seen = []
    guard.block_reads("lost", [torch.ones(1)], lambda completes: None)
    found = guard.progress(lambda is_quiet: [seen.append(is_quiet), (False, False)][1])
    return found.completed, seen[0]


def test_a_guard_counts_steps_at_once_and_deferred_ones():
    guard = UpdateGuard()
    phases = []

    def note():
        phases.append(guard.phase)

    guard.step(note, None, False)
    assert guard.phase is UpdatePhase.IDLE
    guard.count_step()
    guard.defer_all()
    for left in (1, 0):
        guard.step(note, None, False)
        assert guard.phase is UpdatePhase.PENDING
        guard.count_applied(left)
    assert phases == [UpdatePhase.STEPPING, UpdatePhase.APPLYING, UpdatePhase.APPLYING]
    assert guard.phase is UpdatePhase.IDLE
    guard.count_applied(0)
    assert guard.completed == 2
    assert progress(guard) == (2, True)


def test_updates_may_be_applied_and_dropped_inside_of_others():
    guard = UpdateGuard()
    guard.defer_all()

    def outer():
        guard.step(lambda: None, None, False)
        guard.count_applied(0)  # all others

    guard.step(outer, None, False)
    guard.count_applied(0)
    assert (guard.phase, guard.completed) == (UpdatePhase.IDLE, 1)
    guard.defer_all()
    guard.step(guard.forget, None, False)
    guard.count_applied(0)
    assert (guard.phase, guard.completed) == (UpdatePhase.IDLE, 1)


def test_a_step_that_a_fault_interrupts_is_not_quiet():
    guard = UpdateGuard()
    found = []
    guard.step(lambda: found.append(progress(guard)), None, False)
    assert found == [(0, False)]


def test_after_a_fault_only_pending_updates_may_run():
    guard = UpdateGuard()
    with guard.updating():
        pass
    guard.block_reads("rank 1 is lost", [torch.ones(1)], lambda completes: None)
    with pytest.raises(FaultError, match="rank 1 is lost"), guard.updating():
        pass
    guard.apply_decision("rank 1 is lost", RecoveryDecision("", completes=True))
    with guard.updating_after_fault():
        pass
    with guard.updating():
        pass


def codec_state():
    specs = [_core.TensorSpec("w", 1024, "float32", 0)]
    ops = [_core.Op("all_reduce", [(0, 1024)], codec="efsignsgd")]
    state = CodecState()
    state.lay_out(_core.Plan("mine", specs, ops))
    return state


def test_codec_state_is_lost_only_between_a_step_and_its_update():
    state = codec_state()
    state.mark_partial_step()
    assert state.phase is CommitPhase.COMMITTED
    for _ in range(2):  # a step may be left out
        state.begin_step()
    state.commit()
    state.commit()
    state.mark_partial_step()
    assert state.phase is CommitPhase.COMMITTED
    assert state.state()
    state.begin_step()
    state.mark_partial_step()
    assert state.phase is CommitPhase.LOST
    assert not state.state()
    state.load({}, 0)
    assert state.phase is CommitPhase.COMMITTED


class Uses:
    """As the forward pre-hooks."""

    needed = (0.0,)

    def begin_iteration(self, used):
        pass

    def begin_learning(self):
        pass


class Maker:
    """A planner whose candidates are all the same plan."""

    def __init__(self, plan, trials):
        self.plan, self.trials = plan, trials

    def learning_plan(self):
        return self.plan

    def recodes_at(self, steps):
        return False

    def is_outdated(self, rows):
        return False

    def decision(self, trial_steps):
        return Decision(self.plan, None, None, 1.0, 1.0, trial_steps)

    def next_trial(self, step_s):
        self.trials -= 1
        return self.decision(3 if self.trials > 0 else 0)


def test_a_plan_is_learned_tried_and_learned_anew():
    specs = [_core.TensorSpec("w", 1, "float32", 0)]
    plan = _core.Plan("mine", specs, [_core.Op("all_reduce", [(0, 1)])])
    maker = Maker(plan, trials=2)
    cycle = PlanLifecycle(
        maker, Uses(), Device(), 2, adapt=False, may_ask=True, on_learned=lambda: None
    )
    phases = []

    def step(k):
        wanted = cycle.end_backward()
        cycle.record_votes(wanted, joined=False)
        cycle.end_step(k, plan, 0.0, [True], lambda: [1.0], lambda times, rows: maker.decision(3))
        phases.append(cycle.phase)
        assert cycle.learning == (cycle.phase is PlanPhase.LEARNING)

    for k in range(10):
        step(k)
    learns, tries, final = PlanPhase.LEARNING, PlanPhase.ON_TRIAL, PlanPhase.FINAL
    assert phases == [learns, *[tries] * 6, *[final] * 3]
    cycle.ask_for_plan()
    assert cycle.end_backward()
    cycle.record_votes(True, joined=False)
    assert cycle.phase is PlanPhase.ENDING
    assert cycle.plan_ends(11)
    step(11)
    assert cycle.phase is learns
    step(12)
    step(13)
    assert cycle.phase is tries

# SPDX-License-Identifier: Apache-2.0
"""The plan lifecycle: learning, trials of plans, and new plans after a change of the job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from usbyte import _core
from usbyte._util.transitions import advance
from usbyte.torch.plan.decision import Decision
from usbyte.torch.plan.drift import StepTimeMonitor
from usbyte.torch.plan.measurement import Iteration, JobTimes, StepProfiler
from usbyte.torch.plan.sparse import Counts, DensityMonitor, RowCounts
from usbyte.torch.plan.stopwatch import StepTimer
from usbyte.torch.runtime.device import Device, Mark

log = logging.getLogger("usbyte")


class ParameterUseTracker(Protocol):
    """Records when the forward pass needs each parameter."""

    @property
    def needed(self) -> list[Mark | None]:
        """First use of each parameter in the current iteration; None if it was not used yet."""

    def begin_iteration(self, used: Sequence[bool]) -> None:
        """Discards the times of the previous iteration.

        Args:
            used: Whether each parameter got a gradient in that iteration.
        """

    def begin_learning(self) -> None:
        """Starts to record the uses of parameters."""


class PlanMaker(Protocol):
    """The part of `Planner` that the plan lifecycle uses."""

    def learning_plan(self) -> _core.Plan:
        """Returns the plan of the learning steps."""

    def recodes_at(self, steps: int) -> bool:
        """Returns True if a codec changes its parameters after `steps` completed steps."""

    def recoded(self, steps: int) -> _core.Plan:
        """Returns the plan in force with its codecs as they are after `steps` completed steps."""

    def next_trial(self, step_s: float) -> Decision:
        """Returns the next candidate or, after the last, the best one. Collective.

        Args:
            step_s: Measured seconds of a step under the candidate on trial.
        """

    def is_outdated(self, rows: Mapping[str, Counts]) -> bool:
        """Returns True if other schemes would be clearly faster for these counts of rows."""


class PlanPhase(Enum):
    """What the plan in force is there for."""

    LEARNING = "the learning plan is in force, and its steps are measured"
    ON_TRIAL = "a candidate is in force, and its steps are timed"
    FINAL = "a plan is in force until ranks want another one"
    ENDING = "all ranks start to learn again after this step"


PLAN_TRANSITIONS: dict[PlanPhase, frozenset[PlanPhase]] = {
    PlanPhase.LEARNING: frozenset({PlanPhase.ON_TRIAL, PlanPhase.FINAL}),
    PlanPhase.ON_TRIAL: frozenset({PlanPhase.FINAL, PlanPhase.ENDING}),
    PlanPhase.FINAL: frozenset({PlanPhase.ENDING}),
    PlanPhase.ENDING: frozenset({PlanPhase.LEARNING}),
}


class PlanLifecycle:
    """Decides after which step another plan comes into force, and which one.

    The ranks measure the first `learning_steps` steps. Then rank 0 makes a plan for all ranks. If
    the plan is on trial, other candidates follow, each after the same number of steps on all ranks.

    Each step carries a vote of every rank on a new plan. If a rank wants one, all ranks start to
    learn again. A rank votes for a new plan after `ask_for_plan`. With `adapt`, it also does so
    when the step time or the number of rows of sparse gradients has changed for good.

    Args:
        planner: Makes the plans.
        uses: Records when the forward pass uses each parameter.
        device: Device of the parameters.
        learning_steps: Number of steps to measure.
        adapt: Whether to plan again when the step time or the number of rows of sparse gradients
            changes. Not during trials.
        may_ask: Whether any rank may call `ask_for_plan`; the same on all ranks.
        on_learned: Called after the last learning step, before the ranks plan.

    Attributes:
        phase: What the plan in force is there for.
        learning: Whether the learning plan is in force; follows from `phase`.
    """

    def __init__(
        self,
        planner: PlanMaker,
        uses: ParameterUseTracker,
        device: Device,
        learning_steps: int,
        adapt: bool,
        may_ask: bool,
        on_learned: Callable[[], None],
    ) -> None:
        self._planner, self._uses, self._device = planner, uses, device
        self._learning_steps, self._on_learned = learning_steps, on_learned
        self._votes_count = adapt or may_ask
        self._step_time_monitor = StepTimeMonitor() if adapt else None
        self._density_monitor = DensityMonitor(planner.is_outdated)
        self._profiler = StepProfiler()  # of the learning steps
        self.phase, self.learning = PlanPhase.LEARNING, True
        self._counts = RowCounts()
        # (start, end) of each wait for gradients since the last backward pass.
        self._waits: list[tuple[Mark, Mark]] = []
        self._waited_until: Mark = 0.0  # end of the last wait for gradients
        self._fresh = False  # a backward pass has ended since the last step
        self._timer: StepTimer | None = None  # None unless a plan is on trial
        self._first_s: float | None = None  # seconds of a step of the first plan on trial
        self._first_kind: tuple[str, frozenset[str]] | None = None  # `_kind_of` that plan
        self._asked = False  # this rank wants a new plan

    def _advance(self, phase: PlanPhase) -> None:
        self.phase = advance("a plan", PLAN_TRANSITIONS, self.phase, phase)
        self.learning = phase is PlanPhase.LEARNING
        if phase is not PlanPhase.ON_TRIAL:
            self._timer = None

    def plan_ends(self, steps: int) -> bool:
        """Returns True if the plan in force ends with the step that is about to be taken.

        The result is the same on all ranks.

        Args:
            steps: Number of steps begun so far, including that one.
        """
        return (
            self.phase is PlanPhase.ENDING
            or (self._timer is not None and self._timer.done)
            or self._planner.recodes_at(steps)
        )

    def waited(self, start: Mark, end: Mark) -> None:
        """Records a wait for gradients, from `start` to `end`. For learning steps."""
        self._waited_until = end
        self._waits.append((start, end))

    def count_rows(self, name: str, own: int, every: int) -> None:
        """Records the number of rows of a sparse gradient in a step.

        Args:
            name: Name of the parameter.
            own: Rows of this rank's gradient.
            every: Rows of the sum over all ranks.
        """
        if self.learning or self._step_time_monitor is not None:
            self._counts.add(name, own, every)

    def ask_for_plan(self) -> None:
        """Makes this rank vote for a new plan in each step until there is one.

        The votes have an effect only with `may_ask` or `adapt`.
        """
        self._asked = True

    def record_votes(self, wanted: bool, joined: bool) -> None:
        """Processes the votes of a step; they are the same on all ranks.

        Args:
            wanted: Whether any rank voted for a new plan.
            joined: Whether any rank had joined. Such a rank may have skipped an earlier step that
                other ranks measured. Learning therefore starts again.
        """
        if self.learning:
            if joined:
                self._profiler = StepProfiler()
        elif wanted and self._votes_count:
            self._advance(PlanPhase.ENDING)

    def end_backward(self) -> bool:
        """Records the end of a backward pass that sends gradients.

        Returns:
            Whether this rank votes for a new plan in this step.
        """
        self._fresh = True
        self._waits.clear()
        if self._timer is not None:
            self._timer.step(self._device.now())
            return False
        wanted = self._asked
        if self._step_time_monitor is not None and not self.learning:
            self._step_time_monitor.step(self._device.now())
            wanted = (
                self._density_monitor.wants_plan(self._counts)
                or self._step_time_monitor.wanted
                or wanted
            )
        return wanted

    def affects_plan(self, steps: int) -> bool:
        """Returns True if the completed step is a learning step or the last step of a plan.

        Args:
            steps: Number of steps begun so far, as for `plan_ends`.
        """
        return (self.learning and self._fresh) or self.plan_ends(steps)

    def plan_boundary_next(self, steps: int) -> bool:
        """Returns True if the end of this step makes a plan or switches to another one.

        Args:
            steps: Number of steps begun so far, as for `plan_ends`.
        """
        learned = self.learning and len(self._profiler) + 1 >= self._learning_steps
        return (learned and self._fresh) or self.plan_ends(steps)

    def skip_step(self, used: Sequence[bool]) -> None:
        """Ends a step that not all ranks have taken. It is not measured, and no plan ends with it.

        Args:
            used: Whether each parameter got a gradient.
        """
        self._fresh = False
        if self.learning:
            self._uses.begin_iteration(used)

    def end_step(
        self,
        steps: int,
        plan: _core.Plan,
        began: Mark,
        used: Sequence[bool],
        ready_s: Callable[[], Sequence[float]],
        decide: Callable[[JobTimes, Mapping[str, Counts]], Decision],
    ) -> _core.Plan | None:
        """Ends a step and returns the plan of the next step.

        Collective in a step that ends a plan. Call it when the engine is drained and no update is
        pending.

        Args:
            steps: Number of completed steps.
            plan: The plan in force.
            began: Start of the optimizer's `step()`. A closure may run backward after that.
            used: Whether each parameter got a gradient.
            ready_s: Returns the ready time of each parameter's gradient, in seconds of the steady
                clock.
            decide: Collective; makes one plan for all ranks from this rank's times and the counts
                of rows of its sparse gradients.

        Returns:
            The plan to switch to, the same on all ranks; None if the plan in force stays.
        """
        following = self._next_plan(plan, began, used, ready_s, decide)
        if self._planner.recodes_at(steps):  # also if `following` is a new plan
            following = self._planner.recoded(steps)
            if self._step_time_monitor is not None and not self.learning:
                self._step_time_monitor.reset()
        return following

    def _next_plan(
        self,
        plan: _core.Plan,
        began: Mark,
        used: Sequence[bool],
        ready_s: Callable[[], Sequence[float]],
        decide: Callable[[JobTimes, Mapping[str, Counts]], Decision],
    ) -> _core.Plan | None:
        if self.phase is PlanPhase.ENDING:
            self._asked = self._fresh = False
            log.info(
                "measuring again, because the step time or the rows of gradients changed, or other "
                "threads use parameters"
            )
            self._advance(PlanPhase.LEARNING)
            self._profiler = StepProfiler()
            self._counts.take()
            self._uses.begin_learning()
            return self._planner.learning_plan()
        if self._timer is not None and self._timer.done:
            took_s = self._timer.step_s
            if self._first_s is None and self._timer.steady:
                self._first_s, self._first_kind = took_s, _kind_of(plan)
            return self._follow(self._planner.next_trial(took_s), plan)
        if not (self.learning and self._fresh):
            return None
        self._fresh = False
        updated_s = float(self._device.now()) - max(float(began), float(self._waited_until))
        waited_s = sum(float(end) - float(start) for start, end in self._waits)
        self._profiler.add(Iteration.of(self._uses.needed, ready_s(), waited_s, updated_s))
        self._device.anchor()
        self._uses.begin_iteration(used)
        if len(self._profiler) < self._learning_steps:
            return None
        times = self._profiler.times()
        self._on_learned()
        start = time.monotonic()
        decision = decide(times, self._counts.take())
        if self._step_time_monitor is not None:
            self._step_time_monitor.cost_s = time.monotonic() - start
        self._first_s = None
        return self._follow(decision, plan)

    def _follow(self, decision: Decision, before: _core.Plan) -> _core.Plan | None:
        plan = decision.plan
        self._advance(PlanPhase.ON_TRIAL if decision.trial_steps else PlanPhase.FINAL)
        if decision.trial_steps:
            self._timer = StepTimer(decision.trial_steps)
        # A plan with overlap "backward" fulfils the request.
        self._asked = self._asked and decision.overlap == "forward"
        if self._step_time_monitor is not None and self._timer is None:
            # Plans of one kind take about as long. The first trial is therefore a baseline that
            # also shows a change of the network since then.
            alike = self._first_s is not None and _kind_of(plan) == self._first_kind
            self._step_time_monitor.reset(self._first_s if alike else None)
            self._density_monitor.reset()
            self._counts.take()
        return plan if plan.hash() != before.hash() else None


def _kind_of(plan: _core.Plan) -> tuple[str, frozenset[str]]:
    """Returns the policy and the codecs of a plan. Plans with equal results take about as long."""
    return plan.policy, frozenset(op.codec for op in plan.ops)

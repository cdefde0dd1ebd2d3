# SPDX-License-Identifier: Apache-2.0
"""How long plans stay in force: jobs are learned, plans are tried, and steps are watched."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from usbyte import _core
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
        """By parameter, when it was first used in the current iteration; None: not yet."""

    def begin_iteration(self, used: Sequence[bool]) -> None:
        """Forgets the times of the iteration before.

        Args:
            used: By parameter, whether it got a gradient in it.
        """

    def begin_learning(self) -> None:
        """Records uses from now on."""


class PlanMaker(Protocol):
    """The planner, as far as plans follow one another."""

    def learning_plan(self) -> _core.Plan:
        """Returns the plan of steps that are learned from."""

    def recodes_at(self, steps: int) -> bool:
        """Returns True if codecs change after so many steps."""

    def recoded(self, steps: int) -> _core.Plan:
        """Returns the plan in force with the codecs that follow."""

    def next_trial(self, step_s: float) -> Decision:
        """Returns the next candidate, told how long a step took under the last one. Collective."""

    def is_outdated(self, rows: Mapping[str, Counts]) -> bool:
        """Returns True if another scheme would be faster for these counts of rows."""


class PlanLifecycle:
    """Says after which step another plan comes into force, and which.

    The first `learning_steps` steps are learned from; then all ranks agree on a plan. If it is on
    trial, others follow, each after a number of steps that all ranks count. So it goes again when
    a rank asks for that, if it may, or, if `adapt`, when steps come to take another time or sparse
    gradients to have other rows; ranks vote in each step.

    Args:
        planner: Makes the plans.
        uses: Knows when the forward pass needs each parameter.
        device: Where the parameters are.
        learning_steps: Steps to learn from.
        adapt: Learn and plan anew when the time of a step changes, or how many rows sparse
            gradients have, but not while on trial.
        may_ask: Some rank may `ask_for_plan`.
        on_learned: Called when all ranks have learned enough, before they plan.

    Attributes:
        learning: True until a plan is made from measurements.
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
        self._profiler: StepProfiler | None = StepProfiler()
        self.learning = True
        self._counts = RowCounts()
        self._waits: list[tuple[Mark, Mark]] = []  # for the network, after the last backward
        self._settled: Mark = 0.0  # when that was over
        self._fresh = False  # a backward pass has ended since the last step
        self._stopwatch: StepTimer | None = None  # while a plan is on trial
        self._first_s: float | None = None  # a step of the first plan on trial
        self._first_kind: tuple[str, frozenset[str]] | None = None  # of that plan
        self._asked = False  # for a new plan, by this rank
        self._agreed = False  # on a new plan, by all

    def plan_ends(self, steps: int) -> bool:
        """On all ranks, the plan in force ends with the step that is about to be taken.

        Args:
            steps: Begun so far, that one included.
        """
        return (
            self._agreed
            or (self._stopwatch is not None and self._stopwatch.done)
            or self._planner.recodes_at(steps)
        )

    def waited(self, start: Mark, end: Mark) -> None:
        """While learning: gradients were waited for, from `start` to `end`."""
        self._settled = end
        self._waits.append((start, end))

    def count_rows(self, name: str, own: int, every: int) -> None:
        """Takes the rows of the sparse gradient of that name: this rank's own, and the sum's."""
        if self._profiler is not None or self._step_time_monitor is not None:
            self._counts.add(name, own, every)

    def ask_for_plan(self) -> None:
        """This rank votes for a new plan from now on, until there is one; needs `may_ask`."""
        self._asked = True

    def record_votes(self, wanted: bool, joined: bool) -> None:
        """What ranks have voted for in a step, on all ranks alike.

        Args:
            wanted: Some, for a new plan.
            joined: Some had joined, and may have left out a step before that others learned from.
        """
        if self._profiler is None:
            self._agreed = self._agreed or (wanted and self._votes_count)
        elif joined:
            self._profiler, self.learning = StepProfiler(), True

    def end_backward(self) -> bool:
        """A backward pass that sends ends, which counts; returns whether to vote for a new plan."""
        self._fresh = True
        self._waits.clear()
        if self._stopwatch is not None:
            self._stopwatch.step(self._device.now())
            return False
        wanted = self._asked
        if self._step_time_monitor is not None and self._profiler is None:
            self._step_time_monitor.step(self._device.now())
            wanted = (
                self._density_monitor.wants_plan(self._counts)
                or self._step_time_monitor.wanted
                or wanted
            )
        return wanted

    def affects_plan(self, steps: int) -> bool:
        """The step that is completed is learned from, or ends a plan; see `plan_ends`."""
        return (self._profiler is not None and self._fresh) or self.plan_ends(steps)

    def plan_boundary_next(self, steps: int) -> bool:
        """To complete the step is to plan, with all ranks, or to go over to another plan."""
        learned = self._profiler is not None and len(self._profiler) + 1 >= self._learning_steps
        return (learned and self._fresh) or self.plan_ends(steps)

    def skip_step(self, used: Sequence[bool]) -> None:
        """A step is completed that not all ranks count: nothing is learned from it, no plan ends.

        Args:
            used: By parameter, whether it got a gradient.
        """
        self._fresh = False
        if self._profiler is not None:
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
        """The plan to go over to now, which all ranks have alike; None if the old one stays.

        Collective where a plan ends. To be called when everything is drained and no update is
        pending.

        Args:
            steps: Completed so far.
            plan: The one in force.
            began: When the optimizer's step began; a closure may have run backward in it.
            used: By parameter, whether it got a gradient.
            ready_s: Gives, by parameter, when its gradient was ready, steady clock seconds.
            decide: Has all ranks agree on a plan, from this rank's times and how many rows its
                sparse gradients had.
        """
        following = self._next_plan(plan, began, used, ready_s, decide)
        if self._planner.recodes_at(steps):  # of what follows, if anything does
            following = self._planner.recoded(steps)
            if self._step_time_monitor is not None and self._profiler is None:
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
        if self._agreed:
            self._agreed = self._asked = self._fresh = False
            log.info(
                "learning anew, as steps take another time, gradients have other rows, or other "
                "threads use parameters"
            )
            self._profiler, self.learning = StepProfiler(), True
            self._counts.take()
            self._uses.begin_learning()
            return self._planner.learning_plan()
        if self._stopwatch is not None and self._stopwatch.done:
            took_s = self._stopwatch.step_s
            if self._first_s is None and self._stopwatch.steady:
                self._first_s, self._first_kind = took_s, _kind_of(plan)
            return self._follow(self._planner.next_trial(took_s), plan)
        if self._profiler is None or not self._fresh:
            return None
        self._fresh = False
        updated_s = float(self._device.now()) - max(float(began), float(self._settled))
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
        self._profiler, self.learning = None, False
        self._first_s = None
        return self._follow(decision, plan)

    def _follow(self, decision: Decision, before: _core.Plan) -> _core.Plan | None:
        plan = decision.plan
        self._stopwatch = StepTimer(decision.trial_steps) if decision.trial_steps else None
        self._asked = self._asked and decision.overlap == "forward"  # else it has been answered
        if self._step_time_monitor is not None and self._stopwatch is None:
            # Those of a kind take about as long, unless the network has changed since.
            alike = self._first_s is not None and _kind_of(plan) == self._first_kind
            self._step_time_monitor.reset(self._first_s if alike else None)
            self._density_monitor.reset()
            self._counts.take()
        return plan if plan.hash() != before.hash() else None


def _kind_of(plan: _core.Plan) -> tuple[str, frozenset[str]]:
    """Plans of one kind take about as long."""
    return plan.policy, frozenset(op.codec for op in plan.ops)

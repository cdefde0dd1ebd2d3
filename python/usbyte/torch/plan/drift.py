# SPDX-License-Identifier: Apache-2.0
"""Detects that the step time under a plan has changed, so that a new plan may pay."""

from __future__ import annotations

from collections import deque
from statistics import median

from usbyte.torch.runtime.device import Mark, passed

_WINDOW = 6  # steps per window; the median of a window is compared with the baseline
_LASTING = 3  # consecutive windows that must differ
_THRESHOLD = 0.25  # relative difference; smaller ones are noise, or not worth a new plan
_QUIET_STEPS = 100  # steps after the second plan without a new one; doubled by each later plan


class StepTimeMonitor:
    """Detects lasting changes of the step time.

    A new plan is wanted if three consecutive windows of steps differ from the baseline, and the
    differences of their steps sum to at least `cost_s`, because training stands still during
    planning. After the first new plan, no other plan is wanted for 100 steps; after each later one,
    for twice as many as after the one before. So a job whose step times vary by nature does not
    learn forever.

    Attributes:
        wanted: Whether a new plan should be made.
        baseline_s: Expected seconds of a step; None until it is known.
        cost_s: Seconds that a new measurement and plan cost. The owner assigns it; 0 at first.
    """

    def __init__(self) -> None:
        self.cost_s = 0.0
        # Plans after the first. The `reset` below and the one for the first plan count up to 0.
        self._replans = -2
        self.reset()

    def reset(self, baseline_s: float | None = None) -> None:
        """Starts to monitor a plan that has come into force.

        Args:
            baseline_s: Expected seconds of a step; None to use the median of the first window.
        """
        self.wanted = False
        self.baseline_s = baseline_s
        self._ends: deque[Mark] = deque()  # that the device has not passed yet
        self._last: Mark | None = None
        self._steps = 0
        self._recent: list[float] = []
        self._suspicious = 0  # consecutive windows that differ from the baseline
        self._accumulated_change_s = 0.0  # sum over the steps of these windows
        self._replans += 1
        self._quiet = _QUIET_STEPS * 2 ** (self._replans - 1) if self._replans > 0 else 0

    def step(self, now: Mark) -> None:
        """Records the end of a step. Does not block: counts only steps that the device has ended.

        Args:
            now: The end of the step on the device's clock.
        """
        self._ends.append(now)
        while self._ends and passed(self._ends[0]):
            self._count(self._ends.popleft())

    def _count(self, now: Mark) -> None:
        last, self._last = self._last, now
        self._steps += 1
        if last is None or self._steps <= 2:  # they overlap with the switch of plans
            return
        self._recent.append(now - last)
        if len(self._recent) < _WINDOW:
            return
        typical = median(self._recent)
        self._recent.clear()
        if self.baseline_s is None:
            self.baseline_s = typical
            return
        difference = abs(typical - self.baseline_s)
        if difference > _THRESHOLD * self.baseline_s:
            self._suspicious += 1
            self._accumulated_change_s += _WINDOW * difference
        else:
            self._suspicious, self._accumulated_change_s = 0, 0.0
        lasting = self._suspicious >= _LASTING and self._accumulated_change_s >= self.cost_s
        self.wanted = lasting and self._steps >= self._quiet

# SPDX-License-Identifier: Apache-2.0
"""Notices that steps have come to take another time than they did under the same plan."""

from __future__ import annotations

from collections import deque
from statistics import median

from usbyte.torch.runtime.device import Mark, passed

_WINDOW = 6  # steps whose median counts
_LASTING = 3  # windows
_THRESHOLD = 0.25  # relative; smaller changes are noise, or not worth a new plan
_QUIET_STEPS = 100  # after the second plan, doubled with each


class StepTimeMonitor:
    """Watches the times between steps.

    A change must last for three windows, and until steps have differed by as much as measuring and
    planning anew takes, in which training stands still. The plan that answers the first one is kept
    for some steps, and each after it for twice as many, so that a job whose steps vary by nature
    does not learn for ever.

    Attributes:
        wanted: A new plan should be made.
        baseline_s: What steps should take; None while that is not known.
        cost_s: What measuring and planning anew takes.
    """

    def __init__(self) -> None:
        self.cost_s = 0.0
        self._replans = -2  # plans after the first; one comes into force here and now
        self.reset()

    def reset(self, baseline_s: float | None = None) -> None:
        """A plan has come into force.

        Args:
            baseline_s: What steps should take; None for what the first ones will have taken.
        """
        self.wanted = False
        self.baseline_s = baseline_s
        self._ends: deque[Mark] = deque()  # not looked at yet
        self._last: Mark | None = None
        self._steps = 0
        self._recent: list[float] = []
        self._suspicious = 0  # windows in a row
        self._accumulated_change_s = 0.0  # of all their steps, from what they should have taken
        self._replans += 1
        self._quiet = _QUIET_STEPS * 2 ** (self._replans - 1) if self._replans > 0 else 0

    def step(self, now: Mark) -> None:
        """A step has ended; looks at those that have, without waiting for the others."""
        self._ends.append(now)
        while self._ends and passed(self._ends[0]):
            self._count(self._ends.popleft())

    def _count(self, now: Mark) -> None:
        last, self._last = self._last, now
        self._steps += 1
        if last is None or self._steps <= 2:  # the first ones are between two plans
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

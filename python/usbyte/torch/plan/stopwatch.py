# SPDX-License-Identifier: Apache-2.0
"""Times the steps of a plan that is on trial."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from usbyte.torch.runtime.device import Mark


class StepTimer:
    """Times steps from the end of one backward pass to the next.

    The first time is discarded if there are others, because it includes memory allocation. The time
    before the plan's first backward pass and the time after its last one are not measured: they
    belong to two plans.

    Args:
        steps: Number of backward passes of the trial, at least 2.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._ends: list[Mark] = []

    def step(self, now: Mark) -> None:
        """Records the end of a backward pass. When the trial is over, it replaces the oldest one.

        Args:
            now: The end on the device's clock.
        """
        if self.done:
            del self._ends[0]
        self._ends.append(now)

    @property
    def done(self) -> bool:
        """Whether the trial is over. Equal on all ranks, because all count the same passes."""
        return len(self._ends) >= self._steps

    @property
    def steady(self) -> bool:
        """Whether there are enough steps that `step_s` excludes the first, slower one."""
        return self._steps > 2

    @property
    def step_s(self) -> float:
        """Median seconds of the measured steps. Blocks until the last one has ended."""
        times = [b - a for a, b in pairwise(self._ends)]
        return median(times[1:] or times)

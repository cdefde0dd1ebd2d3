# SPDX-License-Identifier: Apache-2.0
"""How long the steps of a plan take that is on trial."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from usbyte.torch.runtime.device import Mark


class StepTimer:
    """Times steps from the end of one backward pass to the next.

    The first such time does not count if there are others: it pays for fresh memory. The step
    that ends with the plan's first backward, and the one that begins with its last, never count, as
    they belong to two plans.

    Args:
        steps: Backward passes until the trial is over; 2 at least.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._ends: list[Mark] = []

    def step(self, now: Mark) -> None:
        """A backward pass has ended; once all are through, the first is forgotten for it."""
        if self.done:
            del self._ends[0]
        self._ends.append(now)

    @property
    def done(self) -> bool:
        """The trial is over, on all ranks alike, since all count the same passes."""
        return len(self._ends) >= self._steps

    @property
    def steady(self) -> bool:
        """There are times that hold no first use of memory."""
        return self._steps > 2

    @property
    def step_s(self) -> float:
        """Median seconds of the steps that count; waits until the last has ended."""
        times = [b - a for a, b in pairwise(self._ends)]
        return median(times[1:] or times)

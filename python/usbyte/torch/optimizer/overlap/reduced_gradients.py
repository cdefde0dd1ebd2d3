# SPDX-License-Identifier: Apache-2.0
"""What deferred updates need of the reducer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from usbyte.torch.runtime.device import Device, Mark


class ReducedGradients(Protocol):
    """The gradients of the last backward pass, as their all-reduces complete.

    Attributes:
        device: Where parameters are.
    """

    device: Device

    @property
    def names(self) -> Sequence[str]:
        """By parameter, its name."""

    def co_arriving(self, indices: Sequence[int]) -> set[int]:
        """Returns the parameters whose gradients are complete as soon as those of `indices` are."""

    def wait(self, i: int) -> torch.Tensor | None:
        """Waits for the reduced gradient of parameter i; None if no rank had one."""

    def sum(self, i: int) -> torch.Tensor | None:
        """Returns the complete gradient of parameter i; None if no rank had one."""

    def gradient(self, i: int) -> torch.Tensor:
        """Returns what `param.grad` of parameter i was set to when its gradient was sent."""

    def begin_update(self) -> Mark:
        """Returns the time for `record_update`."""

    def record_update(self, indices: Sequence[int], start: Mark) -> None:
        """Records in the timeline that these parameters have been updated since `start`."""

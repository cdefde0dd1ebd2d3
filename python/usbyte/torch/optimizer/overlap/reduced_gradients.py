# SPDX-License-Identifier: Apache-2.0
"""Interface through which deferred updates read the reduced gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from usbyte.torch.runtime.device import Device, Mark


class ReducedGradients(Protocol):
    """The gradients of the last backward pass, as their all-reduces complete.

    Attributes:
        device: Device of the parameters.
    """

    device: Device

    @property
    def names(self) -> Sequence[str]:
        """Names of the parameters, by parameter index."""

    def co_arriving(self, indices: Sequence[int]) -> set[int]:
        """Returns the parameters whose gradients are complete as soon as those of `indices` are."""

    def wait(self, indices: Iterable[int]) -> None:
        """Waits for the reduced gradients of the parameters `indices`."""

    def sums(self, indices: Sequence[int]) -> dict[int, torch.Tensor | None]:
        """Returns, by parameter, gradients that have arrived; None where no rank had one."""

    def gradient(self, i: int) -> torch.Tensor:
        """Returns the tensor that `param.grad` of parameter `i` was when its gradient was sent."""

    def begin_update(self) -> Mark:
        """Returns the start time of an update, for `record_update`."""

    def record_update(self, indices: Sequence[int], start: Mark) -> None:
        """Adds the update of the parameters `indices`, begun at `start`, to the timeline."""

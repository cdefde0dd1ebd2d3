# SPDX-License-Identifier: Apache-2.0
"""Interfaces through which deferred and sharded updates read the reduced gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from usbyte.errors import UsageError
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


class ShardedGradients(ReducedGradients, Protocol):
    """The gradients of the last backward pass, of which each rank has the sums of its shards."""

    def gathered(self, i: int) -> torch.Tensor:
        """Returns a view of the flat buffer: the gradient of parameter `i`, later its new value."""

    def check_untouched(self) -> None:
        """Raises an error if a gradient in flight was changed, replaced or removed."""

    def wait_reduced(self) -> None:
        """Waits until this rank's shards hold the sums over all ranks."""

    def used_anywhere(self) -> list[bool]:
        """Returns, by parameter, whether any rank had a gradient; call it after `wait_reduced`."""

    def release_gathers(self) -> None:
        """Allows the all_gathers to launch, because the shards hold the new values."""


def no_whole_gradients(remedy: str) -> UsageError:
    """Returns the error that a script needs gradients of which a rank has only a shard."""
    return UsageError(f"with shard_optimizer=True no rank has whole gradients: {remedy}")

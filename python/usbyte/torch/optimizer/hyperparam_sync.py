# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters for the shards of ranks that have joined."""

from __future__ import annotations

from typing import Protocol

import torch

from usbyte.errors import MismatchError, UsageError
from usbyte.torch.eager.serialization import from_bytes, open_message, to_message
from usbyte.torch.runtime.device import Device
from usbyte.torch.runtime.messages import unreadable
from usbyte.torch.world.rank_group import RankGroup


class JoinState(Protocol):
    """The reducer, as far as ranks have joined.

    Attributes:
        device: Where parameters are.
    """

    device: Device

    @property
    def is_joined(self) -> bool:
        """True if this rank contributed zeros to what was sent last."""

    @property
    def applied(self) -> bool:
        """True if updates may have used the last sums."""

    def joined_in_part(self) -> bool:
        """Returns True if some ranks have joined and others sent gradients."""


class HyperparamSync:
    """Ranks that have joined update their shards as those do that have data.

    On a device that would have to be waited for in every step, they keep their own options.

    Args:
        rank_group: The ranks that take part.
        label: Name of the optimizer, for messages.
        optimizer: The wrapped one.
        reducer: Knows who has data.
        sharded: Whether updates are by shard; otherwise there is nothing to follow.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        label: str,
        optimizer: torch.optim.Optimizer,
        reducer: JoinState,
        sharded: bool,
    ) -> None:
        self._rank_group, self._label = rank_group, label
        self._optimizer, self._reducer, self._sharded = optimizer, reducer, sharded

    def sync(self) -> None:
        """Takes over options before a step, where some ranks have joined. Collective."""
        if not self._others_step():
            return
        reducer, groups = self._reducer, self._optimizer.param_groups
        own = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        label = f"{self._label}.options"
        texts = self._rank_group.eager.allgather_bytes(
            label, b"" if reducer.is_joined else to_message(own)
        )
        # All ranks look at one rank's, so that what it cannot send is the same error everywhere.
        for rank, text in zip(self._rank_group.ranks, texts, strict=True):
            if text:
                self._take(open_message(text, label, rank), rank)
                return

    def _take(self, payload: bytes, rank: int) -> None:
        reducer, groups = self._reducer, self._optimizer.param_groups
        if not reducer.is_joined:
            return
        what = f"{self._label}: what rank {rank} has sent of its optimizer's options"
        options = from_bytes(payload, what)
        if not isinstance(options, list) or not all(isinstance(row, dict) for row in options):
            raise unreadable(what, "it is no list of dicts")
        if len(options) != len(groups):
            raise MismatchError(
                f"{self._label}: the optimizer has {len(options)} parameter groups on rank {rank} "
                f"but {len(groups)} on rank {self._rank_group.rank}. Give all ranks the same."
            )
        for group, row in zip(groups, options, strict=True):
            group.update(row)

    def check_step_taken(self) -> None:
        """Raises UsageError if ranks that have joined wait for a step that this one leaves out."""
        if self._others_step():
            raise UsageError(
                "gradients were sent and no step() has followed: with shard_optimizer=True none "
                "can be left out while other ranks have joined"
            )

    def _others_step(self) -> bool:
        """Ranks that have joined take a step with what was sent last, which is yet to come here."""
        reducer = self._reducer
        if not self._sharded or reducer.device.core is not None or reducer.applied:
            return False
        return reducer.joined_in_part()

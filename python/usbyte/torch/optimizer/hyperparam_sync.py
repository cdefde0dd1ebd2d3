# SPDX-License-Identifier: Apache-2.0
"""Copies hyper-parameters to ranks that have joined, which still update their shards."""

from __future__ import annotations

from typing import Protocol

import torch

from usbyte.errors import MismatchError, UsageError
from usbyte.torch.eager.serialization import from_bytes, open_message, to_message
from usbyte.torch.runtime.device import Device
from usbyte.torch.runtime.messages import unreadable
from usbyte.torch.world.rank_group import RankGroup


class JoinState(Protocol):
    """The parts of the reducer that concern joined ranks.

    Attributes:
        device: Device of the parameters.
    """

    device: Device

    @property
    def is_joined(self) -> bool:
        """Whether this rank contributed zeros to the gradients that were sent last."""

    @property
    def applied(self) -> bool:
        """Whether updates may have used the last sums."""

    def joined_in_part(self) -> bool:
        """Returns whether some ranks have joined while others have sent gradients."""


class HyperparamSync:
    """Gives joined ranks, which still update their shards, the hyper-parameters of the others.

    On a CUDA device they keep their own hyper-parameters, because every step would have to wait for
    the device.

    Args:
        rank_group: Ranks that share the gradients.
        label: Name of the optimizer, for messages.
        optimizer: The wrapped optimizer.
        reducer: Knows which ranks have data.
        sharded: Whether updates are sharded. If not, nothing is copied.
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
        """Copies hyper-parameters to joined ranks before a step. Collective if there are some.

        Raises:
            MismatchError: The optimizer has another number of parameter groups on this rank.
        """
        if not self._others_step():
            return
        reducer, groups = self._reducer, self._optimizer.param_groups
        own = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        label = f"{self._label}.options"
        texts = self._rank_group.eager.allgather_bytes(
            label, b"" if reducer.is_joined else to_message(own)
        )
        # All ranks open the same rank's message, so that all raise the same error if it is bad.
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
        """Raises UsageError if this rank skips a step for which joined ranks wait."""
        if self._others_step():
            raise UsageError(
                "gradients were sent and no step() has followed: with shard_optimizer=True no step "
                "can be skipped while other ranks have joined"
            )

    def _others_step(self) -> bool:
        """Returns whether joined ranks take a step that this rank has not taken yet."""
        reducer = self._reducer
        if not self._sharded or reducer.device.core is not None or reducer.applied:
            return False
        return reducer.joined_in_part()

"""Hyper-parameters for the shards of ranks that have joined."""

from __future__ import annotations

import torch

from usbyte.errors import UsageError
from usbyte.torch.context import Context
from usbyte.torch.reducer import Reducer
from usbyte.torch.wire import from_bytes, to_bytes


class JoinedOptions:
    """Ranks that have joined update their shards as those do that have data.

    On a device that would have to be waited for in every step, they keep their own options.

    Args:
        context: The ranks.
        label: Name of the optimizer, for messages.
        optimizer: The wrapped one.
        reducer: Knows who has data.
        sharded: Whether updates are by shard; otherwise there is nothing to follow.
    """

    def __init__(
        self,
        context: Context,
        label: str,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer,
        sharded: bool,
    ) -> None:
        self._context, self._label = context, label
        self._optimizer, self._reducer, self._sharded = optimizer, reducer, sharded

    def follow(self) -> None:
        """Takes over options before a step, where some ranks have joined. Collective."""
        if not self._others_step():
            return
        reducer, groups = self._reducer, self._optimizer.param_groups
        own = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        texts = self._context.eager.allgather_bytes(
            f"{self._label}.options", b"" if reducer.stands_in else to_bytes(own)
        )
        if reducer.stands_in:
            for group, options in zip(groups, from_bytes(next(filter(None, texts))), strict=True):
                group.update(options)

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

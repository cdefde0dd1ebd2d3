# SPDX-License-Identifier: Apache-2.0
"""Runs the wrapped optimizer's step and records that it used reduced gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from usbyte.torch.compression.state import CodecState
from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.optimizer.compat.known_optimizers import is_known
from usbyte.torch.optimizer.fused import FusedUpdate
from usbyte.torch.optimizer.gradients.reducer import Reducer


class StepRunner:
    """Runs steps of the wrapped optimizer, whole ones and those of some parameters.

    Args:
        optimizer: The wrapped optimizer.
        updater: Its `step` updates the parameters: `optimizer` itself or its fused update.
        reducer: Sends gradients and waits for sums.
        update_guard: Marks a partial step if one raises.
        codec_state: Codec state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        updater: torch.optim.Optimizer | FusedUpdate,
        reducer: Reducer,
        update_guard: UpdateGuard,
        codec_state: CodecState,
    ) -> None:
        self._optimizer, self._updater, self._reducer = optimizer, updater, reducer
        self._update_guard, self._codec_state = update_guard, codec_state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the updater's present step and returns its result."""
        return self.run(self._updater.step, closure)  # not cached: schedulers replace it

    def run(self, call: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
        """Runs a step and returns its result.

        Args:
            call: Runs the step; takes the closure, if there is one.
            closure: The user's closure; None (default) for none.
        """
        if closure is None:
            self._reducer.mark_applied()
        calls_first = closure is not None and is_known(self._optimizer)
        result = self._update_guard.step(call, closure, calls_first)
        self._reducer.mark_applied()  # also sums of gradients that the closure has sent
        self._codec_state.commit()
        return result

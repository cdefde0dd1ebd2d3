# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer on a single rank, which sends nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.optimizer.compat.known_optimizers import is_known
from usbyte.torch.optimizer.fused import FusedUpdate
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.runtime.tensor_checks import check_dtype


class LocalSteps:
    """Runs the wrapped optimizer's steps. With shard_optimizer a step consumes its gradients.

    Args:
        optimizer: The wrapped optimizer.
        updater: Its `step` updates the parameters: `optimizer` itself or its fused update.
        settings: Arguments of the DistributedOptimizer.
        param_table: Parameters of the optimizer.
        update_guard: Counts steps.

    Attributes:
        consumed: Parameters whose gradients the last step consumed, since gradients were reset.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        updater: torch.optim.Optimizer | FusedUpdate,
        settings: Settings,
        param_table: ParamTable,
        update_guard: UpdateGuard,
    ) -> None:
        self._optimizer, self._updater, self._settings = optimizer, updater, settings
        self._names, self._params = param_table.names, param_table.params
        self._dtypes = [param.dtype for param in self._params]
        self._update_guard = update_guard
        self.consumed: list[nn.Parameter] = []

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """Takes a step and returns the result of `closure`; None without one.

        Raises:
            UsageError: The dtype of a gradient has changed since the optimizer was wrapped.
        """
        self._check_dtypes()
        if isinstance(self._updater, FusedUpdate):
            self._updater.check()
        if self._settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._params, self._settings.max_grad_norm)
        guard = self._update_guard
        with guard.updating():
            result: float | None = guard.step(
                self._updater.step, closure, is_known(self._optimizer)
            )
            guard.count_step()
        if self._settings.shard_optimizer:
            self.consumed = [param for param in self._params if param.grad is not None]
            for param in self.consumed:
                param.grad = None
        return result

    def _check_dtypes(self) -> None:
        # Several ranks could not send such a gradient. One rank raises the error, too, so that a
        # script fails where it is written.
        for name, param, dtype in zip(self._names, self._params, self._dtypes, strict=True):
            if param.grad is not None:
                check_dtype(name, param.grad, dtype)

    def zero_grad(self, set_to_none: bool) -> None:
        """Resets gradients: to None, or to zeros, also those that the last step has consumed."""
        if not set_to_none:
            for param in self.consumed:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        self.consumed = []
        self._optimizer.zero_grad(set_to_none)

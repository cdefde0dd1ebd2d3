"""GradScaler looks at gradients that all ranks have alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from usbyte.torch.optimizer.distributed_optimizer import DistributedOptimizer


def _after_sending(method: Callable[..., Any]) -> Callable[..., Any]:
    """Sends first what the optimizer has accumulated and not sent.

    Else each rank would look for what is infinite in its own gradients, and one that finds some
    would leave out a step that the others take.
    """

    @functools.wraps(method)
    def after_sending(
        scaler: torch.amp.GradScaler,
        /,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if isinstance(optimizer, DistributedOptimizer) and scaler.is_enabled():
            optimizer.flush_accumulated()
        return method(scaler, optimizer, *args, **kwargs)

    return after_sending


# Of an optimizer a scaler asks for nothing but its param_groups, as schedulers do.
for _name in ("unscale_", "step"):
    setattr(torch.amp.GradScaler, _name, _after_sending(getattr(torch.amp.GradScaler, _name)))

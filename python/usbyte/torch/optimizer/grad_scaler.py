# SPDX-License-Identifier: Apache-2.0
"""Lets torch's GradScaler look at gradients that are the same on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

_METHODS = ("unscale_", "step")
_originals: dict[str, Callable[..., Any]] = {}


@runtime_checkable
class AccumulatesGradients(Protocol):
    """An optimizer that may hold gradients which it has not sent yet."""

    def flush_accumulated(self) -> None:
        """Sends accumulated gradients that have not been sent."""


def install() -> None:
    """Wraps `GradScaler.unscale_` and `GradScaler.step`, once; `uninstall` undoes it.

    An optimizer is asked by a scaler for its param_groups only, so it cannot notice the call by
    itself.
    """
    for name in _METHODS if not _originals else ():
        _originals[name] = getattr(torch.amp.GradScaler, name)
        setattr(torch.amp.GradScaler, name, _after_sending(_originals[name]))


def uninstall() -> None:
    """Restores the methods, except where another library has wrapped them since."""
    for name, original in _originals.items():
        if getattr(getattr(torch.amp.GradScaler, name), "__wrapped__", None) is original:
            setattr(torch.amp.GradScaler, name, original)
    _originals.clear()


def _after_sending(method: Callable[..., Any]) -> Callable[..., Any]:
    """Sends accumulated gradients before the scaler looks for infinite ones.

    Otherwise each rank would look in its own gradients, and a rank that finds some would leave out
    a step that the others take.
    """

    @functools.wraps(method)
    def after_sending(
        scaler: torch.amp.GradScaler,
        /,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if isinstance(optimizer, AccumulatesGradients) and scaler.is_enabled():
            optimizer.flush_accumulated()
        return method(scaler, optimizer, *args, **kwargs)

    return after_sending

# SPDX-License-Identifier: Apache-2.0
"""Makes torch's GradScaler look at gradients that are equal on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

_METHODS = ("unscale_", "step")
_originals: dict[str, Callable[..., Any]] = {}


@runtime_checkable
class AccumulatesGradients(Protocol):
    """An optimizer that may have accumulated gradients that it has not sent yet."""

    def flush_accumulated(self) -> None:
        """Sends the accumulated gradients."""


def install() -> None:
    """Wraps `GradScaler.unscale_` and `GradScaler.step` once; `uninstall` undoes it.

    A scaler reads only `param_groups` of an optimizer, so the optimizer cannot detect the call.
    """
    for name in _METHODS if not _originals else ():
        _originals[name] = getattr(torch.amp.GradScaler, name)
        setattr(torch.amp.GradScaler, name, _after_sending(_originals[name]))


def uninstall() -> None:
    """Restores both methods, except where another library has wrapped them since."""
    for name, original in _originals.items():
        if getattr(getattr(torch.amp.GradScaler, name), "__wrapped__", None) is original:
            setattr(torch.amp.GradScaler, name, original)
    _originals.clear()


def _after_sending(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `method` wrapped: it first sends accumulated gradients, then looks for infinite ones.

    Without it each rank would look at its own gradients only. A rank that finds an infinite one
    would skip a step that the others take.
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

"""An optimizer that stands before another one for schedulers, scalers and hooks."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch


class OptimizerWrapper(torch.optim.Optimizer):
    """What only has to be passed on to the wrapped optimizer, `_inner`.

    That is its defaults, its hooks, what GradScaler gives it, and whatever torch.optim.Optimizer
    does not have.
    """

    _inner: torch.optim.Optimizer

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not constructed yet
            raise AttributeError(name)
        return getattr(self._inner, name)


for _name in (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
):
    # Hooks registered on the wrapper are hooks of the wrapped optimizer.
    setattr(OptimizerWrapper, _name, property(attrgetter(f"_inner.{_name}")))


def _forwarded(name: str) -> property:
    def write(self: OptimizerWrapper, value: Any) -> None:
        setattr(self._inner, name, value)

    def delete(self: OptimizerWrapper) -> None:
        delattr(self._inner, name)

    return property(attrgetter(f"_inner.{name}"), write, delete)


# GradScaler hands these to optimizers that unscale by themselves.
for _name in ("grad_scale", "found_inf"):
    setattr(OptimizerWrapper, _name, _forwarded(_name))

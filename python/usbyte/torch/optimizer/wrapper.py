# SPDX-License-Identifier: Apache-2.0
"""A torch optimizer that wraps another one and looks like it to schedulers, scalers and hooks."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from usbyte.errors import UsageError
from usbyte.torch.torch_private import OPTIMIZER_HOOKS


class OptimizerWrapper(torch.optim.Optimizer):
    """Passes attributes on to the wrapped optimizer, `_inner`, except for the wrapper's own.

    The wrapper's own are the methods, properties and annotated fields of its classes, and
    attributes set before `_inner`. All others are read, written and deleted on the wrapped
    optimizer.

    `isinstance` is true for the wrapper's classes and for those of the wrapped optimizer, which may
    be a wrapper itself.
    """

    _inner: torch.optim.Optimizer
    _fields: frozenset[str] = frozenset()
    _both: type | None = None

    def __init_subclass__(cls) -> None:
        # Does not call super().__init_subclass__: that of the wrapped class could do anything with
        # the subclass that `__class__` makes.
        cls._fields |= inspect.get_annotations(cls).keys()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """A class that is a subclass of the wrapper's and of the wrapped optimizer's.

        The wrapper's methods come first, for callers of `optimizer.__class__.step(optimizer)`.
        """
        kind = type(self)
        if "_inner" not in vars(self):
            return kind
        wrapped = type(self._inner)
        if issubclass(wrapped, OptimizerWrapper):
            wrapped = self._inner.__class__
        if type(wrapped) is not type or issubclass(kind, wrapped):
            return kind if issubclass(kind, wrapped) else wrapped
        if self._both is None:
            own = {"__module__": kind.__module__, "__doc__": kind.__doc__}
            self._both = type(kind.__name__, (kind, wrapped), own)
        return self._both

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not constructed yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            self._apply_pending()
            setattr(self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            self._apply_pending()
            delattr(self._inner, name)

    def __reduce__(self) -> Any:
        raise UsageError(
            f"a {type(self).__name__} is bound to its ranks and cannot be pickled or copied; save "
            "optimizer.state_dict() instead"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._drain()
        self._inner.__setstate__(state)
        self._on_new_state()

    def _is_own(self, name: str) -> bool:
        own = vars(self)
        return (
            "_inner" not in own or name in own or name in self._fields or hasattr(type(self), name)
        )

    # For subclasses that defer updates or change the form of the state.

    def _apply_pending(self) -> None:
        """Applies pending updates, which must not see the value that is written next."""

    def _drain(self) -> None:
        """Applies pending updates and waits for gradients."""

    def _bring_up_to_date(self) -> None:
        """Applies pending updates and waits for gradients; called before state is saved."""

    def _on_new_state(self) -> None:
        """Called when the wrapped optimizer has got a whole state."""

    # For direct calls of the wrapped optimizer.

    def _hook_state(self) -> list[RemovableHandle]:
        """Registers hooks that bring the state up to date in direct state_dict calls."""
        inner = self._inner
        if not hasattr(inner, "_optimizer_state_dict_pre_hooks"):  # skips Optimizer.__init__
            return []
        return [
            inner.register_state_dict_pre_hook(_Hook(self._before_state_dict), prepend=True),
            inner.register_load_state_dict_pre_hook(_Hook(self._drain), prepend=True),
            inner.register_load_state_dict_post_hook(_Hook(self._on_new_state), prepend=True),
        ]

    def _before_state_dict(self) -> None:
        self._bring_up_to_date()
        if holds_shards(self._inner):
            raise UsageError(
                f"state_dict() of the wrapped {type(self._inner).__name__}, which holds only this "
                "rank's shards with shard_optimizer=True: call state_dict() of the "
                "DistributedOptimizer, on all ranks"
            )


def holds_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's state is of shards of its parameters."""
    return any(getattr(p, "_usbyte_shard", False) for p in getattr(optimizer, "state", ()))


class _Hook:
    """Calls a method of the wrapper without keeping the wrapper alive; does nothing in copies."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *_args: Any) -> None:
        if (method := self._method()) is not None:
            method()

    def __reduce__(self) -> Any:
        return _hook_of_copies, ()


def _hook_of_copies() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_args: Any) -> None:
    pass


def _forwarded(name: str) -> property:
    def write(self: OptimizerWrapper, value: Any) -> None:
        setattr(self._inner, name, value)

    return property(attrgetter(f"_inner.{name}"), write)


for _name in OPTIMIZER_HOOKS:
    # Hooks registered on the wrapper are hooks of the wrapped optimizer.
    setattr(OptimizerWrapper, _name, _forwarded(_name))

# SPDX-License-Identifier: Apache-2.0
"""Properties of an optimizer that follow from its class, its step function and its hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from usbyte.errors import UsageError
from usbyte.torch.torch_private import step_hooks

#: Classes of torch.optim whose updates treat each element independently.
ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip

# Methods of the class that decide what a step does.
_METHODS = ("step", "_init_group")


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer is torch's own, which updates each parameter independently.

    False for a subclass, and for an optimizer whose step was replaced.
    """
    return is_torchs(type(optimizer)) and not step_is_replaced(optimizer)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether its class updates each element of a parameter independently."""
    return type(optimizer) in (getattr(torch.optim, name) for name in ELEMENTWISE)


def step_is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `optimizer.step` runs another function than its class defines.

    Wrappers from torch do not count: those of learning rate schedulers, the profiler, torch.compile
    and `torch.no_grad`. An optimizer of torch.optim must run only torch's code. For any other
    class, its own `step` is the definition, whatever it runs.
    """
    kind, attributes = type(optimizer), vars(optimizer)
    from_torch = is_torchs(kind)
    for name in _METHODS:
        function = method = getattr(kind, name, None)
        if name in attributes:
            function = attributes[name]
        elif not from_torch:
            continue
        if _runs_other(function, method, optimizer, from_torch):
            return True
    return False


def _runs_other(
    function: Any, method: Any, optimizer: torch.optim.Optimizer, from_torch: bool
) -> bool:
    """Returns whether a function, without torch's wrappers, is not `method` of the class."""
    while function is not None:
        if function is method and not from_torch:
            return False
        namespace = getattr(function, "__globals__", None)
        if not isinstance(namespace, dict) or not str(namespace.get("__name__")).startswith(
            "torch."
        ):
            return True
        if isinstance(function, MethodType):
            if function.__self__ is not optimizer:
                return True
            function = function.__func__
        else:
            function = getattr(function, "__wrapped__", None)
    return not from_torch


def is_torchs(kind: type) -> bool:
    """Returns whether a class of optimizers is defined in torch.optim."""
    return kind.__module__ == "torch.optim" or kind.__module__.startswith("torch.optim.")


def check_narrowable(optimizer: torch.optim.Optimizer) -> None:
    """Checks that a step updates exactly the parameters of `param_groups`, as set last.

    An optimizer that contains another one, as Lookahead does, may let that one update all of its
    own parameters.

    Raises:
        UsageError: `param_groups` cannot be set, or an inner optimizer has `param_groups` of its
            own.
    """
    groups, kind = optimizer.param_groups, type(optimizer).__name__
    narrowed = list(groups)
    try:
        optimizer.param_groups = narrowed
    except AttributeError:
        raise UsageError(
            f'overlap="forward" sets param_groups of {kind}, which refuses it: use '
            'overlap="backward"'
        ) from None
    try:
        for name, held in _held_optimizers(optimizer):
            if held.param_groups is not narrowed:
                raise UsageError(
                    f"{kind}.{name} has an optimizer with param_groups of its own, so that a step "
                    'cannot be applied layer by layer: use overlap="backward"'
                )
    finally:
        optimizer.param_groups = groups


def _held_optimizers(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    for name, value in vars(optimizer).items():
        values = value.values() if isinstance(value, dict) else value
        for held in values if isinstance(value, dict | list | tuple) else [value]:
            if isinstance(held, torch.optim.Optimizer):
                yield name, held


def calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `step(closure)` equals one call of the closure and then `step()`."""
    return is_known(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether hooks run before or after each step of the optimizer."""
    return any(step_hooks(optimizer))


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which no step hook runs.

    A deferred update belongs to a step that was taken before any of the present hooks was
    registered.
    """
    hooks = [each for each in step_hooks(optimizer) if each]
    registered = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()  # in place, because hook handles refer to these dictionaries
    try:
        yield
    finally:
        for each, before in zip(hooks, registered, strict=True):
            meanwhile = dict(each)
            each.clear()
            each.update(before | meanwhile)


def mixes_dtypes(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the dtype of a group's first parameter changes how the others are updated.

    That is so in torch's Adafactor, unless its first epsilon is given.
    """
    return isinstance(optimizer, getattr(torch.optim, "Adafactor", ())) and any(
        group["eps"][0] is None and len({p.dtype for p in group["params"] if p.requires_grad}) > 1
        for group in optimizer.param_groups
    )

# SPDX-License-Identifier: Apache-2.0
"""What is known of an optimizer: by its class, by the function that is its step, by its hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from usbyte.errors import UsageError
from usbyte.torch.torch_private import step_hooks

#: Classes of torch.optim whose updates treat every element by itself.
ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip

# What runs when a step is taken, as far as methods of the class decide it.
_METHODS = ("step", "_init_group")


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own, each of which updates every parameter by itself.

    A subclass is none, nor is an optimizer whose step was replaced.
    """
    return is_torchs(type(optimizer)) and not step_is_replaced(optimizer)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class updates every element of a parameter by itself."""
    return type(optimizer) in (getattr(torch.optim, name) for name in ELEMENTWISE)


def step_is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` runs another function than its class defines.

    Wrappers of torch's own do not count: those of learning rate schedulers, of the profiler, of
    torch.compile and of `torch.no_grad`. A class of torch.optim is to run nothing but torch's code.
    Of another class, whatever its own `step` runs is its definition.
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
    """Whether a function ends in another one than the class defines."""
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
    """Whether a class of optimizers is one of torch.optim's."""
    return kind.__module__ == "torch.optim" or kind.__module__.startswith("torch.optim.")


def check_narrowable(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError unless a step updates just the parameters of `param_groups`, as set last.

    An optimizer that holds another one, as Lookahead does, may have that update all of its own.
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
    """Whether `step(closure)` is to call the closure and then to take a step."""
    return is_known(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody is called before or after each step of the optimizer."""
    return any(step_hooks(optimizer))


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Runs the update of a step that was taken before any of the present hooks was registered."""
    hooks = [each for each in step_hooks(optimizer) if each]
    registered = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()  # in place, as the handles refer to these
    try:
        yield
    finally:
        for each, before in zip(hooks, registered, strict=True):
            meanwhile = dict(each)
            each.clear()
            each.update(before | meanwhile)


def mixes_dtypes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the first parameter of a group, by its dtype, decides how others are updated.

    So it does in torch's Adafactor, unless that is told its first epsilon.
    """
    return isinstance(optimizer, getattr(torch.optim, "Adafactor", ())) and any(
        group["eps"][0] is None and len({p.dtype for p in group["params"] if p.requires_grad}) > 1
        for group in optimizer.param_groups
    )

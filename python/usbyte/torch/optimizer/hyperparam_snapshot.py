# SPDX-License-Identifier: Apache-2.0
"""Snapshots of hyper-parameters, unaffected by later in-place changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_PLAIN = frozenset([int, float, bool, str, bytes, complex, type(None)])


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a snapshot of the hyper-parameters of one parameter group."""
    return {
        key: value if type(value) in _PLAIN else _snapshot(value)
        for key, value in group.items()
        if key != "params"
    }


def is_same(a: Any, b: Any) -> bool:
    """Returns whether two hyper-parameters are equal, element by element."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if type(a) is type(b) and isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if type(a) is type(b) and isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    return a is b or bool(a == b)


def _snapshot(value: Any) -> Any:
    """Returns a copy of a tensor, array or container.

    Any other object is returned itself. A random number generator, for example, must advance.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray | set | bytearray):
        return value.copy()
    if isinstance(value, tuple):
        if all(type(item) in _PLAIN for item in value):
            return value
        items = [_snapshot(item) for item in value]
        return tuple(items) if type(value) is tuple else type(value)(*items)
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = [_snapshot(item) for item in value]
        return copied
    if isinstance(value, dict):
        whole = copy.copy(value)
        for key, item in value.items():
            whole[key] = _snapshot(item)
        return whole
    return value


@contextmanager
def check_groups_unchanged(optimizer: torch.optim.Optimizer) -> Iterator[list[str]]:
    """Context for a step: yields a list, which then names the hyper-parameters that it changed.

    Such a change would be repeated by every deferred update, which runs the step with some of the
    parameters.
    """
    before = [hyper_parameters(group) for group in optimizer.param_groups]
    changed: list[str] = []
    yield changed
    for old, group in zip(before, optimizer.param_groups, strict=True):
        changed += [key for key, value in old.items() if not is_same(group[key], value)]

"""Tensors whose values are on their way: who uses one in Python gets it fetched first.

A held tensor keeps its identity, its memory and its place in autograd; only its class is another
one for a while, whose torch function fetches before it goes on. Questions about shape, dtype and
the like are answered at once. What reads memory past Python (a raw pointer taken before, C++ that
unpacks tensors by itself) is not seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

#: Called with the tensor; returns the one to use in its place, most often the same, released.
Fetch = Callable[[torch.Tensor], torch.Tensor]

_FETCH = "_usbyte_fetch"


def hold(tensor: torch.Tensor, fetch: Fetch) -> None:
    """Has `fetch` called when somebody is about to use the tensor, until `release`."""
    kind = type(tensor)
    if not issubclass(kind, _Awaited):
        tensor.__class__ = _awaited(kind)
    tensor.__dict__[_FETCH] = fetch


def release(tensor: torch.Tensor) -> None:
    """The tensor is again what it was; nothing happens if it was not held."""
    kind = type(tensor)
    if issubclass(kind, _Awaited):
        tensor.__class__ = kind.base
        del tensor.__dict__[_FETCH]


def is_held(tensor: torch.Tensor) -> bool:
    """True between `hold` and `release`."""
    return isinstance(tensor, _Awaited)


class _Awaited:
    """What all classes of held tensors have in common."""

    base: type

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = {id(t): _fetched(t) for t in _held([args, kwargs])}
        args, kwargs = _replaced(args, found), _replaced(kwargs, found)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_fetched(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _fetched(self).__reduce_ex__(protocol)


@cache
def _awaited(base: type) -> type:
    return type(base)(f"Awaited{base.__name__}", (_Awaited, base), {"base": base})


def _fetched(tensor: Any) -> torch.Tensor:
    fetch: Fetch = tensor.__dict__[_FETCH]
    return fetch(tensor)


def _held(value: Any) -> Iterator[Any]:
    """The held tensors in arguments, which lists, tuples and dicts may hold."""
    if isinstance(value, _Awaited):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _held(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _held(item)


def _replaced(value: Any, found: dict[int, torch.Tensor]) -> Any:
    if id(value) in found:
        return found[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, found) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, found) for key, item in value.items()}
    return value


_METADATA_METHODS = frozenset(
    [
        "dim",
        "size",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "is_floating_point",
        "is_contiguous",
        "requires_grad_",
    ]
)
_ALIASES = frozenset(
    ["T", "mT", "H", "mH", "data", "real", "imag"]
)  # attributes that give access to the values


def _is_metadata(func: Any) -> bool:
    """True for what does not look at a tensor's values: `.shape`, `.device`, `.grad`, `.dim()`."""
    name = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__":
        return attribute not in _ALIASES
    if name in ("__set__", "__delete__"):
        return attribute in ("grad", "requires_grad")
    return name in _METADATA_METHODS

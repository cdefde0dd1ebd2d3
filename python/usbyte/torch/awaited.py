"""Tensors whose values are on their way: who uses one in Python gets it fetched first.

A held tensor keeps its identity, its memory and its place in autograd; only its class is another
one for a while, whose torch function fetches before it goes on. Questions about shape, dtype and
the like are answered at once. What reads memory past Python (a raw pointer taken before, C++ that
unpacks tensors by itself) is not seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: Called with the tensor; returns the one to use in its place, most often the same, released.
Fetch = Callable[[torch.Tensor], torch.Tensor]

# Not attributes of tensors, which are copied and pickled with theirs; by their id, while held.
_fetches: dict[int, Fetch] = {}
_classes: dict[type, type] = {}  # of held tensors, by what they are otherwise
_bases: dict[type, type] = {}  # the inverse


def hold(tensor: torch.Tensor, fetch: Fetch) -> None:
    """Has `fetch` called when somebody is about to use the tensor, until `release`.

    Whoever holds it must keep it alive until then.
    """
    _fetches[id(tensor)] = fetch
    kind = type(tensor)
    if kind not in _bases:
        tensor.__class__ = _classes.get(kind) or _class_for(kind)


def release(tensor: torch.Tensor) -> None:
    """The tensor is again what it was; nothing happens if it was not held."""
    base = _bases.get(type(tensor))
    if base is not None:
        tensor.__class__ = base
        del _fetches[id(tensor)]


def is_held(tensor: torch.Tensor) -> bool:
    """True between `hold` and `release`."""
    return type(tensor) in _bases


class _Awaited:
    """What all classes of held tensors have in common."""

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


def _class_for(base: type) -> type:
    _classes[base] = kind = type(base)(f"Awaited{base.__name__}", (_Awaited, base), {})
    _bases[kind] = base
    return kind


def _fetched(tensor: Any) -> torch.Tensor:
    return _fetches[id(tensor)](tensor)


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

# SPDX-License-Identifier: Apache-2.0
"""Lazy tensors: the first use in Python materializes the value.

A lazy tensor keeps its identity, its memory and its place in autograd. Only its Python class is
swapped, for one whose `__torch_function__` materializes the value before it runs the operation.
Queries of metadata, such as shape and dtype, do not materialize it. Reads that bypass Python are
not detected: a raw pointer taken earlier, or C++ that unpacks tensors itself.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from usbyte.errors import UsageError
from usbyte.torch.torch_private import DisableTorchFunction, not_compiled

#: Called with the lazy tensor: puts the value into it and calls `unwrap`.
MaterializeFn = Callable[[torch.Tensor], None]

# Keyed by id(tensor) while it is lazy. Attributes of a tensor would be copied and pickled with it.
_materializers: dict[int, tuple[MaterializeFn, MaterializeFn]] = {}  # for reads, for overwrites
_owners: dict[int, tuple[object, weakref.ref[torch.Tensor]]] = {}  # only tensors with an owner
_classes: dict[type, type] = {}  # plain class -> lazy class
_bases: dict[type, type] = {}  # lazy class -> plain class


def make_lazy(
    tensor: torch.Tensor,
    fetch: MaterializeFn,
    overwritten: MaterializeFn | None = None,
    owner: object = None,
) -> None:
    """Makes `tensor` lazy: its first use calls `fetch`, until `unwrap` is called.

    The caller must keep the tensor alive until then. Nothing happens if the tensor is lazy under
    another owner.

    Args:
        tensor: A tensor of any class; its class is swapped in place.
        fetch: Materializes the tensor before it is read.
        overwritten: Called instead of `fetch` before all elements are overwritten, as by `copy_`.
            The default is `fetch`.
        owner: If given, only calls with the same owner can unwrap the tensor or replace `fetch`.
    """
    if _owners and _owner_of(tensor) not in (None, owner):
        return
    if owner is not None:
        _owners[id(tensor)] = (owner, weakref.ref(tensor))
    _materializers[id(tensor)] = (fetch, overwritten or fetch)
    kind = type(tensor)
    if kind not in _bases:
        tensor.__class__ = _classes.get(kind) or _class_for(kind)


def make_all_lazy(tensors: Iterable[torch.Tensor], fetches: Iterable[MaterializeFn]) -> None:
    """Does `make_lazy(tensor, fetch)` for each pair, with less overhead."""
    for tensor, fetch in zip(tensors, fetches, strict=True):
        if _owners:  # a fault, seen by another thread, may add owners at any time
            make_lazy(tensor, fetch)
            continue
        _materializers[id(tensor)] = (fetch, fetch)
        kind = type(tensor)
        if kind not in _bases:
            tensor.__class__ = _classes.get(kind) or _class_for(kind)


def unwrap_all(tensors: Iterable[torch.Tensor]) -> None:
    """Does `unwrap(tensor)` for each, with less overhead."""
    for tensor in tensors:
        if _owners:  # a fault, seen by another thread, may add owners at any time
            unwrap(tensor)
        elif (base := _bases.get(type(tensor))) is not None:
            tensor.__class__ = base
            _materializers.pop(id(tensor), None)  # another thread may have done this already


def unwrap(tensor: torch.Tensor, owner: object = None) -> None:
    """Gives `tensor` its plain class back; no-op if it is not lazy or belongs to another owner."""
    if (_owner_of(tensor) if _owners else None) is not owner:
        return
    if owner is not None:
        _owners.pop(id(tensor), None)
    base = _bases.get(type(tensor))
    if base is not None:
        tensor.__class__ = base
        _materializers.pop(id(tensor), None)  # another thread may have done this already


def weak_method(method: Callable[..., None], *args: Any) -> MaterializeFn:
    """Returns a function that calls `method(*args, tensor)` without keeping its object alive.

    The object and its tensors can so be freed together. Using a tensor that is still lazy after
    the object was freed raises UsageError.
    """
    return _Weakly(method, args)


class _Weakly:
    def __init__(self, method: Callable[..., None], args: Sequence[Any]) -> None:
        self._method, self._args = weakref.WeakMethod(method), args

    def __call__(self, tensor: torch.Tensor) -> None:
        call = self._method()
        if call is None:
            raise _never_fetched()
        call(*self._args, tensor)

    @property
    def is_dead(self) -> bool:
        return self._method() is None


def _never_fetched() -> UsageError:
    return UsageError(
        "the value of this tensor was still in flight when its model and optimizer were deleted: "
        "read it before that, or call optimizer.synchronize()"
    )


def forget_dead() -> None:
    """Forgets the `weak_method` callbacks whose objects were freed."""
    for key, (fetch, _) in list(_materializers.items()):
        if isinstance(fetch, _Weakly) and fetch.is_dead:
            _materializers.pop(key, None)


def _owner_of(tensor: torch.Tensor) -> object:
    owner, of = _owners.get(id(tensor), (None, None))
    # The id of a freed tensor may belong to another tensor now.
    return owner if of is not None and of() is tensor else None


class _LazyTensorMixin:
    """Base of all lazy tensor classes."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_metadata(func):
            with DisableTorchFunction():
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _WRITERS and isinstance(args[0], _LazyTensorMixin):
            _fetch(args[0], writes=True)
        for tensor in _lazy_tensors_in([args, kwargs]):
            _fetch(tensor)
        return func(*args, **kwargs)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `type(param)(data)` must make a plain tensor, which has nothing to wait for.
        return _bases[cls](*args, **kwargs)

    def detach(self) -> Any:
        if sys._getframe(1).f_code is not nn.Parameter.__new__.__code__:
            return torch.Tensor.detach(self)  # type: ignore[arg-type]
        # Parameter.__new__ checks that detach() returns its argument's class, which is plain once
        # the tensor is materialized.
        _fetch(self)
        return self.detach().as_subclass(type(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _fetch(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _fetch(self)
        return self.__reduce_ex__(protocol)


def _class_for(base: type) -> type:
    _classes[base] = kind = type(base)(f"Lazy{base.__name__}", (_LazyTensorMixin, base), {})
    _bases[kind] = base
    return kind


@not_compiled  # materializing swaps the class of the very tensor that is being traced
def _fetch(tensor: Any, writes: bool = False) -> None:
    callbacks = _materializers.get(id(tensor))
    if callbacks is not None:
        callbacks[writes](tensor)
    elif type(tensor) in _bases:  # else another thread has unwrapped it just now
        raise _never_fetched()


def _lazy_tensors_in(value: Any) -> Iterator[Any]:
    """Yields the lazy tensors in arguments, also in nested lists, tuples and dicts."""
    if isinstance(value, _LazyTensorMixin):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _lazy_tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _lazy_tensors_in(item)


_WRITERS = frozenset(["copy_", "fill_", "zero_"])  # they overwrite all elements
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
# Attributes that give access to the values, unlike all others.
_ALIASES = frozenset(["T", "mT", "H", "mH", "data", "real", "imag", "__cuda_array_interface__"])


def _is_metadata(func: Any) -> bool:
    """Returns whether `func` does not read values: `.shape`, `.device`, `.grad`, `.dim()`, ..."""
    name = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__":  # older Pythons do not give the name of properties written in Python
        return bool(attribute) and attribute not in _ALIASES
    if name in ("__set__", "__delete__"):
        return attribute in ("grad", "requires_grad")
    return name in _METADATA_METHODS

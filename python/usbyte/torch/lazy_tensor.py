"""Tensors whose values are on their way: who uses one in Python gets it fetched first.

A held tensor keeps its identity, its memory and its place in autograd; only its class is another
one for a while, whose torch function fetches before it goes on. Questions about shape, dtype and
the like are answered at once. What reads memory past Python (a raw pointer taken before, C++ that
unpacks tensors by itself) is not seen.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from usbyte.errors import UsageError
from usbyte.torch.torch_private import DisableTorchFunction, not_compiled

#: Called with the tensor, to put its value into it and to release it.
MaterializeFn = Callable[[torch.Tensor], None]

# Not attributes of tensors, which are copied and pickled with theirs; by their id, while held.
_fetches: dict[int, tuple[MaterializeFn, MaterializeFn]] = {}  # for readers, for writers
_classes: dict[type, type] = {}  # of held tensors, by what they are otherwise
_bases: dict[type, type] = {}  # the inverse
_owners: dict[int, tuple[object, weakref.ref[torch.Tensor]]] = {}  # by id, of what has one


def make_lazy(
    tensor: torch.Tensor,
    fetch: MaterializeFn,
    overwritten: MaterializeFn | None = None,
    owner: object = None,
) -> None:
    """Has `fetch` called when somebody is about to use the tensor, until `unwrap`.

    Whoever holds it must keep it alive until then.

    Args:
        tensor: Of any class.
        fetch: What to call.
        overwritten: Called in its place by who writes to all of the tensor, as `copy_` does.
        owner: Who alone can release it or hold it in another way; None for anybody.
    """
    if _owners and _owner_of(tensor) not in (None, owner):
        return
    if owner is not None:
        _owners[id(tensor)] = (owner, weakref.ref(tensor))
    _fetches[id(tensor)] = (fetch, overwritten or fetch)
    kind = type(tensor)
    if kind not in _bases:
        tensor.__class__ = _classes.get(kind) or _class_for(kind)


def unwrap(tensor: torch.Tensor, owner: object = None) -> None:
    """The tensor is again what it was; nothing happens if it was not held, or by another owner."""
    if (_owner_of(tensor) if _owners else None) is not owner:
        return
    if owner is not None:
        _owners.pop(id(tensor), None)
    base = _bases.get(type(tensor))
    if base is not None:
        tensor.__class__ = base
        _fetches.pop(id(tensor), None)  # which another thread may have done just now


def weak_method(method: Callable[..., None], *args: Any) -> MaterializeFn:
    """Calls the method with these arguments and the tensor, without keeping its object alive.

    So that this may go together with its tensors. One that outlives it never gets its value.
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
        "this tensor was on its way when its model and optimizer were dropped: read it before, or "
        "call optimizer.synchronize()"
    )


def forget_dead() -> None:
    """Drops what is to be called for objects that are gone; most of their tensors are too."""
    for key, (fetch, _) in list(_fetches.items()):
        if isinstance(fetch, _Weakly) and fetch.is_dead:
            _fetches.pop(key, None)


def _owner_of(tensor: torch.Tensor) -> object:
    owner, of = _owners.get(id(tensor), (None, None))
    # The id of a tensor that is gone may be that of another one now.
    return owner if of is not None and of() is tensor else None


class _LazyTensorMixin:
    """What all classes of held tensors have in common."""

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
        for tensor in _held([args, kwargs]):
            _fetch(tensor)
        return func(*args, **kwargs)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Of `type(param)(data)`, which makes another tensor that does not wait.
        return _bases[cls](*args, **kwargs)

    def detach(self) -> Any:
        if sys._getframe(1).f_code is not nn.Parameter.__new__.__code__:
            return torch.Tensor.detach(self)  # type: ignore[arg-type]
        # That wants the class of its argument back, which is a plain one once it is fetched.
        _fetch(self)
        return self.detach().as_subclass(type(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _fetch(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _fetch(self)
        return self.__reduce_ex__(protocol)


def _class_for(base: type) -> type:
    _classes[base] = kind = type(base)(f"Awaited{base.__name__}", (_LazyTensorMixin, base), {})
    _bases[kind] = base
    return kind


@not_compiled  # who traces a tensor that is held has it released under its hands
def _fetch(tensor: Any, writes: bool = False) -> None:
    held = _fetches.get(id(tensor))
    if held is not None:
        held[writes](tensor)
    elif type(tensor) in _bases:  # else another thread has released it just now
        raise _never_fetched()


def _held(value: Any) -> Iterator[Any]:
    """The held tensors in arguments, which lists, tuples and dicts may hold."""
    if isinstance(value, _LazyTensorMixin):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _held(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _held(item)


_WRITERS = frozenset(["copy_", "fill_", "zero_"])  # of all elements
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
# Attributes that give access to the values.
_ALIASES = frozenset(["T", "mT", "H", "mH", "data", "real", "imag", "__cuda_array_interface__"])


def _is_metadata(func: Any) -> bool:
    """True for what does not look at a tensor's values: `.shape`, `.device`, `.grad`, `.dim()`."""
    name = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__":  # of properties written in Python, older Pythons do not tell which
        return bool(attribute) and attribute not in _ALIASES
    if name in ("__set__", "__delete__"):
        return attribute in ("grad", "requires_grad")
    return name in _METADATA_METHODS

# SPDX-License-Identifier: Apache-2.0
"""Parses JSON messages of other ranks and checks them against a type hint."""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import types
from collections.abc import Callable
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from usbyte.errors import MismatchError

_Reader = Callable[[Any], Any]

_INT_LIMIT = 1 << 63  # integers are int64 in torch and in the core
_SHOWN_CHARS = 80


def read(sender: str, text: bytes | str, kind: Any) -> Any:
    """Parses a message and checks it against a type hint.

    Args:
        sender: Names the message and its sender, such as "rank 3's answer"; the error message
            begins with it.
        text: JSON.
        kind: A type hint made of bool, int, float, str, None, Any, list, Sequence, dict, Mapping,
            tuple, unions and dataclasses. A tuple is read from a list, and a dataclass from an
            object with its fields.

    Returns:
        The value.

    Raises:
        MismatchError: The text is not JSON, or its value does not satisfy `kind`.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        return check(json.loads(text), kind)
    except (ValueError, RecursionError) as error:
        raise unreadable(sender, error) from error


def check(value: Any, kind: Any) -> Any:
    """Checks a value from `json.loads` against a type hint and converts it.

    Args:
        value: The value.
        kind: A type hint as for `read`.

    Raises:
        ValueError: The value does not satisfy `kind`.
    """
    return _reader(kind)(value)


def unreadable(sender: str, why: object) -> MismatchError:
    """Returns the error for a message that cannot be read.

    Args:
        sender: Names the message and its sender, such as "rank 3's answer"; the error message
            begins with it.
        why: What is wrong with the message.
    """
    return MismatchError(
        f"{sender} cannot be read: {why}. Install the same version of usbyte on all hosts; if it "
        "is the same, the message was damaged on its way"
    )


@cache
def _reader(kind: Any) -> _Reader:
    """Returns the function that checks and converts values for a type hint."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if kind in (None, types.NoneType):
        return _none
    if kind is int:
        return _int
    if kind is float:
        return _float
    if kind in (bool, str):
        return lambda value: value if type(value) is kind else _refuse(value, kind.__name__)
    if origin in (list, collections.abc.Sequence):
        return _list_of(_reader(args[0]))
    if origin in (dict, collections.abc.Mapping):
        return _dict_of(_reader(args[1]))
    if origin is tuple:
        return _tuple_of([_reader(arg) for arg in args])
    if origin in (Union, types.UnionType):
        return _either([_reader(arg) for arg in args])
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    raise TypeError(f"messages of {kind} cannot be read")


def _refuse(value: Any, expected: str) -> Any:
    shown = repr(value)[:_SHOWN_CHARS]
    raise ValueError(f"{expected} was expected, not {shown}")


def _none(value: Any) -> None:
    if value is not None:
        _refuse(value, "null")


def _int(value: Any) -> int:
    if type(value) is not int or not -_INT_LIMIT <= value < _INT_LIMIT:
        _refuse(value, "an integer of 64 bits")
    number: int = value
    return number


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    return float(_int(value))


def _list_of(item: _Reader) -> _Reader:
    def convert(value: Any) -> list[Any]:
        if type(value) is not list:
            _refuse(value, "a list")
        return [item(each) for each in value]

    return convert


def _dict_of(item: _Reader) -> _Reader:
    def convert(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            _refuse(value, "an object")
        return {key: item(each) for key, each in value.items()}

    return convert


def _tuple_of(items: list[_Reader]) -> _Reader:
    def convert(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(items):
            _refuse(value, f"a list of {len(items)}")
        return tuple(item(each) for item, each in zip(items, value, strict=True))

    return convert


def _either(kinds: list[_Reader]) -> _Reader:
    def convert(value: Any) -> Any:
        problem: ValueError | None = None
        for kind in kinds:
            try:
                return kind(value)
            except ValueError as error:
                problem = problem or error
        raise problem or ValueError("nothing is expected")

    return convert


def _dataclass(kind: Any) -> _Reader:
    hints = get_type_hints(kind)
    items = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def convert(value: Any) -> Any:
        if type(value) is not dict or not required <= value.keys() <= items.keys():
            _refuse(value, f"an object with the fields {', '.join(items)}")
        return kind(**{name: items[name](each) for name, each in value.items()})

    return convert

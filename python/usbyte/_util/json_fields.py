# SPDX-License-Identifier: Apache-2.0
"""Reading of JSON files field by field, with errors that name the file and the field."""

from __future__ import annotations

import json
import math
from typing import NoReturn

from usbyte.errors import UsageError

#: The largest number of seconds or bytes, or factor; larger ones could overflow in a sum.
MOST = 1e18
_LONGEST = 60


class Fields:
    """One JSON object of a file.

    Read all fields that the format has, then call `end`, which rejects the unknown ones.

    Args:
        value: The parsed JSON value.
        file: The name of the file in error messages.
        place: The position of the object in the file, such as "steps[0]"; "" for the root.

    Raises:
        UsageError: The value is not an object.
    """

    def __init__(self, value: object, file: str, place: str = "") -> None:
        self._file, self._place = file, place
        if not isinstance(value, dict):
            raise UsageError(f"'{file}': {place or 'it'} is {_shown(value)}, and must be an object")
        self._values, self._asked = value, set[str]()

    def has(self, name: str) -> bool:
        """Returns whether the field exists and is not null."""
        self._asked.add(name)
        return self._values.get(name) is not None

    def text(self, name: str) -> str:
        """Reads a string; UsageError if the field is missing or has another type."""
        value = self._value(name)
        return value if isinstance(value, str) else self._refuse(name, "a string")

    def one_of(self, name: str, known: tuple[str, ...]) -> str:
        """Reads a string that must be in `known`."""
        value = self.text(name)
        return value if value in known else self._refuse(name, "one of " + ", ".join(known))

    def flag(self, name: str) -> bool:
        """Reads true or false."""
        value = self._value(name)
        return value if isinstance(value, bool) else self._refuse(name, "true or false")

    def number(self, name: str) -> float:
        """Reads a number from 0 to `MOST`."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
            self._refuse(name, f"a number from 0 to {MOST:g}")
        return float(value)

    def whole(self, name: str, least: int, most: int) -> int:
        """Reads an integer from `least` to `most`."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._refuse(name, f"an integer from {least} to {most}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Reads a list of strings."""
        value = self._value(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self._refuse(name, "a list of strings")
        return tuple(value)

    def inner(self, name: str) -> Fields:
        """Reads an object."""
        return Fields(self._value(name), self._file, self._at(name))

    def rows(self, name: str) -> list[Fields]:
        """Reads a list of objects."""
        value = self._value(name)
        if not isinstance(value, list):
            self._refuse(name, "a list")
        return [
            Fields(row, self._file, f"{self._at(name)}[{place}]") for place, row in enumerate(value)
        ]

    def end(self) -> None:
        """Checks that the object has no unknown fields.

        Raises:
            UsageError: The object has a field that no call has asked for.
        """
        for name in self._values.keys() - self._asked:
            raise UsageError(f"'{self._file}': {self._at(name)} is no known field")

    def _value(self, name: str) -> object:
        self._asked.add(name)
        if name not in self._values:
            raise UsageError(f"'{self._file}': {self._at(name)} is missing")
        return self._values[name]

    def _at(self, name: str) -> str:
        name = name if len(name) <= _LONGEST else name[:_LONGEST] + "..."
        return f"{self._place}.{name}" if self._place else name

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        value = _shown(self._values[name])
        raise UsageError(f"'{self._file}': {self._at(name)} is {value}, and must be {wanted}")


def parse(text: str, file: str) -> Fields:
    """Parses the text of a file whose root is an object.

    Args:
        text: The text of the file.
        file: The name of the file in error messages.

    Raises:
        UsageError: The text is not JSON, or its root is not an object.
    """
    try:
        root = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{file}' is not JSON: {error}") from error
    return Fields(root, file)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, float) and not math.isfinite(value):
        return "too large a number"
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."

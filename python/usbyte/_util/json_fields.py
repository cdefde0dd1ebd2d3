"""JSON files of the lab, read field by field, with errors that name file and field."""

from __future__ import annotations

import json
import math
from typing import NoReturn

from usbyte.errors import UsageError

#: Seconds, bytes and factors above are refused, so that no sum of them overflows.
MOST = 1e18
_LONGEST = 60


class Fields:
    """One object of a file, each field of which must be asked for.

    Args:
        value: What the file holds there.
        file: What messages call the file.
        place: Where in the file; empty for all of it.

    Raises:
        UsageError: It is no object.
    """

    def __init__(self, value: object, file: str, place: str = "") -> None:
        self._file, self._place = file, place
        if not isinstance(value, dict):
            raise UsageError(f"'{file}': {place or 'it'} is {_shown(value)}, and must be an object")
        self._values, self._asked = value, set[str]()

    def has(self, name: str) -> bool:
        """Whether there is such a field, and it is not null."""
        self._asked.add(name)
        return self._values.get(name) is not None

    def text(self, name: str) -> str:
        """A string."""
        value = self._value(name)
        return value if isinstance(value, str) else self._refuse(name, "a string")

    def one_of(self, name: str, known: tuple[str, ...]) -> str:
        """A string that is one of those known."""
        value = self.text(name)
        return value if value in known else self._refuse(name, "one of " + ", ".join(known))

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._value(name)
        return value if isinstance(value, bool) else self._refuse(name, "true or false")

    def number(self, name: str) -> float:
        """A number from 0 to `MOST`."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
            self._refuse(name, f"a number from 0 to {MOST:g}")
        return float(value)

    def whole(self, name: str, least: int, most: int) -> int:
        """An integer within bounds."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._refuse(name, f"an integer from {least} to {most}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._value(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self._refuse(name, "a list of strings")
        return tuple(value)

    def inner(self, name: str) -> Fields:
        """An object."""
        return Fields(self._value(name), self._file, self._at(name))

    def rows(self, name: str) -> list[Fields]:
        """A list of objects."""
        value = self._value(name)
        if not isinstance(value, list):
            self._refuse(name, "a list")
        return [
            Fields(row, self._file, f"{self._at(name)}[{place}]") for place, row in enumerate(value)
        ]

    def end(self) -> None:
        """All fields have been asked for.

        Raises:
            UsageError: There is one that nobody has asked for.
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
    """Reads a file's only object.

    Args:
        text: Of the file.
        file: What messages call it.

    Raises:
        UsageError: It is no JSON, or no object.
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

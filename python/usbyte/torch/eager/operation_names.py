# SPDX-License-Identifier: Apache-2.0
"""Names of eager operations.

Names given by users, by usbyte, and derived names are in separate name spaces and never collide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_USER, _AUTO, _PART, _INTERNAL = "user", "auto", "part", "internal"


@dataclass(frozen=True)
class OperationName:
    """The name by which ranks match an operation.

    Attributes:
        space: Name space. Equal labels of different spaces are different operations.
        label: The name that log and error messages show.
    """

    space: str
    label: str

    @classmethod
    def user(cls, label: str) -> OperationName:
        """Returns the name of an operation that the user named."""
        return cls(_USER, label)

    @classmethod
    def auto(cls, label: str) -> OperationName:
        """Returns the name that usbyte gave to an operation that the user did not name."""
        return cls(_AUTO, label)

    @classmethod
    def internal(cls, label: str) -> OperationName:
        """Returns the name of an internal operation; ranks that have joined submit it, too."""
        return cls(_INTERNAL, label)

    @classmethod
    def from_key(cls, key: str) -> OperationName:
        """Returns the name whose `key` is this."""
        space, _, label = key.partition(":")
        return cls(space, label)

    @property
    def key(self) -> str:
        """Space and label as one string, for the store."""
        return f"{self.space}:{self.label}"

    @property
    def is_internal(self) -> bool:
        """Whether the operation is internal to usbyte."""
        return self.space == _INTERNAL

    def part(self, which: str) -> OperationName:
        """Returns the name of one of the operations that this operation consists of."""
        return OperationName(_PART, f"{self.label}.{which}")

    def backward(self) -> OperationName:
        """Returns the name of the operation that this operation's backward pass submits."""
        return replace(self, space=f"{self.space}.backward", label=f"{self.label}.backward")

    def __str__(self) -> str:
        return self.label

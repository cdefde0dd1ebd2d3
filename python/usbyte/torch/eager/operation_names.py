"""Names of eager operations, in spaces of their own: users', usbyte's, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

_USER, _AUTO, _PART, _INTERNAL = "user", "auto", "part", "internal"


@dataclass(frozen=True)
class OperationName:
    """What ranks match an operation by.

    Attributes:
        space: Names of different spaces never meet.
        label: What messages call the operation.
    """

    space: str
    label: str

    @classmethod
    def user(cls, label: str) -> OperationName:
        """A name that the user has given."""
        return cls(_USER, label)

    @classmethod
    def auto(cls, label: str) -> OperationName:
        """A name that usbyte gives to an operation of the user's."""
        return cls(_AUTO, label)

    @classmethod
    def internal(cls, label: str) -> OperationName:
        """The name of an operation of usbyte's own, which ranks that have joined submit too."""
        return cls(_INTERNAL, label)

    @classmethod
    def from_key(cls, key: str) -> OperationName:
        """Inverse of `key`."""
        space, _, label = key.partition(":")
        return cls(space, label)

    @property
    def key(self) -> str:
        """Space and label as one string, for the store."""
        return f"{self.space}:{self.label}"

    @property
    def is_internal(self) -> bool:
        """Whether the operation is usbyte's own."""
        return self.space == _INTERNAL

    def part(self, which: str) -> OperationName:
        """The name of one of several operations that make up this one."""
        return OperationName(_PART, f"{self.label}.{which}")

    def backward(self) -> OperationName:
        """The name of what this operation's backward pass submits."""
        return replace(self, space=f"{self.space}.backward", label=f"{self.label}.backward")

    def __str__(self) -> str:
        return self.label

# SPDX-License-Identifier: Apache-2.0
"""Checked changes of a state that is an enum."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from usbyte.errors import Error

State = TypeVar("State", bound=Enum)


def advance(
    what: str, transitions: Mapping[State, frozenset[State]], before: State, after: State
) -> State:
    """Returns `after`. A state may always follow itself.

    Args:
        what: What has the state, with an article, for the message.
        transitions: By state, the states that may follow it.
        before: The present state.
        after: The next state. Its value is a description for messages.

    Raises:
        Error: `after` must not follow `before`; this is a bug in usbyte.
    """
    if after is not before and after not in transitions[before]:
        raise Error(
            f"{what} cannot go from '{before.value}' to '{after.value}': report this as a bug, and "
            "restart the job from its last checkpoint"
        )
    return after

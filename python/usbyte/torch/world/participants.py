# SPDX-License-Identifier: Apache-2.0
"""The participants of a run: what its optimizers have registered."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from usbyte.errors import UsageError
from usbyte.torch.world.rank_group import Participant


class Participants:
    """Refers to participants weakly, so that optimizers may be garbage-collected.

    Any thread may iterate over them while another one adds some.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Participant] = weakref.WeakSet()
        self._lock = threading.RLock()  # a set must not grow while another thread iterates over it

    def add(self, participant: Participant) -> None:
        """Registers a participant."""
        with self._lock:
            self._all.add(participant)

    def __iter__(self) -> Iterator[Participant]:
        with self._lock:
            return iter(list(self._all))

    def in_order(self) -> list[Participant]:
        """Returns the participants in an order that is the same on all ranks."""
        return sorted(self, key=lambda participant: participant.label)

    def sending(self) -> list[Participant]:
        """Returns the participants that send gradients or parameters to other ranks."""
        return [participant for participant in self if participant.sends]

    def of(self, optimizer: torch.optim.Optimizer) -> Participant | None:
        """Returns the participant that `optimizer` has registered; None if there is none."""
        return next((each for each in self if each.optimizer is optimizer), None)

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns the progress of all participants by label, for messages about faults."""
        found: dict[str, dict[str, Any]] = {}
        for participant in self.in_order():
            found[participant.label] = {}
            with suppress(UsageError):  # the optimizer may be closing
                found |= participant.states()
        return found

    def orphan(self) -> list[Any]:
        """In a forked child: returns the objects whose threads do not exist there."""
        # Without the lock: a thread that does not exist here may have held it at the fork.
        return [each for participant in list(self._all) for each in participant.orphan()]

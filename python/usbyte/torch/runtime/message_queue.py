# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks through the store of the run. Receivers block and do not poll."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import torch.distributed as dist

from usbyte.torch.runtime.store import clone_store

# Torch logs a warning when a wait times out, so the timeout must not be reached. Torch keeps it as
# an int of milliseconds: 24.8 days at most.
_FOREVER = timedelta(days=20)


class StoreMessageQueue:
    """The message queue of one rank: receives its own messages and sends to other ranks.

    Messages to a rank have the keys mail/RANK/1, mail/RANK/2, ... A sender takes the first free
    key with a compare-and-set, so that a sender that dies leaves no gap.

    Args:
        store: Store that the ranks share, for `send`. Calls of `send` must not overlap with other
            uses of it. `receive` uses a connection of its own.
        rank: The rank that receives from this queue.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._own = clone_store(store)  # for the thread that blocks in `receive`
        self._received = 0
        self._serial = itertools.count()
        self._used: dict[int, int] = {}  # by rank, keys known to be taken

    def send(self, rank: int, text: str) -> None:
        """Sends a message to a rank; does not wait until it is received.

        Raises:
            RuntimeError: The store is lost.
        """
        # All messages differ, so that a sender knows whether its compare-and-set succeeded.
        message = f"{self._rank}.{next(self._serial)} {text}"
        sent = False
        while not sent:
            number = self._used[rank] = self._used.get(rank, 0) + 1
            found = self._store.compare_set(f"mail/{rank}/{number}", "", message)
            sent = found.decode() == message

    def receive(self) -> str:
        """Waits for the next message and returns its text. Call it from one thread only.

        Raises:
            RuntimeError: The store is lost.
        """
        key = f"mail/{self._rank}/{self._received + 1}"
        while not self._own.check([key]):
            began = time.monotonic()
            try:
                self._own.wait([key], _FOREVER)
            except RuntimeError:
                if time.monotonic() - began < _FOREVER.total_seconds() / 2:
                    raise
        text = self._own.get(key).decode()
        self._received += 1
        return text.partition(" ")[2]

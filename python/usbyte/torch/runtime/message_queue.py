"""Messages from rank to rank through the job's store. Nobody polls: the store wakes who waits."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import torch.distributed as dist

from usbyte.torch.runtime.store import clone_store

# torch logs a warning when a wait times out, so it never does; torch counts it in an int of
# milliseconds (24.8 days).
_FOREVER = timedelta(days=20)


class StoreMessageQueue:
    """Of one rank: it reads its own and writes to others'.

    The messages of a box have the keys mail/RANK/1, mail/RANK/2, ...; who writes takes the first
    that is free, so that none is missing when a writer dies.

    Args:
        store: The ranks' keys, for writing; calls of `send` must not overlap with other uses.
        rank: Whose it is.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._own = clone_store(store)  # for the thread that blocks in `receive`
        self._received = 0
        self._serial = itertools.count()
        self._used: dict[int, int] = {}  # by rank, keys known to be taken

    def send(self, rank: int, text: str) -> None:
        """Puts a message into a rank's box.

        Raises:
            RuntimeError: The store is gone.
        """
        # No two are equal, so that a writer knows whether it was the first at a key.
        mine = f"{self._rank}.{next(self._serial)} {text}"
        taken = False
        while not taken:
            number = self._used[rank] = self._used.get(rank, 0) + 1
            found = self._store.compare_set(f"mail/{rank}/{number}", "", mine)
            taken = found.decode() == mine

    def receive(self) -> str:
        """Waits for the next message. For one thread.

        Raises:
            RuntimeError: The store is gone.
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

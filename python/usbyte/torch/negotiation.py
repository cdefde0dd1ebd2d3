"""How ranks agree through a store on one order of operations that each submits in its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from usbyte.torch.calls import Calls
from usbyte.torch.handles import Request
from usbyte.torch.matching import Descriptor, Verdict, match
from usbyte.torch.store import clone_store, private_store, read_now

_PATIENCE = timedelta(days=20)  # torch counts it in an int of milliseconds (24.8 days)
_ANSWER_S = 5.0  # how long the store may take to answer before it counts as lost


class Negotiation:
    """The protocol, and nothing else.

    1. A rank appends its descriptor to the key `op/<name>`, then adds 1 to `count/<name>`.
    2. The rank whose addition completes the count reads all descriptors, deletes both keys, checks
       the descriptors against each other, draws the operation's place in the global order from the
       counter `order`, and writes a verdict to `inbox/<rank>/<place>` of every rank. Deleting comes
       first: whoever has seen a verdict may submit the same name again.
    3. One thread in each rank blocks on `inbox/<rank>/<next>` (the server answers when the key
       appears), runs the operation, and deletes the key.

    So all ranks run the same operations in the same order, and every key has one last reader, which
    deletes it.

    Args:
        store: Store of this run; connections and keys are made from it.
        rank: This rank's position among the members.
        members: What descriptors call the ranks, ascending; at least 2.
        limit_s: How long the store may take for an announcement.

    Raises:
        UsageError: The store is not served over TCP.
    """

    def __init__(
        self, store: dist.Store, rank: int, members: Sequence[int], limit_s: float
    ) -> None:
        self._rank, self._members, self._limit_s = rank, members, limit_s
        self._store: Any = private_store(store, "eager")  # torch's stubs lack half of its methods
        # A connection serves one thread at a time, and the one that waits is always in use.
        self._inbox = clone_store(self._store)
        self._inbox.set_timeout(_PATIENCE)
        self._calls = Calls("usbyte-ask")
        self._lock = threading.Lock()  # guards the two below
        self._place = 0
        self._woken = False

    def announce(self, request: Request) -> None:
        """Tells the other ranks of an operation; from any thread.

        Raises:
            RuntimeError: The store is lost, or does not answer for as long as operations may take.
        """
        self._calls.make(lambda: self._announce(request), self._limit_s, patient=True)

    def _announce(self, request: Request) -> None:
        store, descriptors = self._store, f"op/{request.name}"
        count = f"count/{request.name}"
        store.append(descriptors, request.descriptor.to_json() + "\n")
        if store.add(count, 1) < len(self._members):
            return
        lines = store.get(descriptors).decode().splitlines()
        store.delete_key(descriptors)
        store.delete_key(count)
        verdicts = match(request.name, [Descriptor.from_json(line) for line in lines])
        place = store.add("order", 1) - 1
        store.multi_set(
            [_slot(rank, place) for rank in range(len(self._members))],
            [verdict.to_json() for verdict in verdicts],
        )

    def next(self) -> Verdict | None:
        """Waits for the next operation that all ranks have submitted; from one thread.

        Returns:
            Its verdict, or None after `wake`.

        Raises:
            RuntimeError: The store is lost.
        """
        slot = _slot(self._rank, self._place)
        with self._lock:
            woken = self._woken
        text = b"" if woken else self._get(slot)
        if self._woken:
            with suppress(RuntimeError):
                self._inbox.delete_key(slot)
            return None
        return Verdict.from_json(text.decode())

    def advance(self) -> None:
        """Ends the operation that `next` returned.

        Raises:
            RuntimeError: The store is lost.
        """
        done = _slot(self._rank, self._place)
        with self._lock:
            self._place += 1
        self._inbox.delete_key(done)

    def wake(self, timeout_s: float) -> None:
        """Makes `next` return None from now on; from any other thread, also without a store."""
        with self._lock:
            self._woken = True
            slot = _slot(self._rank, self._place)
        with suppress(RuntimeError):
            self._calls.make(lambda: self._store.set(slot, "wake"), timeout_s)
        self._calls.close()

    def missing(self, name: str) -> list[int] | None:
        """Ranks that have not submitted what this rank has; None if the store does not answer."""
        try:
            found = self._calls.make(lambda: read_now(self._store, f"op/{name}"), _ANSWER_S)
        except RuntimeError:
            return None
        if found is None:  # deleted by the rank that completed it
            return []
        here = {Descriptor.from_json(line).rank for line in found.decode().splitlines()}
        return [rank for rank in self._members if rank not in here]

    def _get(self, slot: str) -> bytes:
        while True:
            began = time.monotonic()
            try:
                return self._inbox.get(slot)
            except RuntimeError:
                if time.monotonic() - began < _PATIENCE.total_seconds() / 2:
                    raise


def _slot(rank: int, place: int) -> str:
    return f"inbox/{rank}/{place}"

# SPDX-License-Identifier: Apache-2.0
"""Protocol by which ranks, through a store, put eager collectives into one global order.

Each rank may submit its operations in an order of its own.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from usbyte.torch.eager.descriptors import Descriptor, MatchResult, match
from usbyte.torch.eager.operation_names import OperationName
from usbyte.torch.eager.request import Request
from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.runtime.messages import read, unreadable
from usbyte.torch.runtime.store import clone_store, private_store, read_now
from usbyte.torch.runtime.worker_thread import NoAnswerError, SerialExecutor

_PATIENCE = timedelta(days=20)  # torch keeps it as an int of milliseconds: 24.8 days at most
_ANSWER_S = 5.0  # timeout of the store call that finds the missing ranks
_ORDER = "the order of operations that another rank has written"

#: Name of the operation that ends the join: every rank submits it, and it runs when all have.
JOIN = OperationName.internal("usbyte.join")


class Negotiation:
    """One rank's side of the protocol.

    1. A rank appends its descriptor to the key `op/<name>`, then adds 1 to `count/<name>`. Names
       are the keys of `OperationName`.
    2. The rank whose addition completes the count reads all descriptors. It claims the operation:
       a compare-and-set replaces the count if the count equals the number of descriptors. The rank
       whose claim succeeds deletes both keys and checks the descriptors against each other. It
       draws the operation's place in the global order from the counter `order`, and writes a match
       result to `inbox/<rank>/<place>` of every rank. The keys are deleted first, because a rank
       that has read its match result may submit the same name again.
    3. One thread in each rank blocks on `inbox/<rank>/<next>` (the server answers when the key
       appears), runs the operation, and deletes the key.
    4. A rank that joins draws a place too, and writes there that it has joined. After that place,
       each rank completes operations without the joined rank, and looks again at the operations
       that it has submitted itself. Several ranks can then find the same operation complete, so
       claims are needed. No operation is overlooked: the last rank to both submit it and learn of
       the join sees all descriptors. Internal operations of usbyte still wait for all ranks.

    All ranks therefore run the same operations in the same order. Every key has one last reader,
    which deletes it.

    Args:
        store: Store of this run. The object makes its own connections and key prefix.
        rank: This rank's position in `members`.
        members: Rank numbers that descriptors use, ascending; at least 2.
        limit_s: Seconds that the store may take to accept an announcement.

    Raises:
        UsageError: The store is not served over TCP.
    """

    def __init__(
        self, store: dist.Store, rank: int, members: Sequence[int], limit_s: float
    ) -> None:
        self._rank, self._members, self._limit_s = rank, members, limit_s
        self._store: Any = private_store(store, "eager")  # torch's stubs lack half of its methods
        # A connection serves one thread at a time, and `next` blocks on this one.
        self._inbox = clone_store(self._store)
        self._inbox.set_timeout(_PATIENCE)
        self._calls = SerialExecutor("usbyte-ask")
        # Guards _place, _woken and _joined. Reentrant, because signal handlers may use it, too.
        self._lock = threading.RLock()
        self._place = 0
        self._woken = False
        self._joined: list[int] = []  # in the order in which they joined
        #: The rank that joined last, set when all ranks have joined.
        self.last = self._members[-1]

    def announce(self, request: Request) -> None:
        """Submits an operation to the other ranks. May be called from any thread.

        Raises:
            MismatchError: Another rank's descriptor of the operation cannot be read.
            RuntimeError: The store is lost, or has not answered within `limit_s`.
        """
        self._calls.run(lambda: self._announce(request), self._limit_s, ignore_backlog=True)

    def _announce(self, request: Request) -> None:
        name = request.name.key
        self._store.append(f"op/{name}", request.descriptor.to_json() + "\n")
        count = self._store.add(f"count/{name}", 1)
        if count + len(self._absent(name)) >= len(self._members):
            self._complete(name)

    def _complete(self, name: str) -> None:
        """Publishes the match result if every rank that has not joined submitted the operation."""
        absent, count = self._absent(name), read_now(self._store, f"count/{name}")
        if count is None or int(count) + len(absent) < len(self._members):
            return
        found = read_now(self._store, f"op/{name}")
        if found is None:
            return
        descriptors = self._descriptors(name, found)
        joined = set(self._members) - {d.rank for d in descriptors}
        if not joined <= set(absent):
            return
        claim = str(-1 - self._rank)
        # A count that differs means: some rank has appended its descriptor and not yet counted it.
        whole = str(len(descriptors))
        if self._store.compare_set(f"count/{name}", whole, claim) != claim.encode():
            return
        self._store.delete_key(f"op/{name}")
        self._store.delete_key(f"count/{name}")
        self._post([result.to_json() for result in match(name, descriptors, sorted(joined))])

    def _post(self, texts: Sequence[str]) -> None:
        place = self._store.add("order", 1) - 1
        self._store.multi_set([_slot(rank, place) for rank in range(len(texts))], texts)

    def _absent(self, name: str) -> list[int]:
        """Returns the joined ranks, which need not submit this operation; none if internal."""
        return [] if OperationName.from_key(name).is_internal else self.joined()

    def join(self) -> None:
        """Declares that this rank submits no user operations until the operation `JOIN` ends.

        Raises:
            RuntimeError: The store is lost, or has not answered within `limit_s`.
        """
        text = json.dumps({"joined": self._members[self._rank]})
        self._calls.run(
            lambda: self._post([text] * len(self._members)), self._limit_s, ignore_backlog=True
        )

    def next(self, in_flight: Callable[[], Iterable[str]]) -> MatchResult | None:
        """Waits for the next operation that all ranks have submitted. Call it from one thread.

        Args:
            in_flight: Returns the keys of the operations that this rank has in flight.

        Returns:
            The match result of the operation, or None after `wake`.

        Raises:
            MismatchError: A message of another rank cannot be read.
            RuntimeError: The store is lost.
        """
        while (text := self._read()) is not None:
            message = read(_ORDER, text, dict[str, Any])
            if "joined" not in message:
                break
            with self._lock:
                self._joined.append(self._who_joined(message["joined"]))
            for name in in_flight():
                self._calls.run(partial(self._complete, name), self._limit_s, ignore_backlog=True)
            self.advance()
        if text is None:
            return None
        result = MatchResult.from_json(text, _ORDER)
        if result.name == JOIN.key:
            with self._lock:
                if not self._joined:
                    raise unreadable(_ORDER, "join() ends, but no rank has called it")
                self.last = self._joined[-1]
                self._joined.clear()
        return result

    def _who_joined(self, rank: object) -> int:
        if type(rank) is not int or rank not in self._members or rank in self._joined:
            raise unreadable(_ORDER, f"rank {rank!r:.80} cannot have called join()")
        return rank

    def _descriptors(self, name: str, found: bytes) -> list[Descriptor]:
        """Parses the descriptors that ranks have appended for the operation `name`."""
        what = f"what the ranks have sent for '{OperationName.from_key(name)}'"
        lines = found.split(b"\n")
        if lines.pop():
            raise unreadable(what, "a line has no end")
        descriptors = [Descriptor.from_json(line, what) for line in lines]
        ranks = [descriptor.rank for descriptor in descriptors]
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(self._members):
            raise unreadable(what, f"it is from {name_ranks(ranks) if ranks else 'no rank'}")
        return descriptors

    def _read(self) -> bytes | None:
        slot = _slot(self._rank, self._place)
        with self._lock:
            woken = self._woken
        text = b"" if woken else self._get(slot)
        if self._woken:
            with suppress(RuntimeError):
                self._inbox.delete_key(slot)
            return None
        return text

    def advance(self) -> None:
        """Marks the operation that `next` returned as done and moves to the next place.

        Raises:
            RuntimeError: The store is lost.
        """
        done = _slot(self._rank, self._place)
        with self._lock:
            self._place += 1
        self._inbox.delete_key(done)

    def wake(self, timeout_s: float) -> None:
        """Makes `next` return None from now on. Works without a store, too.

        Call it from a thread other than the one in `next`.

        Args:
            timeout_s: Seconds that the store may take to wake the thread in `next`.
        """
        with self._lock:
            self._woken = True
            slot = _slot(self._rank, self._place)
        with suppress(RuntimeError):
            self._calls.run(lambda: self._store.set(slot, "wake"), timeout_s)
        self._calls.close()

    def missing(self, name: OperationName) -> list[int] | None:
        """Returns the ranks that have not submitted an operation that this rank has submitted.

        Ranks that contribute zeros because they joined are not missing.

        Returns:
            The missing ranks, or None if the store does not answer.

        Raises:
            MismatchError: Another rank's descriptor of the operation cannot be read.
            RuntimeError: The store is lost, or `wake` was called.
        """
        try:
            found = self._calls.run(lambda: read_now(self._store, f"op/{name.key}"), _ANSWER_S)
        except NoAnswerError:
            return None
        if found is None:  # deleted by the rank that completed it
            return []
        submitted = {d.rank for d in self._descriptors(name.key, found)}
        not_missing = submitted.union(self._absent(name.key))
        return [rank for rank in self._members if rank not in not_missing]

    def joined(self) -> list[int]:
        """Returns the ranks that have called `join`, in that order."""
        with self._lock:
            return list(self._joined)

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

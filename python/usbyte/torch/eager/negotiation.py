"""How ranks agree through a store on one order of operations that each submits in its own."""

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

_PATIENCE = timedelta(days=20)  # torch counts it in an int of milliseconds (24.8 days)
_ANSWER_S = 5.0  # how long the store may take to answer a question about what is missing
_ORDER = "the order of operations that another rank has written"

#: The operation with which all ranks end what `Negotiation.join` began.
JOIN = OperationName.internal("usbyte.join")


class Negotiation:
    """The protocol, and nothing else.

    1. A rank appends its descriptor to the key `op/<name>`, then adds 1 to `count/<name>`. Names
       are the keys of `OperationName`.
    2. A rank whose addition completes the count reads all descriptors and claims the operation, by
       changing the count from just as many. Who succeeds deletes both keys, checks the descriptors
       against each other, draws the operation's place in the global order from the counter
       `order`, and writes a verdict to `inbox/<rank>/<place>` of every rank. Deleting comes first:
       whoever has seen a verdict may submit the same name again.
    3. One thread in each rank blocks on `inbox/<rank>/<next>` (the server answers when the key
       appears), runs the operation, and deletes the key.
    4. A rank that joins draws a place too, and writes there that it has. From there on, each rank
       takes the descriptors for complete without it, and looks again at what it has submitted
       itself; hence the claims, as several ranks can find the same complete. The last rank to
       submit an operation and to know who has joined sees both, so that none is overlooked.
       Operations of usbyte's own wait for all ranks as before.

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
        self._calls = SerialExecutor("usbyte-ask")
        self._lock = threading.RLock()  # guards the three below; for signal handlers, too
        self._place = 0
        self._woken = False
        self._joined: list[int] = []  # in the order in which they came
        #: The rank that joined last, once all have.
        self.last = self._members[-1]

    def announce(self, request: Request) -> None:
        """Tells the other ranks of an operation; from any thread.

        Raises:
            MismatchError: Another rank's part of the operation cannot be read.
            RuntimeError: The store is lost, or does not answer for as long as operations may take.
        """
        self._calls.run(lambda: self._announce(request), self._limit_s, ignore_backlog=True)

    def _announce(self, request: Request) -> None:
        name = request.name.key
        self._store.append(f"op/{name}", request.descriptor.to_json() + "\n")
        count = self._store.add(f"count/{name}", 1)
        if count + len(self._absent(name)) >= len(self._members):
            self._complete(name)

    def _complete(self, name: str) -> None:
        """Lets an operation run if all ranks have submitted it that are going to."""
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
        whole = str(len(descriptors))  # or else somebody has appended who has not added yet
        if self._store.compare_set(f"count/{name}", whole, claim) != claim.encode():
            return
        self._store.delete_key(f"op/{name}")
        self._store.delete_key(f"count/{name}")
        self._post([verdict.to_json() for verdict in match(name, descriptors, sorted(joined))])

    def _post(self, texts: Sequence[str]) -> None:
        place = self._store.add("order", 1) - 1
        self._store.multi_set([_slot(rank, place) for rank in range(len(texts))], texts)

    def _absent(self, name: str) -> list[int]:
        """Ranks that need not submit this operation."""
        return [] if OperationName.from_key(name).is_internal else self.joined()

    def join(self) -> None:
        """Tells all ranks to go on without this one, up to the operation `JOIN`.

        Raises:
            RuntimeError: As `announce`.
        """
        text = json.dumps({"joined": self._members[self._rank]})
        self._calls.run(
            lambda: self._post([text] * len(self._members)), self._limit_s, ignore_backlog=True
        )

    def next(self, in_flight: Callable[[], Iterable[str]]) -> MatchResult | None:
        """Waits for the next operation that all ranks have submitted; from one thread.

        Args:
            in_flight: Names what this rank has submitted and has not seen the end of.

        Returns:
            Its verdict, or None after `wake`.

        Raises:
            MismatchError: Another rank has sent what cannot be read.
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
        verdict = MatchResult.from_json(text, _ORDER)
        if verdict.name == JOIN.key:
            with self._lock:
                if not self._joined:
                    raise unreadable(_ORDER, "join() ends, which no rank has called")
                self.last = self._joined[-1]
                self._joined.clear()
        return verdict

    def _who_joined(self, rank: object) -> int:
        if type(rank) is not int or rank not in self._members or rank in self._joined:
            raise unreadable(_ORDER, f"rank {rank!r:.80} cannot have called join()")
        return rank

    def _descriptors(self, name: str, found: bytes) -> list[Descriptor]:
        """What ranks have appended to an operation."""
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
            self._calls.run(lambda: self._store.set(slot, "wake"), timeout_s)
        self._calls.close()

    def missing(self, name: OperationName) -> list[int] | None:
        """Ranks that have not submitted what this rank has; None if the store does not answer.

        Raises:
            MismatchError: Another rank's part of the operation cannot be read.
            RuntimeError: The store is lost, or this has ended by `wake`.
        """
        try:
            found = self._calls.run(lambda: read_now(self._store, f"op/{name.key}"), _ANSWER_S)
        except NoAnswerError:
            return None
        if found is None:  # deleted by the rank that completed it
            return []
        submitted = {d.rank for d in self._descriptors(name.key, found)}
        here = submitted.union(self._absent(name.key))
        return [rank for rank in self._members if rank not in here]

    def joined(self) -> list[int]:
        """Ranks that go without data."""
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

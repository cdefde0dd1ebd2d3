# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: the ranks of a job find each other and prove that they know the job's credential.

Every process writes its rank and a nonce into a log in the store. Rank 0 answers each with a nonce
of its own. The process then signs a proof with both nonces; rank 0's signed answer proves the same
of rank 0. When all ranks have proven this, rank 0 asks whether they are still there, and then
writes the outcome. All later keys have a prefix that only the ranks of this start of the job know.
A launcher's store may outlive restarts, and keys of earlier starts are never mistaken for new ones.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from usbyte.errors import Error, UsageError
from usbyte.torch.runtime.credential import Credential
from usbyte.torch.runtime.format import brief_error, name_ranks
from usbyte.torch.runtime.placement import Place
from usbyte.torch.runtime.store import address_of, without_prefixes
from usbyte.torch.runtime.worker_thread import SerialExecutor

log = logging.getLogger("usbyte")

_NOTICE_S = 5.0  # between log messages that name the missing ranks
_FIRST_PAUSE_S = 0.002
_ANSWER_S = 5.0
_PART_S = 3.0  # limit for the other ranks to read why the start has failed
_MOST_ENTRIES = 1000  # log entries read in one call
# While rank 0 is missing, only ranks up to this one read the log to name the missing ranks. The
# store serves one request at a time, and reads of all ranks would overload it.
_READERS = 8
_ABSENT = b""
_SILENT = "which connected and no longer answers"


class Join(NamedTuple):
    """The entry that a process writes into the log when it arrives.

    Attributes:
        rank: Rank of the process, as its launcher gave it.
        size: Number of ranks, as the launcher of the process gave it.
        nonce: Random text drawn by the process.
        pid: Process id.
        place: Where the process runs.
    """

    rank: int
    size: int
    nonce: str
    pid: int
    place: Place

    def who(self) -> str:
        """Returns process id and host, for messages."""
        return f"pid {self.pid} on host '{self.place.host}'"

    @staticmethod
    def read(content: Any) -> Join | None:
        """Parses the entry from a JSON value; returns None if it is not valid."""
        match content:
            case [int(rank), int(size), str(nonce), int(pid), place]:
                where = _read_place(place)
                return Join(rank, size, nonce, pid, where) if where and rank >= 0 else None
        return None


class Met(NamedTuple):
    """The result of a rendezvous.

    Attributes:
        store: Store with a key prefix that only the ranks of this start know.
        places: Place of each rank, by rank.
    """

    store: dist.Store
    places: list[Place]


def _read_place(content: Any) -> Place | None:
    match content:
        case [str(host), str(machine), int() | None as rank, int() | None as size] if (
            rank is None or rank >= 0
        ) and (size is None or size > 0):
            return Place(host, machine, rank, size)
    return None


class _Log:
    """An append-only log in the store, shared by all processes."""

    def __init__(self, store: dist.Store, first: int) -> None:
        self._store = store
        self._next = first
        # Entries whose number was drawn and whose text is not there. Their process may have died.
        self._gaps: list[int] = []

    def add(self, text: str) -> int:
        """Appends an entry and returns its number."""
        number = self._store.add("log", 1) - 1
        self._store.set(f"log/{number}", text)
        return number

    def read(self) -> list[tuple[int, bytes]]:
        """Returns number and text of up to `_MOST_ENTRIES` new entries and of filled gaps."""
        end = min(self._store.add("log", 0), self._next + _MOST_ENTRIES)
        numbers = [*self._gaps, *range(self._next, end)]
        found = [
            (n, self._store.get(key)) for n in numbers if self._store.check([key := f"log/{n}"])
        ]
        self._gaps = sorted(set(numbers) - {n for n, _ in found})
        self._next = end
        return found

    @property
    def position(self) -> int:
        """Number of the first entry that has not been read."""
        return self._gaps[0] if self._gaps else self._next


class Rendezvous:
    """One rank's side of the rendezvous.

    Args:
        store: Store of the default process group, or the store that it will be made with.
        run: Number of this rendezvous among those of this process, from 1; equal on all ranks.
        rank: Rank of this process.
        size: Number of ranks.
        place: Where this process runs.
        credential: Signs with the key that all ranks of the job have.
        single: Whether the store serves one start of the job only, so that a process that comes
            after it is an error. Also set if the store has the job mark.
        prepare: Called when all ranks have come, before the rendezvous succeeds. An exception from
            it ends the start on all ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        run: int,
        rank: int,
        size: int,
        place: Place,
        credential: Credential,
        single: bool,
        prepare: Callable[[], None],
    ) -> None:
        self._base = store
        self._store = dist.PrefixStore(f"usbyte/rendezvous/{run}", store)
        self._rank, self._size = rank, size
        self._credential = credential
        self._where = address_of(without_prefixes(store))
        self._single = single
        self._prepare = prepare
        self._mine = Join(rank, size, secrets.token_hex(16), os.getpid(), place)
        self._leader = ""  # rank 0's nonce; empty while it is not known
        self._start: dist.Store | None = None  # with the prefix of this start; needs _leader
        self._joined: dict[str, Join] = {}  # by nonce
        self._strangers = 0  # log entries that processes of other jobs have written
        self._proven: dict[int, Join] = {}  # ranks that have proven the credential; rank 0 only
        self._asked = False  # whether rank 0 has asked if all ranks are still there
        self._ready = False  # whether this rank has answered that

    def meet(self, limit_s: float) -> Met:
        """Waits for the other ranks. Collective.

        Args:
            limit_s: Seconds to wait.

        Raises:
            UsageError: A rank did not come in time, came twice, or ended meanwhile.
        """
        # Calls to the store may block for ever, because its host may be down.
        calls = SerialExecutor("usbyte-rendezvous")
        self._deadline = time.monotonic() + limit_s
        self._notice = time.monotonic() + _NOTICE_S
        self._limit_s = limit_s
        try:
            calls.run(self._join, limit_s)
            outcome = self._wait(calls)
        except RuntimeError as error:
            if isinstance(error, Error):
                self._tell(calls, str(error))
                raise
            raise UsageError(
                f"rank {self._rank} of {self._size} could not meet the others at {self._where}: "
                f"the store there does not answer ({brief_error(error)}). Check that rank 0 and "
                "the launcher are alive, and read their logs"
            ) from error
        except BaseException as error:
            self._tell(calls, f"{type(error).__name__}: {error}")
            raise
        finally:
            calls.close()
        return self._read(outcome)

    def _wait(self, calls: SerialExecutor) -> list[Any]:
        """Repeats `_step` until there is an outcome or the limit is reached; returns the outcome.

        An outcome is ["met", places by rank] or ["failed", reason].
        """
        pause, longest = _FIRST_PAUSE_S, max(0.02, self._size * 1e-4)
        while True:
            outcome = calls.run(self._step, self._left())
            if outcome is None and time.monotonic() > self._deadline:
                outcome = calls.run(self._give_up, self._left())
            if outcome is not None:
                if outcome[0] == "failed":
                    self._part(calls)
                return outcome
            if time.monotonic() > self._notice:
                self._notice += _NOTICE_S
                calls.run(self._tell_who_is_missing, self._left())
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _left(self) -> float:
        """Seconds that the store may take for the next answer; at least `_ANSWER_S`.

        Near the end of the start limit, a machine that stalls for a moment must not be mistaken for
        a lost store.
        """
        return max(_ANSWER_S, self._deadline - time.monotonic())

    def _join(self) -> None:
        self._single |= self._credential.check_mark(without_prefixes(self._base), self._where)
        done = self._first()
        if done and self._single:
            self._refuse()
        self._log = _Log(self._store, done)
        self._number = self._log.add(f"join {self._credential.sign(self._mine, 'join')}")
        if self._rank == 0:
            self._follow(self._mine.nonce)
            self._proven[0] = self._mine

    def _first(self) -> int:
        """Returns the number of the first log entry after those of completed starts."""
        if not self._store.check(["first"]):
            return 0
        first = self._credential.verify(self._store.get("first"), "first")
        return first if isinstance(first, int) and first > 0 else 0

    def _refuse(self) -> None:
        raise UsageError(
            f"the {self._size} ranks at {self._where} have started already, and this process (rank "
            f"{self._rank}) is an extra one. Check that only one process has RANK={self._rank}, "
            "and restart all ranks together"
        )

    def _follow(self, leader: str) -> None:
        """Follows the process with the nonce `leader` as rank 0."""
        self._leader = leader
        self._asked = self._ready = False
        self._start = dist.PrefixStore(
            f"usbyte/{self._credential.mac('start', leader)[:32]}", self._base
        )

    def _step(self) -> list[Any] | None:
        """Does all work that is possible now; returns the outcome, or None if there is none yet."""
        answer = self._credential.verify(
            self._value(self._store, f"answer/{self._mine.nonce}"), "answer", self._mine.nonce
        )
        if self._rank == 0:
            if isinstance(answer, str):
                return self._decide(self._twice(0, f"{self._mine.who()} and {answer}"))
            self._lead()
        elif isinstance(answer, str) and answer != self._leader:
            self._follow(answer)
            self._log.add(f"proof {self._credential.sign(self._mine.nonce, 'proof', answer)}")
        if self._start is None:
            return None
        if not self._ready and self._start.check(["asked"]):
            self._prepare()
            self._start.set(f"ready/{self._rank}", "")
            self._ready = True
        outcome = self._verify("outcome")
        return outcome if isinstance(outcome, list) and outcome else None

    def _lead(self) -> None:
        """Does rank 0's additional work: reads the log, asks all ranks, writes the outcome."""
        assert self._start is not None
        self._read_log()
        if not self._asked and len(self._proven) == self._size:
            self._start.set("asked", "")
            self._asked = True
        if self._asked and self._start.check([f"ready/{rank}" for rank in range(self._size)]):
            places = [self._proven[rank].place for rank in range(self._size)]
            if self._decide(["met", places])[0] == "met":
                self._store.set("first", self._credential.sign(self._log.position, "first"))

    def _read_log(self) -> None:
        for number, text in self._log.read():
            kind, _, message = text.partition(b" ")
            if kind != b"join":
                if self._rank == 0:
                    self._on_proof(message)
            elif join := Join.read(self._credential.verify(message, "join")):
                new = join.nonce not in self._joined
                self._joined[join.nonce] = join
                if self._rank == 0 and new and join.nonce != self._mine.nonce:
                    self._on_join(number, join)
            else:
                self._strangers += 1

    def _on_join(self, number: int, join: Join) -> None:
        if join.rank > 0:
            self._answer(join, self._mine.nonce)
        elif number > self._number:  # earlier entries may be of a process that has died since
            self._answer(join, self._mine.who())
            self._decide(self._twice(0, f"{self._mine.who()} and {join.who()}"))

    def _answer(self, join: Join, text: str) -> None:
        signed = self._credential.sign(text, "answer", join.nonce)
        self._store.set(f"answer/{join.nonce}", signed)

    def _on_proof(self, message: bytes) -> None:
        nonce = self._credential.verify(message, "proof", self._mine.nonce)
        join = self._joined.get(nonce) if isinstance(nonce, str) else None
        if join is None:
            return
        if join.size != self._size or join.rank >= self._size:
            self._decide(
                [
                    "failed",
                    f"rank {join.rank} ({join.who()}) was started with WORLD_SIZE={join.size}, "
                    f"rank 0 with WORLD_SIZE={self._size}: start all ranks with the same",
                ]
            )
        elif (other := self._proven.setdefault(join.rank, join)) is not join:
            self._decide(self._twice(join.rank, f"{other.who()} and {join.who()}"))

    def _twice(self, rank: int, who: str) -> list[Any]:
        text = (
            f"two processes at {self._where} are rank {rank} of this job: {who}. One of them has "
            "been restarted, or has the wrong RANK; start all ranks together, each with a RANK of "
            "its own"
        )
        return ["failed", text]

    def _decide(self, outcome: list[Any]) -> list[Any]:
        """Publishes an outcome unless there is one; returns the first that was published."""
        assert self._start is not None
        signed = self._credential.sign(outcome, "outcome", self._leader)
        self._start.compare_set("outcome", "", signed)
        return self._verify("outcome") or outcome

    def _read(self, outcome: list[Any]) -> Met:
        match outcome:
            case ["met", [*contents]]:
                places = [place for content in contents if (place := _read_place(content))]
                if len(places) == self._size and self._start is not None:
                    return Met(self._start, places)
            case ["failed", str(reason)]:
                raise UsageError(f"rank {self._rank} of {self._size}: {reason}")
        raise UsageError(
            f"the store at {self._where} has an outcome that this version of usbyte does not "
            "write: install the same version on all hosts"
        )

    def _tell(self, calls: SerialExecutor, reason: str) -> None:
        """Publishes that this rank ends with an error, so that no rank waits for it."""
        if self._start is not None:
            text = (
                f"rank {self._rank} ({self._mine.who()}) ended before all ranks had met: {reason}"
            )
            with suppress(RuntimeError):
                calls.run(lambda: self._decide(["failed", text]), 1.0)
            self._part(calls)

    def _part(self, calls: SerialExecutor) -> None:
        """Delays the end of rank 0, which may serve the store, until others read the outcome."""
        start = self._start
        if start is None:
            return
        with suppress(RuntimeError):
            calls.run(lambda: start.set(f"parted/{self._rank}", ""), 1.0)
            keys = [f"parted/{rank}" for rank in self._proven]  # empty on all ranks but rank 0
            deadline = time.monotonic() + _PART_S
            while keys and time.monotonic() < deadline:
                if calls.run(lambda: start.check(keys), 1.0):
                    break
                time.sleep(0.02)

    def _missing(self) -> str:
        """Returns the ranks that this rank waits for, for messages."""
        if self._rank == 0:
            return self._missing_to_leader()
        published = self._verify("missing") if self._start is not None else None
        if isinstance(published, str):
            return published
        if self._rank > _READERS:
            return f"rank 0 of {self._size}"
        self._read_log()
        came = {join.rank for join in self._joined.values()} - (set() if self._leader else {0})
        if absent := [rank for rank in range(self._size) if rank not in came]:
            return f"{name_ranks(absent)} of {self._size}"
        return f"rank 0 of {self._size}, {_SILENT}"

    def _missing_to_leader(self) -> str:
        assert self._start is not None
        if self._asked:
            silent = [r for r in range(self._size) if not self._start.check([f"ready/{r}"])]
            return f"{name_ranks(silent)} of {self._size}, {_SILENT}"
        absent = [rank for rank in range(self._size) if rank not in self._proven]
        return f"{name_ranks(absent)} of {self._size}"

    def _tell_who_is_missing(self) -> None:
        if self._single and not self._leader and self._first():
            self._refuse()
        missing = self._missing()
        level = logging.WARNING
        if self._rank == 0 and self._start is not None:
            self._start.set("missing", self._credential.sign(missing, "missing", self._leader))
        elif self._leader or (self._single and self._lower_ranks_wait()):
            level = logging.INFO  # another rank logs it as a warning
        text = "rank %d: waiting for %s at %s%s"
        log.log(level, text, self._rank, missing, self._where, self._others())

    def _lower_ranks_wait(self) -> bool:
        return self._rank > _READERS or any(
            0 < join.rank < self._rank for join in self._joined.values()
        )

    def _others(self) -> str:
        """Returns the number of processes of other jobs as an addition to a message, or ""."""
        if not self._strangers:
            return ""
        return f" ({self._strangers} processes of other jobs connected there too)"

    def _give_up(self) -> list[Any]:
        reason = (
            f"{self._missing()} did not connect to {self._where} within {self._limit_s:g} s"
            f"{self._others()}. Check that all ranks are alive and were started with "
            f"WORLD_SIZE={self._size}, each with a RANK of its own and the same MASTER_ADDR and "
            "MASTER_PORT; raise USBYTE_START_LIMIT_S if they need longer to start"
        )
        failed = ["failed", reason]
        return failed if self._start is None else self._decide(failed)

    def _verify(self, key: str) -> Any:
        assert self._start is not None
        return self._credential.verify(self._value(self._start, key), key, self._leader)

    @staticmethod
    def _value(store: dist.Store, key: str) -> bytes:
        return store.get(key) if store.check([key]) else _ABSENT

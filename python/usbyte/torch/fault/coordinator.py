# SPDX-License-Identifier: Apache-2.0
"""Turns a fault into one verdict that names the culprit and reaches every rank in bounded time."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from usbyte.errors import MismatchError
from usbyte.torch.fault.report import State, behind, last_operations, read_state
from usbyte.torch.runtime.format import brief_error
from usbyte.torch.runtime.message_queue import StoreMessageQueue
from usbyte.torch.runtime.messages import read
from usbyte.torch.runtime.store import clone_store
from usbyte.torch.runtime.worker_thread import SerialExecutor

log = logging.getLogger("usbyte")

_ANSWER_S = 2.0  # timeout for a rank's state, when another rank asks for it
_VERDICT_S = _ANSWER_S + 3.0  # timeout of the other ranks for the verdict
_GRACE_S = 3.0  # added for a store that is slow to answer
_REPORT_S = _VERDICT_S + _GRACE_S
_LEFT_S = 5.0  # timeout for the recovery state of a rank that has answered (`compare`)
_GOODBYE_S = 5.0  # timeout of rank 0 for each other rank's goodbye
_REMEDY = "Restart the job from its last checkpoint."

_Verdict = tuple[str, list[int] | None]  # the verdict, and the surviving ranks if known


class FaultCoordinator:
    """Turns a fault that one rank noticed into one verdict that every rank raises.

    A thread of each rank waits for messages in the rank's message queue. The first rank that
    notices a fault sends a message to all others. Every live rank answers with its state. The first
    rank makes the verdict from the answers and the missing answers, and writes it to the store. A
    rank that has waited for long uses the same messages to find stragglers; training continues
    meanwhile.

    Args:
        store: Store of this run. The coordinator makes its own connections.
        rank: This rank.
        size: Number of ranks.
        describe: Returns this rank's state.
        block_reads: Called once with the verdict, from any thread, to block reads of parameters. It
            runs before `verdict` is set and must not block.
        on_fault: Called once with the verdict after `block_reads`, in the same thread; may call
            `compare`.

    Attributes:
        leaving: Whether this rank has begun to shut down normally.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        describe: Callable[[], State],
        block_reads: Callable[[str], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self._store = clone_store(store)
        # For the thread only, because a connection serves one thread at a time.
        self._thread_store = clone_store(store)
        self._rank, self._size = rank, size
        self._describe, self._block_reads, self._on_fault = describe, block_reads, on_fault
        self._lock = threading.Lock()  # guards _verdict and _survivors
        # _store and _messages are used on this executor's thread only.
        self._calls = SerialExecutor("usbyte-faults-ask")
        self._messages = StoreMessageQueue(self._store, rank)
        self._verdict: str | None = None
        self._survivors: list[int] | None = None
        self._closing = False
        self.leaving = False
        self._store.set(f"who/{rank}", f"host {socket.gethostname()}, pid {os.getpid()}")
        # No WorkerThread: it waits for messages in the store, not for tasks of this process.
        self._thread = threading.Thread(
            target=self._receive_messages, name="usbyte-faults", daemon=True
        )
        self._thread.start()

    @property
    def verdict(self) -> str | None:
        """The fault verdict; None if there was no fault."""
        return self._verdict

    def report(self, noticed: str) -> str:
        """Diagnoses a fault together with the other ranks. Blocks for a few seconds at most.

        Args:
            noticed: What went wrong on this rank.

        Returns:
            The fault verdict. It is the same on all ranks, unless the store or the rank that makes
            the diagnosis is lost.
        """
        if self._verdict is None:
            here = f"rank {self._rank} noticed: {noticed}"
            try:
                verdict, survivors = self._calls.run(lambda: self._ask(here), _REPORT_S)
            except RuntimeError as error:
                verdict, survivors = (
                    (
                        "rank 0 or the launcher, which holds the store of this job, has ended or "
                        f"cannot be reached ({brief_error(error)}); {here}. {_REMEDY}"
                    ),
                    None,
                )
            self._decide(verdict, survivors)
        assert self._verdict is not None
        return self._verdict

    def announce(self, verdict: str) -> None:
        """Makes `verdict` the fault verdict of all ranks, for a fault whose cause is known."""
        everyone = list(range(self._size))

        def tell() -> None:
            if self._store.add("fault", 1) == 1:
                self._store.set("verdict", json.dumps([verdict, everyone]))
                self._send_all("fault")

        if self._verdict is None:
            with suppress(RuntimeError):  # without the store, no other rank can be reached
                self._calls.run(tell, _REPORT_S)
            self._decide(verdict, everyone)

    def query_stragglers(self, topic: str) -> str:
        """Names the ranks that the others wait for, while training continues.

        Args:
            topic: Names the awaited operation, equal on all ranks. Only the first query of a topic,
                on any rank, asks the other ranks.

        Returns:
            Text for a log message; it says so if the store does not answer. Empty if no rank is
            behind, if another rank has queried the topic, or after a fault.
        """

        def ask() -> list[str]:
            if self._store.add(f"asked/{topic}", 1) > 1:
                return []
            self._send_all(f"ask told/{topic}")
            states, silent = self._gather(f"told/{topic}")
            missing = [f"rank {r} ({self._describe_rank(r)}) does not answer" for r in silent]
            return missing + behind(states)

        if self._verdict is not None:
            return ""
        try:
            return "; ".join(self._calls.run(ask, _REPORT_S))
        except RuntimeError as error:
            return f"the job's store does not answer: {brief_error(error)}"

    def compare(self, mine: Any) -> dict[int, Any] | None:
        """Gathers a value from every surviving rank. Call it after a fault.

        Args:
            mine: This rank's value, of types that JSON has. Used if this rank survives.

        Returns:
            Values by rank, the same on all ranks. A rank that ended before it gave a value is left
            out. None if the store is lost or the surviving ranks are not known.
        """

        def gather_values() -> dict[int, Any]:
            self._store.set(f"left/{self._rank}", json.dumps(mine))
            if not survivors:  # not known
                return {}
            deadline = time.monotonic() + _LEFT_S
            # One rank gathers for all: the store would take too long if every rank read all values.
            if self._rank != survivors[0]:
                with suppress(RuntimeError):
                    self._store.wait(["lefts"], timedelta(seconds=_LEFT_S + _GRACE_S / 3))
            if not self._store.check(["lefts"]):
                found = {}
                for rank in survivors:
                    text = self._poll(f"left/{rank}", deadline - time.monotonic())
                    if text is not None:  # None: the rank has ended since
                        found[rank] = read(f"the recovery state of rank {rank}", text, Any)
                # Ranks may have seen different values; the first to write decides for all.
                self._store.compare_set("lefts", "", json.dumps(found))
            rows = read("the ranks' recovery states", self._store.get("lefts"), dict[str, Any])
            return {rank: rows[str(rank)] for rank in survivors if str(rank) in rows}

        survivors = self._survivors or []
        try:
            found = self._calls.run(gather_values, _LEFT_S + _GRACE_S)
        except RuntimeError:
            return None
        return found if survivors else None

    def announce_exit(self) -> None:
        """Tells the other ranks that this rank is about to shut down normally."""
        self.leaving = True
        with suppress(RuntimeError):
            self._calls.run(lambda: self._store.set(f"leaving/{self._rank}", "1"), _GRACE_S)

    def close(self) -> None:
        """Says goodbye to the other ranks and ends the thread."""
        if self._closing:
            return
        self._closing = True

        def part() -> None:
            self._store.set(f"bye/{self._rank}", "1")
            self._messages.send(self._rank, "bye")
            if self._rank == 0 and self._verdict is None:
                # The store may end with this process, and other ranks may still read from it.
                for rank in range(1, self._size):
                    if self._poll(f"bye/{rank}", _GOODBYE_S) is None:
                        break

        # If the store's server ended first, the thread has ended, too.
        with suppress(RuntimeError):
            others_s = _GOODBYE_S * self._size if self._rank == 0 else 0.0
            self._calls.run(part, others_s + _GRACE_S)
            self._thread.join(timeout=5)
        self._calls.close()
        if not self._thread.is_alive():
            # Closes the connections: after a fault, parameters may reference this object for long.
            del self._store, self._thread_store, self._messages

    def _ask(self, here: str) -> tuple[str, list[int] | None]:
        if self._store.add("fault", 1) == 1:
            self._send_all("fault")
            verdict, survivors = self._diagnose(here)
            self._store.set("verdict", json.dumps([verdict, survivors]))
            return verdict, survivors
        text = self._poll("verdict", _VERDICT_S)
        if text is None:
            return f"{here}; the rank that looked for the cause ended too. {_REMEDY}", None
        return self._read_verdict(text)

    def _send_all(self, text: str) -> None:
        for rank in range(self._size):
            if rank != self._rank:
                self._messages.send(rank, text)

    def _gather(self, key: str) -> tuple[dict[int, State], list[int]]:
        """Returns the states that ranks write to KEY/RANK, and the ranks that do not answer."""
        deadline = time.monotonic() + _ANSWER_S
        others = [rank for rank in range(self._size) if rank != self._rank]
        missing = others
        while missing and time.monotonic() < deadline:
            missing = [r for r in missing if not self._store.check([f"{key}/{r}"])]
            if missing:
                time.sleep(0.02)
        states: dict[int, State] = {self._rank: self._describe()}
        for rank in others:
            if rank not in missing:
                states[rank] = read_state(rank, self._store.get(f"{key}/{rank}"))
        return states, missing

    def _diagnose(self, here: str) -> tuple[str, list[int]]:
        states, silent = self._gather("answer")
        log.error("%s", last_operations(states, silent))
        culprits = []
        for rank in range(self._size):
            if rank != self._rank and self._store.check([f"leaving/{rank}"]):
                known = self._describe_rank(rank)
                culprits.append(
                    f"rank {rank} ({known}) has shut down while the others go on; if it had fewer "
                    "batches, call ub.join() after the last one, or give all ranks as many"
                )
                states.pop(rank, None)
            elif rank in silent:
                culprits.append(
                    f"rank {rank} ({self._describe_rank(rank)}) is gone or frozen: "
                    "it does not answer"
                )
        verdict = "; ".join([*(culprits or behind(states)), here]) + f". {_REMEDY}"
        return verdict, sorted(states)

    def _describe_rank(self, rank: int) -> str:
        key = f"who/{rank}"
        # `get` blocks for a missing key, and a rank whose init() failed never writes it.
        if not self._store.check([key]):
            return "host and pid not known"
        return self._store.get(key).decode()

    def _poll(self, key: str, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while True:
            if self._store.check([key]):
                return self._store.get(key).decode()
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)

    def _receive_messages(self) -> None:
        try:
            while (text := self._messages.receive()) != "fault":
                if text == "bye":
                    return
                if not text.startswith("ask "):
                    log.warning("rank %d ignores an unknown message: %.80r", self._rank, text)
                    continue
                self._thread_store.set(
                    f"{text.removeprefix('ask ')}/{self._rank}", json.dumps(self._describe())
                )
        except RuntimeError:
            # The store's server has ended. In a normal shutdown it may end first. Otherwise the
            # next collective fails and reports the fault.
            return
        verdict = f"another rank reported a fault and ended before it described it. {_REMEDY}"
        survivors: Sequence[int] | None = None
        with suppress(RuntimeError):
            self._thread_store.set(f"answer/{self._rank}", json.dumps(self._describe()))
            self._thread_store.wait(["verdict"], timedelta(seconds=_VERDICT_S))
            verdict, survivors = self._read_verdict(self._thread_store.get("verdict"))
        self._decide(verdict, survivors)

    def _read_verdict(self, text: str | bytes) -> tuple[str, list[int] | None]:
        """Parses a verdict of another rank; an unreadable one becomes a verdict that says so."""
        try:
            verdict, survivors = read("the cause of a fault, from another rank,", text, _Verdict)
        except MismatchError as error:
            return f"another rank reported a fault: {error}. {_REMEDY}", None
        known = survivors is None or set(survivors) <= set(range(self._size))
        return verdict, survivors if known else None

    def _decide(self, verdict: str, survivors: Sequence[int] | None) -> None:
        with self._lock:
            if self._verdict is not None:
                return
            self._survivors = None if survivors is None else list(survivors)
            try:
                if not self._closing:
                    self._block_reads(verdict)
            except Exception:
                log.exception("reads of parameters cannot be blocked after a fault")
            self._verdict = (
                verdict  # after `block_reads`, because other threads may raise it from now on
            )
        if not self._closing:
            self._on_fault(verdict)

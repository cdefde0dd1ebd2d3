"""One fault, told to every rank in bounded time, with the culprit named."""

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

_ANSWER_S = 2.0  # how long a rank has to answer the question how far it has come
_VERDICT_S = _ANSWER_S + 3.0  # how long the others wait for the rank that asks
_GRACE_S = 3.0  # for a store that is slow to answer
_REPORT_S = _VERDICT_S + _GRACE_S
_LEFT_S = 5.0  # how long a rank that has answered has to tell what the fault has left there
_GOODBYE_S = 5.0  # how long rank 0 waits for the others' goodbye
_REMEDY = "Restart the job from its last checkpoint."

_Verdict = tuple[str, list[int] | None]  # and the ranks that survive, if that is known


class FaultCoordinator:
    """Turns what one rank noticed into one message that every rank raises.

    A thread of each rank waits for messages in its mailbox. The first rank to notice a fault writes
    to all; every rank that lives answers with its state, and from the answers, or their absence,
    the first one writes the verdict. In the same way a rank that waits for long asks which others
    it waits for, while all goes on.

    Args:
        store: Store of this run; the board makes its own connections.
        rank: This rank.
        size: Number of ranks.
        describe: Returns this rank's state.
        hold: Called once, from any thread, with the verdict, before anybody else is told of it, so
            that it must not block.
        on_fault: Called behind it, by the same thread; may call `compare`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        describe: Callable[[], State],
        hold: Callable[[str], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self._store = clone_store(store)
        self._replans = clone_store(store)  # the thread's; a connection serves one at a time
        self._rank, self._size = rank, size
        self._describe, self._hold, self._on_fault = describe, hold, on_fault
        self._lock = threading.Lock()  # guards _verdict and _survivors
        self._calls = SerialExecutor(
            "usbyte-faults-ask"
        )  # on its thread alone _store is used, and written
        self._messages = StoreMessageQueue(self._store, rank)
        self._verdict: str | None = None
        self._survivors: list[int] | None = None
        self._closing = False
        self._store.set(f"who/{rank}", f"host {socket.gethostname()}, pid {os.getpid()}")
        self._thread = threading.Thread(target=self._watch, name="usbyte-faults", daemon=True)
        self._thread.start()

    @property
    def verdict(self) -> str | None:
        """The fault that ended this run, if one did."""
        return self._verdict

    def report(self, noticed: str) -> str:
        """Finds out together with the other ranks what happened; returns the verdict.

        Args:
            noticed: What went wrong on this rank. Blocks for a few seconds at most.
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
        """Ends all ranks with this message, for a fault whose cause is known."""
        everyone = list(range(self._size))

        def tell() -> None:
            if self._store.add("fault", 1) == 1:
                self._store.set("verdict", json.dumps([verdict, everyone]))
                self._send_all("fault")

        if self._verdict is None:
            with suppress(RuntimeError):  # if the store is gone, nobody is to be told
                self._calls.run(tell, _REPORT_S)
            self._decide(verdict, everyone)

    def query_stragglers(self, topic: str) -> str:
        """Which ranks the others wait for; empty if none is behind, or another rank asks that.

        Args:
            topic: What is waited for, the same on all ranks. Each is inquired into once.
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
        """After a fault: what each rank that survives has put here, by rank; the same on all ranks.

        Args:
            mine: What JSON can carry; this rank's, if it counts as one that survives.

        Returns:
            None if that cannot be found out: the store is gone.
        """

        def exchange() -> dict[int, Any]:
            self._store.set(f"left/{self._rank}", json.dumps(mine))
            if not survivors:  # nobody has told which they are
                return {}
            deadline = time.monotonic() + _LEFT_S
            if self._rank != survivors[0]:  # if all asked for all, the store would take too long
                with suppress(RuntimeError):
                    self._store.wait(["lefts"], timedelta(seconds=_LEFT_S + _GRACE_S / 3))
            if not self._store.check(["lefts"]):
                found = {}
                for rank in survivors:
                    text = self._poll(f"left/{rank}", deadline - time.monotonic())
                    if text is not None:  # else it has ended since
                        found[rank] = read(f"what rank {rank} has left", text, Any)
                # Who has seen more or fewer of them must not come to another result.
                self._store.compare_set("lefts", "", json.dumps(found))
            told = self._store.get("lefts")
            rows = read("what the ranks have left", told, dict[str, Any])
            return {rank: rows[str(rank)] for rank in survivors if str(rank) in rows}

        survivors = self._survivors or []
        try:
            found = self._calls.run(exchange, _LEFT_S + _GRACE_S)
        except RuntimeError:
            return None
        return found if survivors else None

    def announce_exit(self) -> None:
        """Lets the other ranks know that this one is about to end in good order."""
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
                # The store may end with this process; the others may still read from it.
                for rank in range(1, self._size):
                    if self._poll(f"bye/{rank}", _GOODBYE_S) is None:
                        break

        with suppress(RuntimeError):  # the store's server may have ended first; so does the thread
            others_s = _GOODBYE_S * self._size if self._rank == 0 else 0.0
            self._calls.run(part, others_s + _GRACE_S)
            self._thread.join(timeout=5)
        self._calls.close()
        if not self._thread.is_alive():
            # Connections: after a fault this may be kept for long, with the parameters.
            del self._store, self._replans, self._messages

    def _ask(self, here: str) -> tuple[str, list[int] | None]:
        if self._store.add("fault", 1) == 1:
            self._send_all("fault")
            verdict, survivors = self._diagnose(here)
            self._store.set("verdict", json.dumps([verdict, survivors]))
            return verdict, survivors
        text = self._poll("verdict", _VERDICT_S)
        if text is None:
            return f"{here}; the rank that looks for the cause ended too. {_REMEDY}", None
        return self._read_verdict(text)

    def _send_all(self, text: str) -> None:
        for rank in range(self._size):
            if rank != self._rank:
                self._messages.send(rank, text)

    def _gather(self, key: str) -> tuple[dict[int, State], list[int]]:
        """The states of all ranks that answer under KEY/RANK, and the ranks that do not."""
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
                culprits.append(f"rank {rank} ({known}) has shut down, the others go on")
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
        # One whose init() has failed never tells, and the store waits for what nobody tells.
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

    def _watch(self) -> None:
        try:
            while (text := self._messages.receive()) != "fault":
                if text == "bye":
                    return
                if not text.startswith("ask "):
                    log.warning("rank %d: a message of no known kind: %.80r", self._rank, text)
                    continue
                self._replans.set(
                    f"{text.removeprefix('ask ')}/{self._rank}", json.dumps(self._describe())
                )
        except RuntimeError:
            # The store's server ended, as it does first in an orderly end. If it was no orderly
            # end, the next collective fails and asks.
            return
        verdict = f"another rank reported a fault and ended before it said which. {_REMEDY}"
        survivors: Sequence[int] | None = None
        with suppress(RuntimeError):
            self._replans.set(f"answer/{self._rank}", json.dumps(self._describe()))
            self._replans.wait(["verdict"], timedelta(seconds=_VERDICT_S))
            verdict, survivors = self._read_verdict(self._replans.get("verdict"))
        self._decide(verdict, survivors)

    def _read_verdict(self, text: str | bytes) -> tuple[str, list[int] | None]:
        """A verdict that another rank has written; one that says so if it cannot be read."""
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
                    self._hold(verdict)
            except Exception:
                log.exception("parameters cannot be kept from readers after a fault")
            self._verdict = verdict  # which other threads may tell from now on
        if not self._closing:
            self._on_fault(verdict)

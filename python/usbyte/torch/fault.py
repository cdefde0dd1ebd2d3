"""One fault, told to every rank in bounded time, with the culprit named."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from usbyte.torch.store import clone_store

log = logging.getLogger("usbyte")

_ANSWER_S = 2.0  # how long a rank has to answer the question how far it has come
_VERDICT_S = _ANSWER_S + 3.0  # how long the others wait for the rank that asks
_GOODBYE_S = 5.0  # how long rank 0 waits for the others' goodbye
# torch logs a warning when a wait times out, so it never does; torch counts it in an int of
# milliseconds (24.8 days).
_FOREVER = timedelta(days=20)
_REMEDY = "Restart the job from its last checkpoint."


class FaultBoard:
    """Turns what one rank noticed into one message that every rank raises.

    Each rank has a mailbox key in the store, on which a thread blocks (the store pushes; nothing
    polls while all is well). The first rank to notice a fault writes to all mailboxes; every rank
    that lives answers with its state, and from the answers, or their absence, the first one writes
    the verdict.

    Args:
        store: Store of this run; the board makes its own connections.
        rank: This rank.
        size: Number of ranks.
        describe: Returns this rank's engine states, as `Engine.status` gives them; {} for an
            optimizer without an engine.
        on_fault: Called once, from any thread, with the verdict.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        describe: Callable[[], list[dict[str, Any]]],
        on_fault: Callable[[str], None],
    ) -> None:
        self._store = clone_store(store)  # for reports; a connection serves one thread at a time
        self._mail = clone_store(store)  # for the thread that blocks
        self._rank, self._size = rank, size
        self._describe, self._on_fault = describe, on_fault
        self._lock = threading.Lock()  # guards _verdict
        self._store_lock = threading.Lock()  # guards use of _store
        self._verdict: str | None = None
        self._decided = threading.Event()
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
            with self._store_lock:
                self._ask(noticed)
        assert self._verdict is not None
        return self._verdict

    def announce(self, verdict: str) -> None:
        """Ends all ranks with this message, for a fault whose cause is known."""
        with self._store_lock:
            try:
                if self._verdict is None and self._store.add("fault", 1) == 1:
                    self._store.set("verdict", verdict)
                    self._wake_others()
            except RuntimeError:  # the store is gone, and with it the need to tell
                pass
        self._decide(verdict)

    def leave(self) -> None:
        """Lets the other ranks know that this one is about to end in good order."""
        with suppress(RuntimeError), self._store_lock:
            self._store.set(f"leaving/{self._rank}", "1")

    def close(self) -> None:
        """Says goodbye to the other ranks and ends the thread."""
        self._closing = True
        try:
            with self._store_lock:
                self._store.set(f"bye/{self._rank}", "1")
                self._store.set(f"mail/{self._rank}", "bye")
                if self._rank == 0 and self._verdict is None:
                    # The store may end with this process; the others may still read from it.
                    for rank in range(1, self._size):
                        if self._poll(f"bye/{rank}", _GOODBYE_S) is None:
                            break
        except RuntimeError:
            pass  # the store's server has ended first; so does the thread
        self._thread.join(timeout=5)

    def _ask(self, noticed: str) -> None:
        here = f"rank {self._rank} noticed: {noticed}"
        try:
            if self._store.add("fault", 1) == 1:
                self._wake_others()
                verdict = self._diagnose(here)
                self._store.set("verdict", verdict)
            else:
                text = self._poll("verdict", _VERDICT_S)
                verdict = text or f"{here}; the rank that looks for the cause ended too. {_REMEDY}"
        except RuntimeError:
            verdict = (
                f"rank 0 or the launcher, which holds the store of this job, has ended; {here}. "
                f"{_REMEDY}"
            )
        self._decide(verdict)

    def _wake_others(self) -> None:
        for rank in range(self._size):
            if rank != self._rank:
                self._store.set(f"mail/{rank}", "fault")

    def _diagnose(self, here: str) -> str:
        deadline = time.monotonic() + _ANSWER_S
        others = [rank for rank in range(self._size) if rank != self._rank]
        missing = others
        while missing and time.monotonic() < deadline:
            missing = [r for r in missing if not self._store.check([f"answer/{r}"])]
            if missing:
                time.sleep(0.02)
        states: dict[int, list[dict[str, Any]]] = {self._rank: self._describe()}
        for rank in others:
            if rank not in missing:
                states[rank] = json.loads(self._store.get(f"answer/{rank}"))
        culprits = []
        for rank in others:
            who = self._store.get(f"who/{rank}").decode()
            if self._store.check([f"leaving/{rank}"]):
                culprits.append(f"rank {rank} ({who}) has shut down, the others go on")
            elif rank in missing:
                culprits.append(f"rank {rank} ({who}) is gone or frozen: it does not answer")
        return "; ".join([*(culprits or behind(states)), here]) + f". {_REMEDY}"

    def _poll(self, key: str, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._store.check([key]):
                return self._store.get(key).decode()
            time.sleep(0.02)
        return None

    def _watch(self) -> None:
        try:
            self._mail.wait([f"mail/{self._rank}"], _FOREVER)
            if self._mail.get(f"mail/{self._rank}") == b"bye":
                return
        except RuntimeError:
            # The store's server ended, as it does first in an orderly end. If it was no orderly
            # end, the next collective fails and asks.
            return
        try:
            self._mail.set(f"answer/{self._rank}", json.dumps(self._describe()))
            self._mail.wait(["verdict"], timedelta(seconds=_VERDICT_S))
            self._decide(self._mail.get("verdict").decode())
        except RuntimeError:
            self._decide(f"another rank reported a fault and ended before it said which. {_REMEDY}")

    def _decide(self, verdict: str) -> None:
        with self._lock:
            if self._verdict is not None:
                return
            self._verdict = verdict
        if not self._closing:
            self._on_fault(verdict)


def behind(states: dict[int, list[dict[str, Any]]]) -> list[str]:
    """Names the ranks whose engines have come less far than the others'.

    Args:
        states: For each rank, one `Engine.status` for each optimizer.
    """
    found = []
    for engine in range(max((len(s) for s in states.values()), default=0)):
        at = {rank: s[engine] for rank, s in states.items() if engine < len(s) and s[engine]}
        latest = max((s["step"] for s in at.values()), default=0)
        left = any(s["step"] == latest and s["phase"] != "backward" for s in at.values())
        for rank, s in sorted(at.items()):
            if s["step"] < latest:
                found.append(f"rank {rank} has not begun backward of step {latest}")
            elif left and s["phase"] == "backward":
                names = ", ".join(s["awaited"])
                found.append(
                    f"rank {rank} is still in backward of step {latest}, without the gradients of "
                    f"{names}"
                )
    return found

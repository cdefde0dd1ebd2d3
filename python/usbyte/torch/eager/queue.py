# SPDX-License-Identifier: Apache-2.0
"""The queue of eager collectives: ranks submit in any order, all ranks run them in one order.

Ops of a plan do not pass through this queue. It serves everything else: metrics, broadcasts, and
the user's own collectives.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from usbyte.errors import Error, FaultError, MismatchError, UsageError
from usbyte.torch.eager import operations
from usbyte.torch.eager.descriptors import MatchResult, match
from usbyte.torch.eager.negotiation import JOIN, Negotiation
from usbyte.torch.eager.operation_names import OperationName
from usbyte.torch.eager.rank_group_ops import RankGroupOps
from usbyte.torch.eager.request import Handle, Request
from usbyte.torch.reduce_op import ReduceOp
from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.runtime.messages import read
from usbyte.torch.runtime.uncaught_exceptions import mark_training_thread

log = logging.getLogger("usbyte")


class EagerQueue:
    """Submits, matches and runs eager operations. Close it before the interpreter exits.

    Args:
        group: Process group with a CPU backend (Gloo) that nothing else uses, or a function that
            makes it. The function is called when all ranks have submitted their first operation.
            The group's own timeout should be no shorter than the stall limit.
        store: Store of this run. The queue makes its own connections and key prefix.
        rank: This rank's position in the group.
        size: Number of ranks in the group.
        stall_limit_s: Seconds without progress after which an operation is a fault; 0 or less:
            never.
        stall_warning_s: Seconds without progress after which a warning is logged, and between
            warnings; 0 or less: never.
        on_fault: Called with a description of a fault that this rank noticed. Returns the message
            with which every handle then fails.
        members: Global ranks of the group, ascending; default 0, 1, ... Messages and root ranks
            use these numbers.

    Raises:
        UsageError: The group works on GPU tensors only, or the store is not served over TCP.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Callable[[], dist.ProcessGroup],
        store: dist.Store,
        rank: int,
        size: int,
        stall_limit_s: float,
        stall_warning_s: float,
        on_fault: Callable[[str], str],
        members: Sequence[int] | None = None,
    ) -> None:
        self.peers = RankGroupOps(group, rank, size, members)
        self._limit_s = stall_limit_s if stall_limit_s > 0 else float("inf")
        self._warning_s = stall_warning_s if stall_warning_s > 0 else float("inf")
        self._on_fault = on_fault
        # Guards the fields below. Reentrant, because signal handlers may use the queue, too.
        self._lock = threading.RLock()
        self._unnamed: Counter[str] = Counter()  # number of unnamed operations so far, by kind
        self._joined = False
        self._pending: dict[str, Handle] = {}  # by the key of the operation's name
        self._failure: str | None = None
        self._store_lost: RuntimeError | None = None  # set if nothing was in flight at the time
        self._closed = False
        self._running: Request | None = None
        self._progressed = time.monotonic()  # last begin or end of an operation, or `end_join`
        self._negotiation: Negotiation | None = None
        if size > 1:
            if not callable(group) and dist.get_backend(group) == "nccl":
                raise UsageError(
                    "eager operations need a process group with a CPU backend: make it with "
                    'torch.distributed.new_group(backend="gloo")'
                )
            self._negotiation = Negotiation(store, rank, self.peers.members, self._limit_s)
            # No WorkerThread: it waits for the store, not for tasks of this process.
            self._thread = threading.Thread(
                target=self._run, args=(self._negotiation,), name="usbyte-eager", daemon=True
            )
            self._thread.start()

    def auto_name(self, kind: str) -> OperationName:
        """Returns a name for an unnamed operation.

        The n-th unnamed operation of a kind on this rank matches the n-th on every other rank.
        """
        with self._lock:
            self._unnamed[kind] += 1
            return OperationName.auto(f"{kind}.noname.{self._unnamed[kind]}")

    def submit(self, request: Request) -> Handle:
        """Submits an operation and returns its handle. May be called from any thread.

        Raises:
            UsageError: An operation of this name is in flight on this rank, this rank is inside
                join(), or the queue is closed.
            FaultError: The run has failed.
        """
        mark_training_thread()
        if self._store_lost is not None and not self._closed:
            self._fault(_unsubmitted(str(request), self._store_lost))
        first_check = time.monotonic() + min(self._warning_s, self._limit_s)
        handle = Handle(request, first_check, self._check_stall)
        with self._lock:
            if self._failure is not None:
                raise FaultError(self._failure)
            if self._closed:
                raise UsageError(f"{request}: usbyte is shut down: call usbyte.torch.init() first")
            if self._joined and not request.name.is_internal:
                raise UsageError(
                    f"{request}: rank {self.peers.name} is inside join() and contributes zeros to "
                    "the other ranks' allreduce: submit nothing from threads and step hooks until "
                    "join() has returned"
                )
            if request.name.key in self._pending:
                raise UsageError(
                    f"{request}: an operation of this name is still in flight on rank "
                    f"{self.peers.name}: synchronize it first, or use another name"
                )
            self._pending[request.name.key] = handle
        if self._negotiation is None:
            with torch.no_grad():
                self._execute(match(request.name.key, [request.descriptor])[0])
            return handle
        self._tell(str(request), lambda negotiation: negotiation.announce(request))
        return handle

    def pending(self) -> list[str]:
        """Returns kind and name of each operation in flight on this rank, for messages."""
        with self._lock:
            return [str(handle.request) for handle in self._pending.values()]

    # Internal operations of usbyte. Their names never match those of users' operations.

    def allreduce(self, label: str, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduces a tensor in place; blocks until it is done."""
        name = OperationName.internal(label)
        self.submit(
            operations.allreduce(self.peers, name, [tensor], op, in_place=True)
        ).synchronize()

    def allgather(self, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the tensors of all ranks along the first dimension; blocks."""
        name = OperationName.internal(label)
        [(gathered, _)] = self.submit(
            operations.allgather(self.peers, name, [tensor])
        ).synchronize()
        whole: torch.Tensor = gathered
        return whole

    def allgather_bytes(self, label: str, payload: bytes) -> list[bytes]:
        """Gathers a byte string of any length from every rank, in rank order; blocks."""
        name = OperationName.internal(label)
        gathered: list[bytes] = self.submit(
            operations.allgather_bytes(self.peers, name, payload)
        ).synchronize()
        return gathered

    def allgather_json(self, label: str, value: Any, kind: Any) -> list[Any]:
        """Gathers a value from every rank, in rank order; blocks.

        Args:
            label: Name of the operation.
            value: This rank's value, of types that JSON has.
            kind: Type hint that every rank's value must satisfy, as for
                `usbyte.torch.runtime.messages.read`.

        Raises:
            MismatchError: A rank's value is not of this kind; raised on every rank.
        """
        texts = self.allgather_bytes(label, json.dumps(value).encode())
        return [
            read(f"what rank {rank} has sent for '{label}'", text, kind)
            for rank, text in zip(self.peers.members, texts, strict=True)
        ]

    def broadcast_bytes(self, label: str, payload: bytes, root: int) -> bytes:
        """Returns the root's byte string on every rank; blocks. Other payloads are ignored."""
        name = OperationName.internal(label)
        received: bytes = self.submit(
            operations.broadcast_bytes(self.peers, name, payload, root)
        ).synchronize()
        return received

    def broadcast_json(self, label: str, value: Any, root: int, kind: Any) -> Any:
        """Returns the root's value on every rank; blocks.

        Args:
            label: Name of the operation.
            value: This rank's value, of types that JSON has; ignored on other ranks than the root.
            root: Global rank whose value is sent.
            kind: Type hint that the value must satisfy, as for
                `usbyte.torch.runtime.messages.read`.

        Raises:
            MismatchError: The root's value is not of this kind; raised on every rank.
        """
        text = self.broadcast_bytes(label, json.dumps(value).encode(), root)
        return read(f"what rank {root} has sent for '{label}'", text, kind)

    def begin_join(self) -> None:
        """Makes this rank contribute zeros to the other ranks' allreduce until `end_join`.

        Raises:
            FaultError: The job's store is lost.
        """
        with self._lock:
            self._joined = True
        self._tell("join()", Negotiation.join)

    def end_join(self) -> int:
        """Waits until all ranks have called this; returns the rank that joined last.

        First waits for the operations that this rank submitted before it joined: other ranks
        contribute zeros to them only while they are inside join() themselves.

        Raises:
            FaultError: An operation stalled, a peer is lost, or another rank reported a fault.
        """
        with self._lock:
            before = [h for h in self._pending.values() if not h.request.name.is_internal]
            # The training steps inside join() count as progress, because this rank took part.
            self._progressed = time.monotonic()
            unnamed = dict(self._unnamed)
        for handle in before:
            handle.wait()
        counts = self.allgather_json(JOIN.label, unnamed, dict[str, int])
        with self._lock:  # equal counts on all ranks: the n-th unnamed operations match again
            self._unnamed = reduce(Counter.__or__, map(Counter, counts))
            self._joined = False
        return self._negotiation.last if self._negotiation is not None else self.peers.name

    def fail(self, message: str) -> None:
        """Ends every pending and later operation with FaultError(message).

        Only the first call has an effect. A collective that is running is aborted before its
        handle fails, so that nothing writes to its tensors afterwards.
        """
        with self._lock:
            if self._failure is not None:
                return
            self._failure = message
            pending = list(self._pending.values())
            self._pending.clear()
            running = self._running
        if running is not None:
            self.peers.abort()
        for handle in pending:
            handle.set_result(FaultError(message))

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread; pending operations fail with FaultError.

        May be called more than once, and after the store is lost.

        Args:
            timeout_s: Seconds to wait for a collective that is running before it is aborted.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = list(self._pending.values())
            self._pending.clear()
        for handle in pending:
            where = f"usbyte was shut down on rank {self.peers.name}"
            handle.set_result(FaultError(f"{handle.request} had not ended when {where}"))
        if self._negotiation is not None:
            self._negotiation.wake(timeout_s)
            self._thread.join(timeout_s)
            if self._thread.is_alive() and self._running is not None:
                log.warning("%s is still running at shutdown and is aborted", self._running)
                self.peers.abort()
                self._thread.join(timeout_s)
            if self._thread.is_alive():
                return  # the thread may still use the group, which therefore must not be closed
        self.peers.close()

    def _tell(self, what: str, call: Callable[[Negotiation], None]) -> None:
        """Runs `call` on the negotiation, if there are other ranks. A failure is a fault.

        Args:
            what: Names what is submitted, for messages.
            call: Submits it.

        Raises:
            FaultError: The call failed.
        """
        if self._negotiation is None:
            return
        try:
            call(self._negotiation)
        except Error as error:  # another rank's message cannot be read
            raise FaultError(self._fault(f"{what} could not be submitted: {error}")) from error
        except RuntimeError as error:
            raise FaultError(self._fault(_unsubmitted(what, error))) from error

    def _run(self, negotiation: Negotiation) -> None:
        def in_flight() -> list[str]:
            with self._lock:
                return list(self._pending)

        try:
            with torch.no_grad():
                while match_result := negotiation.next(in_flight):
                    self._execute(match_result)
                    if self._failure is not None:
                        break
                    negotiation.advance()
        except Error as error:  # another rank's message cannot be read
            self._fault(f"rank {self.peers.name} cannot go on with eager operations: {error}")
        except RuntimeError as error:
            self._lose_store(error)
        except Exception as error:
            log.exception("the thread of eager operations failed")
            self._fault(
                f"the thread of eager operations failed on rank {self.peers.name}: "
                f"{type(error).__name__}: {error}"
            )
        if self._failure is not None or self._store_lost is not None:
            self.peers.abort()  # otherwise other ranks keep waiting in the backend

    def _execute(self, match_result: MatchResult) -> None:
        with self._lock:
            handle, request = None, None
            if match_result.join_with_zeros is None:
                handle = self._pending.get(match_result.name)
                if handle is not None:
                    request = handle.request
            elif self._failure is None and not self._closed:
                # A pending operation of this name was submitted too late for this match.
                name = OperationName.from_key(match_result.name)
                request = operations.join_with_zeros(self.peers, name, match_result.join_with_zeros)
            if request is None:
                if self._failure is None and not self._closed:
                    name = OperationName.from_key(match_result.name)
                    raise MismatchError(
                        f"'{name}' is to run on rank {self.peers.name}, which has not submitted it"
                    )
                return
            self._running = request
            self._progressed = time.monotonic()
        outcome: Any
        try:
            if match_result.error is not None:
                outcome = MismatchError(match_result.error)
            else:
                outcome = request.execute(match_result)
        except Exception as error:
            self._fault(f"{request} failed on rank {self.peers.name}: {error}")
            return
        with self._lock:
            self._running = None
            self._progressed = time.monotonic()
            if handle is not None:
                self._pending.pop(match_result.name, None)
        if handle is not None:
            handle.set_result(outcome)

    def _lose_store(self, error: RuntimeError) -> None:
        text = f"rank {self.peers.name} lost the job's store: {error}"
        with self._lock:
            if idle := not self._pending:
                self._store_lost = error
        if idle:  # normal at the end of a run, if the rank that serves the store exits first
            log.info(text)
        else:
            self._fault(text)

    def _fault(self, text: str) -> str:
        """Calls `on_fault` with the text and fails all operations with the message it returns.

        Returns:
            The message of the first fault.
        """
        if self._failure is None:
            try:
                if not self._closed:  # failures during shutdown are not faults
                    text = self._on_fault(text)
            except Exception:
                log.exception("the fault handler failed")
            self.fail(text)
        return self._failure or text

    def _check_stall(self, handle: Handle) -> None:
        try:
            text, since = self._diagnose(handle)
        except Error as error:  # another rank's message cannot be read
            self._fault(f"{handle.request} cannot go on: {error}")
            return
        except RuntimeError as error:  # the store is lost: its rank may be the one that is awaited
            if not handle.done():  # it is done if `close` was called meanwhile
                self._lose_store(error)
            return
        stalled = time.monotonic() - since
        if stalled >= self._limit_s:
            self._fault(f"{text} (the stall limit is {self._limit_s:g} s)")
            return
        if stalled >= self._warning_s:
            log.warning("%s (it is a fault after %g s)", text, self._limit_s)
        handle.next_check = min(time.monotonic() + self._warning_s, since + self._limit_s)

    def _diagnose(self, handle: Handle) -> tuple[str, float]:
        """Finds out why an operation has not ended.

        Returns:
            The reason, and the time since which nothing has progressed (monotonic clock, seconds).
        """
        assert self._negotiation is not None
        missing = self._negotiation.missing(handle.request.name)
        with self._lock:
            running, progressed, inside = self._running, self._progressed, self._joined
        age = time.monotonic() - handle.submitted
        waits = f"{handle.request} has waited {age:.0f} s on rank {self.peers.name}"
        if missing is None:
            return f"{waits}, and the job's store does not answer", handle.submitted
        if missing:
            # A rank inside join() waits while the others have data. That is no stall as long as
            # operations progress.
            name = handle.request.name
            joining = name == JOIN or (inside and not name.is_internal)
            since = max(handle.submitted, progressed) if joining else handle.submitted
            joined = [rank for rank in missing if rank in self._negotiation.joined()]
            if joined and not joining:
                return (
                    f"{waits} for {name_ranks(joined)}, which called join() and cannot take part: "
                    "make this call before a rank calls join() or after join() has returned",
                    since,
                )
            return (
                f"{waits} for {name_ranks(missing)}, which did not submit it: see that every rank "
                "is alive and comes to this call, under the same name",
                since,
            )
        since = max(handle.submitted, progressed)
        blocker = f"{running} does not end" if running else "its turn does not come"
        return (
            f"{waits}; every rank has submitted it, but for {time.monotonic() - since:.0f} s "
            f"{blocker}: see the network and the logs of the other ranks",
            since,
        )


def _unsubmitted(what: str, error: RuntimeError) -> str:
    return f"{what} could not be submitted, the job's store is lost: {error}"

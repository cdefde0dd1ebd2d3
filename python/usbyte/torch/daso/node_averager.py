"""Sums of vectors over the nodes, in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import torch
import torch.distributed as dist

from usbyte.errors import FaultError
from usbyte.torch.runtime.format import brief_error
from usbyte.torch.runtime.ring import abort
from usbyte.torch.world.rank_group import RankGroup

log = logging.getLogger("usbyte")

_JOIN_S = 5.0
_NUMBERS = 1 << 12  # so that sums of numbers over thousands of nodes are exact in float32


class NodeAverager:
    """One exchange; `NodeExchange.wait` tells when its vectors hold the sums.

    Attributes:
        vectors: 1-d, on the host: this node's, later the sums over nodes. The last element of the
            first one is the exchange's.
        number: Which exchange it is, the same on all ranks.
        turn: Local index of the ranks that exchange.
        done: Set once the sums are there, or something has failed.
    """

    def __init__(self, vectors: Sequence[torch.Tensor], number: int, turn: int) -> None:
        self.vectors, self.number, self.turn = vectors, number, turn
        self.done = threading.Event()


class NodeExchange:
    """Adds up vectors over nodes: between the ranks whose turn it is, who tell their nodes.

    A thread carries out what `start` is given, on groups that nobody else uses, in one order on all
    ranks, while this rank computes. A fault aborts it.

    Args:
        rank_group: The ranks that take part.
        label: Name of the optimizer, for messages.
        node: The ranks of this node by local index; None if it is one.
        nodes: The ranks of this rank's local index, by node.
        local_rank: This rank's local index.

    Attributes:
        label: As given.
        owner: What lives until `close`.
    """

    owner: object = None

    def __init__(
        self,
        rank_group: RankGroup,
        label: str,
        node: dist.ProcessGroup | None,
        nodes: dist.ProcessGroup,
        local_rank: int,
    ) -> None:
        self._rank_group, self.label = rank_group, label
        self._node, self._nodes, self._local_rank = node, nodes, local_rank
        self.size = dist.get_world_size(nodes)
        self._slots = dist.get_world_size(node) if node is not None else 1
        self._lock = threading.Lock()  # guards the two below
        self._current: NodeAverager | None = None
        self._failure: str | None = None
        self._started = 0  # exchanges, whose numbers a loaded state may repeat
        self._closed = False
        self._tasks: SimpleQueue[NodeAverager | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="usbyte-nodes", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """True after a fault."""
        return self._failure is not None

    def start(self, vectors: Sequence[torch.Tensor], number: int) -> NodeAverager:
        """Begins to add up vectors; nobody touches them before the end, nor starts another.

        Args:
            vectors: 1-d, on the host; the last element of the first is overwritten.
            number: Of the exchange: 0, 1, 2, ..., the turns of the local indices one after another.

        Raises:
            FaultError: Something has failed before.
        """
        exchange = NodeAverager(vectors, number, number % self._slots)
        vectors[0][-1] = number % _NUMBERS
        with self._lock:
            if self._failure is not None:
                raise FaultError(self._failure)
            assert self._current is None
            self._current = exchange
        self._started += 1
        self._tasks.put(exchange)
        return exchange

    def wait(self, exchange: NodeAverager) -> None:
        """Waits, interruptibly, until the vectors hold the sums.

        Raises:
            FaultError: A rank is lost, stuck or elsewhere; on every rank.
        """
        env, began = self._rank_group.env, time.monotonic()
        warned = 0
        while not exchange.done.wait(0.5):
            waited_s = time.monotonic() - began
            text = f"{self._describe(exchange)} has been waited for {waited_s:.0f} s"
            if 0 < env.stall_limit_s <= waited_s:
                self._fail_all(f"{text} (the stall limit is {env.stall_limit_s:g} s)")
            elif 0 < env.stall_warning_s <= waited_s / (warned + 1):
                warned += 1
                topic = f"{self.label}/{self._started}"
                text += "; a rank may be slow, stuck or lost"
                self._rank_group.warn(self._rank_group.query_stragglers(topic, text))
        if self._failure is not None:
            raise FaultError(self._failure)

    def fail(self, message: str) -> None:
        """Every wait from now on raises FaultError with this message; the first call counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure, current = message, self._current
        if current is not None:
            self._abort()
            current.done.set()

    def close(self) -> None:
        """Ends the thread and the groups; what is in flight, after a fault, is aborted."""
        if self._closed:
            return
        self._closed, self.owner = True, None
        self._tasks.put(None)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            self._abort()
            self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            return  # it may still be inside the groups, which stay; see `abort`
        for group in (self._node, self._nodes):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def _run(self) -> None:
        with torch.no_grad():
            while (exchange := self._tasks.get()) is not None:
                try:
                    self._carry_out(exchange)
                except Exception as error:
                    self._fail_all(f"{self._describe(exchange)} failed: {brief_error(error)}")
                with self._lock:
                    self._current = None
                exchange.done.set()

    def _carry_out(self, exchange: NodeAverager) -> None:
        for vector in exchange.vectors:
            if exchange.turn == self._local_rank:
                dist.all_reduce(vector, group=self._nodes)
            if self._node is not None:
                root = dist.get_global_rank(self._node, exchange.turn)
                dist.broadcast(vector, root, group=self._node)
        number = exchange.number % _NUMBERS
        if exchange.vectors[0][-1] != self.size * number:
            raise FaultError("a rank of another node is at another exchange: all take equal steps")

    def _fail_all(self, noticed: str) -> None:
        if self._failure is None:
            self.fail(self._rank_group.report_fault(noticed))

    def _abort(self) -> None:
        for group in (self._node, self._nodes):
            if group is not None and dist.is_initialized():
                abort(group)

    def _describe(self, exchange: NodeAverager) -> str:
        return f"{self.label}: exchange {exchange.number} of parameters between nodes"

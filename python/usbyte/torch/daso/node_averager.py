# SPDX-License-Identifier: Apache-2.0
"""Sums of vectors over the nodes, in a background thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from usbyte.errors import FaultError
from usbyte.torch.runtime.format import brief_error
from usbyte.torch.runtime.ring import abort
from usbyte.torch.runtime.worker_thread import WorkerThread
from usbyte.torch.world.rank_group import RankGroup

log = logging.getLogger("usbyte")

_JOIN_S = 5.0
_NUMBERS = 1 << 12  # sums of smaller numbers over thousands of nodes are exact in float32


class NodeSum:
    """One sum over the nodes, in flight or done; `NodeAverager.wait` waits for it.

    Attributes:
        vectors: 1-d, in host memory: this node's values, then the sums over nodes. The last element
            of the first vector is used internally.
        number: Number of the node averaging, from 0 on, the same on all ranks.
        turn: Local index of the ranks that send to other nodes this time.
        done: Set once the sums are complete, or something has failed.
    """

    def __init__(self, vectors: Sequence[torch.Tensor], number: int, turn: int) -> None:
        self.vectors, self.number, self.turn = vectors, number, turn
        self.done = threading.Event()


class NodeAverager:
    """Sums vectors over nodes: the ranks of one local index sum, then each broadcasts in its node.

    A thread runs these sums while this rank computes, in the same order on all ranks. The process
    groups are used by nothing else. A fault aborts the sum in flight.

    Args:
        rank_group: The ranks that take part.
        label: Name of the optimizer, for messages.
        node: Process group of this node, ordered by local index; None for a node of one rank.
        nodes: Process group of the ranks with this rank's local index, ordered by node.
        local_rank: This rank's local index.

    Attributes:
        label: Name of the optimizer.
        owner: An object that is kept alive until `close`.
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
        self._lock = threading.Lock()  # guards the next two attributes
        self._current: NodeSum | None = None
        self._failure: str | None = None
        self._started = 0  # sums started; unlike their numbers, a loaded state never repeats it
        self._closed = False
        self._worker = WorkerThread("usbyte-nodes", owner=self)

    @property
    def failed(self) -> bool:
        """Whether a fault has ended the sums."""
        return self._failure is not None

    def start(self, vectors: Sequence[torch.Tensor], number: int) -> NodeSum:
        """Starts to sum vectors over the nodes.

        Until `wait` returns, do not use the vectors and do not start another sum.

        Args:
            vectors: 1-d, in host memory. The last element of the first is overwritten.
            number: Number of the node averaging: 0, 1, 2, ... It determines the local index that
                sends.

        Raises:
            FaultError: An earlier sum has failed, or the job has.
        """
        node_sum = NodeSum(vectors, number, number % self._slots)
        vectors[0][-1] = number % _NUMBERS
        with self._lock:
            if self._failure is not None:
                raise FaultError(self._failure)
            assert self._current is None
            self._current = node_sum
        self._started += 1
        self._worker.put(partial(self._run, node_sum))
        return node_sum

    def wait(self, node_sum: NodeSum) -> None:
        """Waits, interruptibly, until the vectors hold the sums.

        Raises:
            FaultError: A rank is lost, stuck or at another node averaging; raised on every rank.
        """
        env, began = self._rank_group.env, time.monotonic()
        warned = 0
        while not node_sum.done.wait(0.5):
            waited_s = time.monotonic() - began
            text = f"{self._describe(node_sum)} has been waited for {waited_s:.0f} s"
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
        """Makes every later wait raise `FaultError(message)`; the first message stays."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure, current = message, self._current
        if current is not None:
            self._abort()
            current.done.set()

    def close(self) -> None:
        """Ends the thread and the process groups; a sum still in flight after 5 s is aborted."""
        if self._closed:
            return
        self._closed, self.owner = True, None
        self._worker.end()
        if not self._worker.join(_JOIN_S):
            self._abort()
        if not self._worker.join(_JOIN_S):
            return  # the thread may still use the process groups, so they must not be destroyed
        for group in (self._node, self._nodes):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def _run(self, node_sum: NodeSum) -> None:
        try:
            self._carry_out(node_sum)
        except Exception as error:
            self._fail_all(f"{self._describe(node_sum)} failed: {brief_error(error)}")
        with self._lock:
            self._current = None
        node_sum.done.set()

    def _carry_out(self, node_sum: NodeSum) -> None:
        for vector in node_sum.vectors:
            if node_sum.turn == self._local_rank:
                dist.all_reduce(vector, group=self._nodes)
            if self._node is not None:
                root = dist.get_global_rank(self._node, node_sum.turn)
                dist.broadcast(vector, root, group=self._node)
        number = node_sum.number % _NUMBERS
        if node_sum.vectors[0][-1] != self.size * number:
            raise FaultError(
                "a rank of another node is at another node averaging: call step(), end_epoch() and "
                "synchronize_nodes() equally often on all ranks"
            )

    def _fail_all(self, noticed: str) -> None:
        if self._failure is None:
            self.fail(self._rank_group.report_fault(noticed))

    def _abort(self) -> None:
        for group in (self._node, self._nodes):
            if group is not None and dist.is_initialized():
                abort(group)

    def _describe(self, node_sum: NodeSum) -> str:
        return f"{self.label}: node averaging {node_sum.number}"

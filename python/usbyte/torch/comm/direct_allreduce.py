# SPDX-License-Identifier: Apache-2.0
"""Small all_reduces in one round of messages, on connections of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

_MOST_RANKS = 16  # as each rank sends a message to each other one


def direct_allreduce_max_bytes(size: int, most_sent: int) -> int:
    """Payload of the largest all_reduce between `size` ranks that should go in one shot.

    Args:
        size: Number of ranks.
        most_sent: Bytes that a rank may send for one operation, to all others together; few, for
            they must not show among those of large operations.

    Returns:
        Whole elements of every dtype; 0 if none should.
    """
    return most_sent // (size - 1) // 8 * 8 if 1 < size <= _MOST_RANKS else 0


class DirectAllReduce:
    """All_reduces of few bytes, for a latency that large ones beside them hardly change.

    Gloo's all_reduce goes in 2 (n - 1) rounds, each of which queues behind what others send over
    the same connections, and two threads work on all of them. Here every rank sends its elements to
    every other one and adds up what it gets, in the order of ranks and so alike on all of them.
    `usbyte probe` tells what both take beside a large operation.

    Args:
        group: A process group that nothing else uses, of a backend whose messages have tags.

    Attributes:
        group: As given.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._rank, self._size = group.rank(), group.size()
        self._peers = [r for r in range(self._size) if r != self._rank]
        # Those that fail stay here: Gloo's thread would spin on messages for which there is no
        # memory any more.
        self._in_flight: dict[int, DirectOp] = {}  # by tag

    def start(self, tag: int, views: Sequence[torch.Tensor]) -> DirectOp:
        """Sends the views' elements, one after the other, to all ranks. Does not raise.

        Args:
            tag: From 0 on; the same on all ranks, and another one for each operation in flight.
            views: 1-d, of one dtype.
        """
        numel = sum(view.numel() for view in views)
        parts = views[0].new_empty(self._size, numel)
        torch.cat(list(views), out=parts[self._rank])
        shot = self._in_flight[tag] = DirectOp(tag, views, parts)
        try:
            # Receives first: Gloo sends what its receiver has announced to be ready for.
            for r in self._peers:
                shot.work.append(self.group.recv([parts[r]], r, tag))
            for r in self._peers:
                shot.work.append(self.group.send([parts[self._rank]], r, tag))
        except RuntimeError as e:  # a connection is lost
            shot.error = e
        return shot

    def finish(self, shot: DirectOp) -> None:
        """Waits for the messages, without the GIL, and puts the sums into the views.

        Raises:
            RuntimeError: The backend's error, for example when a peer is lost.
        """
        if shot.error is not None:
            raise shot.error
        for work in shot.work:
            work.wait()
        total = shot.parts[0]
        for part in shot.parts[1:]:
            total += part
        sums = total.split([view.numel() for view in shot.views])
        for view, values in zip(shot.views, sums, strict=True):
            view.copy_(values)
        del self._in_flight[shot.tag]


@dataclass(eq=False)
class DirectOp:
    """An operation in flight.

    Attributes:
        tag: Of its messages.
        views: Where its elements come from and go to.
        parts: What each rank has sent, by rank.
        work: The messages.
        error: Why not all of them could be posted.
    """

    tag: int
    views: Sequence[torch.Tensor]
    parts: torch.Tensor
    work: list[dist.Work] = field(default_factory=list)
    error: RuntimeError | None = None

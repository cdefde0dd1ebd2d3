# SPDX-License-Identifier: Apache-2.0
"""Direct all-reduce: small all_reduces in one round of messages, on separate connections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

_MOST_RANKS = 16  # because each rank sends a message to every other rank


def direct_allreduce_max_bytes(size: int, most_sent: int) -> int:
    """Returns the largest payload that should use a direct all-reduce between `size` ranks.

    Args:
        size: Number of ranks.
        most_sent: Most bytes that a rank may send for one op, to all others together. Keep it
            negligible beside the bytes of large ops.

    Returns:
        Bytes, a multiple of 8 and so of every dtype's size; 0 if no op should use it.
    """
    return most_sent // (size - 1) // 8 * 8 if 1 < size <= _MOST_RANKS else 0


class DirectAllReduce:
    """Runs small all_reduces with a latency that concurrent large ones hardly change.

    Gloo's all_reduce takes 2 (n - 1) rounds. Each round queues behind the messages of other ops on
    the same connections, and two threads serve all of them. Here every rank sends its elements to
    every other rank. It sums the elements in the order of ranks, so the result is bitwise equal on
    all ranks. `usbyte probe` measures both beside a large op.

    Args:
        group: A process group that nothing else uses. Its backend must support tags.

    Attributes:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._rank, self._size = group.rank(), group.size()
        self._peers = [r for r in range(self._size) if r != self._rank]
        # Failed ops stay here. Without the memory of their messages, Gloo's thread would spin.
        self._in_flight: dict[int, DirectOp] = {}  # by tag

    def start(self, tag: int, views: Sequence[torch.Tensor]) -> DirectOp:
        """Starts to send the concatenated views to all ranks.

        Does not raise if a connection is lost: `finish` raises the error.

        Args:
            tag: Tag of the messages, at least 0. The same on all ranks, and different for each op
                in flight.
            views: The blocks of the op; 1-d tensors of one dtype.
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
        """Waits for the messages and writes the sums into the views. Waits without the GIL.

        Args:
            shot: The op, from `start`.

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
    """A direct all-reduce in flight.

    Attributes:
        tag: Tag of its messages.
        views: The blocks that are summed in place.
        parts: The elements of each rank, shape [ranks, elements].
        work: The posted receives and sends.
        error: Error of a receive or send that could not be posted; None if all were.
    """

    tag: int
    views: Sequence[torch.Tensor]
    parts: torch.Tensor
    work: list[dist.Work] = field(default_factory=list)
    error: RuntimeError | None = None

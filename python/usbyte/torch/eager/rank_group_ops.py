# SPDX-License-Identifier: Apache-2.0
"""The ranks of eager operations, and the collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist

from usbyte.errors import UsageError
from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.runtime.ring import abort


class RankGroupOps:
    """A group of ranks and its blocking collectives.

    Args:
        group: Process group with a CPU backend, or a function that makes it when the first
            collective runs. Unused if `size` is 1.
        rank: This rank's position in the group.
        size: Number of ranks in the group.
        members: Global ranks of the group, ascending; default 0, 1, ...
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Callable[[], dist.ProcessGroup],
        rank: int,
        size: int,
        members: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.members = range(size) if members is None else members
        self._make_group = group if callable(group) else None
        self._group = None if callable(group) else group
        self._aborted = False
        self._work: Any = None

    @property
    def name(self) -> int:
        """Global rank of this process."""
        return self.members[self.rank]

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. The first access makes it, which is collective among the ranks.

        Access it from one thread only.

        Raises:
            RuntimeError: `abort` was called while it was made, or it cannot be made.
        """
        if self._group is None:
            assert self._make_group is not None
            self._group = self._make_group()
            # This writes _group and then reads _aborted; `abort` writes _aborted and then reads
            # _group. So at least one of the two threads sees both.
            if self._aborted:
                raise RuntimeError("the connections were aborted while they were made")
        return self._group

    def position(self, what: str, root: int) -> int:
        """Returns the position in the group of the global rank `root`.

        Args:
            what: Names the operation; the error message begins with it.
            root: Global rank.

        Raises:
            UsageError: `root` is not one of the ranks.
        """
        if root in self.members:
            return self.members.index(root)
        if self.members[-1] < self.size:
            raise UsageError(f"{what}: root rank {root} is not one of the {self.size} ranks")
        raise UsageError(
            f"{what}: root rank {root} is not in the process set of {name_ranks(self.members)}; "
            "root ranks are those of the whole job, also inside a process set"
        )

    def all_reduce(self, flat: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduces `flat` in place; blocks without the GIL."""
        options = dist.AllreduceOptions()
        options.reduceOp = cast(dist.ReduceOp, op)  # RedOpType converts to it at run time
        self._wait(self.group.allreduce([flat], options))

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Overwrites `flat` with the `flat` of the rank at position `root`; blocks without the GIL.

        Args:
            flat: Contiguous tensor, of the same size on every rank.
            root: Position in the group, not a global rank.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._wait(self.group.broadcast([flat], options))

    def all_to_all(
        self, out: torch.Tensor, flat: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Sends a range of `flat` to each rank and fills `out`; blocks without the GIL.

        Args:
            out: Tensor of `sum(received)` elements.
            flat: Tensor of `sum(sent)` elements.
            received: Elements from each rank, by position.
            sent: Elements to each rank, by position.
        """
        options = dist.AllToAllOptions()
        self._wait(self.group.alltoall_base(out, flat, list(received), list(sent), options))

    def abort(self) -> None:
        """Ends the running collective, on this rank and on the ranks that wait for this one."""
        self._aborted = True
        if self._group is not None:
            # The user may have destroyed it meanwhile.
            with suppress(RuntimeError, ValueError, AssertionError):
                abort(self._group)

    def close(self) -> None:
        """Destroys the group.

        The group's destructor joins Gloo's threads, in older torch with the GIL held. A Gloo thread
        that drops the last reference to a tensor of its collective needs the GIL, which would
        deadlock. The reference to the last collective is therefore dropped after the group.
        """
        group, self._group = self._group, None
        if group is not None and self._make_group is None and self.size > 1:
            # The user may have destroyed it before.
            with suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(group)
        del group
        self._work = None

    def _wait(self, work: Any) -> None:
        self._work = work
        work.wait()

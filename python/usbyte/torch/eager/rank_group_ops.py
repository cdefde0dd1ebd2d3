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
    """The ranks of an operation.

    Args:
        group: Process group with a CPU backend, or what makes it when the first collective runs;
            unused where `size` is 1.
        rank: This rank's position in the group.
        size: Number of ranks in the group.
        members: What users call the ranks of the group, ascending; 0, 1, ... if left out.
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
        """What users call this rank."""
        return self.members[self.rank]

    @property
    def group(self) -> dist.ProcessGroup:
        """The group. Whoever asks first makes it, together with the other ranks; from one thread.

        Raises:
            RuntimeError: It was aborted meanwhile, or cannot be made.
        """
        if self._group is None:
            assert self._make_group is not None
            self._group = self._make_group()
            # `abort` writes and reads these in the other order, so that one of the two sees both.
            if self._aborted:
                raise RuntimeError("the connections were aborted while they were made")
        return self._group

    def position(self, what: str, root: int) -> int:
        """Position in the group of the rank that users call `root`.

        Raises:
            UsageError: It is not one of the ranks; `what` goes before the message.
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
        """Reduces `flat` in place, without the GIL."""
        options = dist.AllreduceOptions()
        options.reduceOp = cast(dist.ReduceOp, op)  # a constant of it
        self._wait(self.group.allreduce([flat], options))

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Overwrites `flat` with that of the rank at position `root`, without the GIL."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._wait(self.group.broadcast([flat], options))

    def all_to_all(
        self, out: torch.Tensor, flat: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Fills `out` with parts of the others' `flat`, of so many elements, without the GIL."""
        options = dist.AllToAllOptions()
        self._wait(self.group.alltoall_base(out, flat, list(received), list(sent), options))

    def abort(self) -> None:
        """Ends the collective that is running, on this rank and on those that wait for it."""
        self._aborted = True
        if self._group is not None:
            # It may have been destroyed by the user meanwhile.
            with suppress(RuntimeError, ValueError, AssertionError):
                abort(self._group)

    def close(self) -> None:
        """Gives up the group.

        Its destructor joins Gloo's threads, in older torch with the GIL held. A thread that just
        then drops the last reference to a tensor of its collective would need the GIL, so the last
        collective is kept until the group is gone.
        """
        group, self._group = self._group, None
        if group is not None and self._make_group is None and self.size > 1:
            with suppress(RuntimeError, ValueError, AssertionError):  # destroyed by the user before
                dist.destroy_process_group(group)
        del group
        self._work = None

    def _wait(self, work: Any) -> None:
        self._work = work
        work.wait()

"""The ranks of one node, which average gradients among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from usbyte import _core
from usbyte.torch.context import Context
from usbyte.torch.device import CudaDevice
from usbyte.torch.eager import EagerQueue

if TYPE_CHECKING:
    from usbyte.torch.optimizer import DistributedOptimizer


class Node(Context):
    """What one optimizer sees of the run if it is to know the ranks of this node alone.

    Faults, timelines and shutdown stay those of the whole run. Making one is collective among all
    ranks of the run, and so are `new_group` and `new_communicator`, for all nodes at once; what
    goes through `eager` is between the ranks of the node.

    Args:
        whole: The run.
        label: Name of the optimizer, the same on all ranks and not used before.
        slots: Ranks of each node; those of one follow one another.
    """

    def __init__(self, whole: Context, label: str, slots: int) -> None:
        # Not the parent's: that one joins the other ranks, and this is already done.
        self._whole, self.env, self._timeout = whole, whole.env, whole._timeout
        self._label = label
        first = whole.rank - whole.rank % slots
        self.rank, self.size = whole.rank - first, slots
        self.local_rank, self.local_size = self.rank, slots
        self.store = dist.PrefixStore(f"{label}.node{first}", whole.store)
        self.eager = EagerQueue(
            self._group_of_node("gloo"),
            self.store,
            self.rank,
            self.size,
            stall_limit_s=self.env.stall_limit_s,
            stall_warning_s=self.env.stall_warning_s,
            on_fault=self.report_fault,
        )

    def new_group(self) -> dist.ProcessGroup:
        """A process group over the node's ranks. Collective among all ranks of the run."""
        return self._group_of_node(self._host_backend())

    def next_label(self) -> str:
        """The optimizer's, as given."""
        return self._label

    def add(self, optimizer: DistributedOptimizer) -> None:
        """See `Context`."""
        self._whole.add(optimizer)

    def warn(self, text: str) -> None:
        """See `Context`."""
        self._whole.warn(text)

    def inquire(self, topic: str, text: str) -> str:
        """See `Context`."""
        return self._whole.inquire(topic, text)

    def report_fault(self, noticed: str) -> str:
        """See `Context`."""
        first = self._whole.rank - self.rank
        where = f"inside the node of ranks {first}-{first + self.size - 1}, which counts from 0"
        return self._whole.report_fault(f"{noticed} ({where})")

    def close(self) -> None:
        """Ends the thread of `eager`."""
        self.eager.close()

    def _group_of_node(self, backend: str) -> dist.ProcessGroup:
        mine: dist.ProcessGroup | None = None
        for first in range(0, self._whole.size, self.size):
            ranks = range(first, first + self.size)
            mine = self._whole.new_group_of(ranks, backend) or mine
        assert mine is not None
        return mine

    def _agree_on_nccl(self, device: CudaDevice) -> _core.Nccl | None:
        # All nodes or none, as those without it need groups, which all ranks make together.
        nccl = super()._agree_on_nccl(device)
        answers: Sequence[bytes] = self._whole.eager.allgather_bytes(
            "usbyte.node.nccl", b"1" if nccl is not None else b"0"
        )
        return nccl if b"0" not in answers else None

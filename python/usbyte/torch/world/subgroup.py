"""Some of the ranks, which share gradients among themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from usbyte.errors import UsageError
from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.runtime.process_groups import gloo_group
from usbyte.torch.world.process_sets import name_of
from usbyte.torch.world.world import World

if TYPE_CHECKING:
    from usbyte.torch.optimizer.distributed_optimizer import DistributedOptimizer


def subgroup_of(whole: World, ranks: Sequence[int]) -> World:
    """These ranks, once for each run. Collective among them.

    Args:
        whole: The run.
        ranks: Of the run, ascending.

    Raises:
        UsageError: This rank is not one of them.
    """
    if len(ranks) == whole.size:
        return whole
    if whole.rank not in ranks:
        raise UsageError(
            f"rank {whole.rank} is not in the process set of {name_ranks(ranks)}: make the "
            "optimizer on these ranks only"
        )
    key = tuple(ranks)
    if key not in whole.members:
        whole.check()
        made = Subgroup(whole, ranks, name_of(ranks))
        whole.members[key] = made  # so that it is told of a fault from now on
        try:
            whole.check()
        except BaseException:
            del whole.members[key]
            made.close()
            raise
    return whole.members[key]


class Subgroup(World):
    """What an optimizer sees of the run if it is to know these ranks alone.

    What is collective is so among them. Faults, timelines and shutdown stay those of the whole run.

    Args:
        whole: The run.
        ranks: Of the run, this one among them, ascending.
        name: Of the set, the same on its ranks and of no other set.
    """

    def __init__(self, whole: World, ranks: Sequence[int], name: str) -> None:
        # Not the parent's: that one joins the other ranks, and this is already done.
        self._whole, self.env, self._timeout = whole, whole.env, whole._timeout
        self.ranks = list(ranks)
        self.rank, self.size = self.ranks.index(whole.rank), len(self.ranks)
        self.machines = [whole.machines[rank] for rank in self.ranks]
        here = [r for r, machine in enumerate(self.machines) if machine == self.machines[self.rank]]
        self.local_rank, self.local_size = here.index(self.rank), len(here)
        self._name = name
        self.store = dist.PrefixStore(f"members.{name}", whole.store)
        self._orphans = whole._orphans  # which is told of faults
        self._groups = itertools.count()  # equal on these ranks
        self._labels = 0
        self.eager = EagerQueue(
            self.new_group,
            self.store,
            self.rank,
            self.size,
            stall_limit_s=self.env.stall_limit_s,
            stall_warning_s=self.env.stall_warning_s,
            on_fault=self.report_fault,
        )

    def new_group(self) -> dist.ProcessGroup:
        """A process group over these ranks that nothing else uses. Collective among them."""
        group = self.new_group_of(range(self.size))
        assert group is not None
        return group

    def new_group_of(
        self, ranks: Sequence[int], backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """A group over some of these ranks, for those; None for the others.

        Args:
            ranks: Positions among these. All of them call, in the same order.
            backend: That of gradients on the CPU if left out.

        Raises:
            UsageError: The backend is not Gloo.
        """
        if (backend or self.host_backend) != "gloo":
            raise UsageError(
                f"USBYTE_BACKEND={self.env.backend} cannot make groups of some ranks: unset it, or "
                "leave out process_set="
            )
        store = dist.PrefixStore(f"group.{next(self._groups)}", self.store)
        if self.rank not in ranks:
            return None
        return gloo_group(store, list(ranks).index(self.rank), len(ranks), self._timeout)

    def next_label(self) -> str:
        """See `World`; tells whose the optimizer is."""
        self._labels += 1
        return f"optimizer.{self._labels} of {self._name}"

    def add(self, optimizer: DistributedOptimizer) -> None:
        """See `World`."""
        self._whole.add(optimizer)

    def check(self) -> None:
        """See `World`."""
        self._whole.check()

    def warn(self, text: str) -> None:
        """See `World`."""
        self._whole.warn(text)

    def query_stragglers(self, topic: str, text: str) -> str:
        """See `World`."""
        return self._whole.query_stragglers(topic, text)

    def report_fault(self, noticed: str) -> str:
        """See `World`."""
        where = f"in the process set of {name_ranks(self.ranks)}, which counts from 0"
        return self._whole.report_fault(f"{noticed} ({where})")

    def close(self) -> None:
        """Ends the thread of `eager`."""
        self.eager.close()

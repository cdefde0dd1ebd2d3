# SPDX-License-Identifier: Apache-2.0
"""Subgroups: some of the ranks of the world, which share an optimizer's gradients."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from usbyte.errors import UsageError
from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.runtime.process_groups import gloo_group
from usbyte.torch.world.process_sets import name_of
from usbyte.torch.world.rank_group import OrphanedEngine, Participant, RankGroup
from usbyte.torch.world.step_report import StepReport
from usbyte.torch.world.world import World


def subgroup_of(world: World, ranks: Sequence[int]) -> RankGroup:
    """Returns the rank group of `ranks`; the same object for each call. Collective among them.

    Args:
        world: All ranks of the job.
        ranks: Some or all ranks of the world, ascending. For all, the result is `world`.

    Raises:
        UsageError: This rank is not in `ranks`.
        FaultError: There was a fault.
    """
    if len(ranks) == world.size:
        return world
    if world.rank not in ranks:
        raise UsageError(
            f"rank {world.rank} is not in the process set of {name_ranks(ranks)}: make the "
            "optimizer on these ranks only"
        )
    key = tuple(ranks)
    if key not in world.subgroups:
        world.check()
        made = Subgroup(world, ranks, name_of(ranks))
        world.subgroups[key] = made  # registered before the check, so that a later fault reaches it
        try:
            world.check()
        except BaseException:
            del world.subgroups[key]
            made.close()
            raise
    return world.subgroups[key]


class Subgroup:
    """Some ranks of the world that share gradients among themselves; implements `RankGroup`.

    Collective calls are collective among these ranks. Faults, timelines and shutdown are the
    world's.

    Args:
        world: All ranks of the job.
        ranks: Ranks of the world, this one among them, ascending.
        name: Unique name of the subgroup, the same on its ranks.
    """

    def __init__(self, world: World, ranks: Sequence[int], name: str) -> None:
        self._world, self.env, self._timeout = world, world.env, world.timeout
        self.ranks = list(ranks)
        self.rank, self.size = self.ranks.index(world.rank), len(self.ranks)
        self.machines = [world.machines[rank] for rank in self.ranks]
        self.hosts = [world.hosts[rank] for rank in self.ranks]
        self.local_rank, self.local_size = self.places()[self.rank]
        self._name = name
        self.store: dist.Store = dist.PrefixStore(f"members.{name}", world.store)
        self._orphans = world.orphans
        self._groups = itertools.count()  # numbers of process groups, equal on these ranks
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

    def places(self) -> list[tuple[int, int]]:
        """Returns (local rank, number of these ranks on the host) for each rank. Not collective."""
        sizes, seen = Counter(self.machines), Counter[str]()
        found = []
        for machine in self.machines:
            found.append((seen[machine], sizes[machine]))
            seen[machine] += 1
        return found

    def new_group(self) -> dist.ProcessGroup:
        """Makes a process group over these ranks that nothing else uses. Collective among them."""
        group = self.new_group_of(range(self.size))
        assert group is not None
        return group

    def new_group_of(
        self, ranks: Sequence[int], backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Makes a process group over some of these ranks. Collective among the subgroup.

        All ranks of the subgroup call this in the same order.

        Args:
            ranks: Positions in this subgroup.
            backend: Must be "gloo"; default `host_backend`.

        Returns:
            The process group; None on ranks that are not in `ranks`.

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
        """Returns the next optimizer's name, which includes the subgroup's name."""
        self._labels += 1
        return f"optimizer.{self._labels} of {self._name}"

    @property
    def host_backend(self) -> str:
        """Backend of torch.distributed for tensors on the CPU."""
        return self._world.host_backend

    @property
    def report(self) -> StepReport | None:
        """Writes the page of USBYTE_REPORT; None on ranks that write none."""
        return self._world.report

    def add(self, participant: Participant) -> None:
        """Registers an optimizer for the world's timelines, faults and shutdown."""
        self._world.add(participant)

    def adopt_orphan(self, engine: OrphanedEngine) -> None:
        """Takes ownership of an engine until all ranks can close it. Any thread may call this."""
        self._orphans.add(engine)

    def find_orphans(self) -> list[str]:
        """Returns the labels of the engines that are orphaned on this rank, for `close_orphans`."""
        return self._orphans.find(self, collect=bool(self._world.participants.sending()))

    def close_orphans(self, labels: Sequence[Sequence[str]]) -> None:
        """Closes the engines that are orphaned on all of these ranks. Collective among them.

        Args:
            labels: The results of `find_orphans` of all ranks.
        """
        self._orphans.close_common(self, labels)

    def check(self) -> None:
        """Raises FaultError if there was a fault on any rank of the world."""
        self._world.check()

    def warn(self, text: str) -> None:
        """Logs a warning that names this rank."""
        self._world.warn(text)

    def query_stragglers(self, topic: str, text: str) -> str:
        """Returns a warning with the ranks that are behind added, for the first rank that asks."""
        return self._world.query_stragglers(topic, text)

    def report_fault(self, noticed: str) -> str:
        """Diagnoses a fault with all ranks of the world; returns the fault verdict."""
        where = f"in the process set of {name_ranks(self.ranks)}, which counts from 0"
        return self._world.report_fault(f"{noticed} ({where})")

    def close(self) -> None:
        """Ends the thread of `eager`."""
        self.eager.close()

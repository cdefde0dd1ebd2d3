# SPDX-License-Identifier: Apache-2.0
"""Process sets: collectives among a subset of the ranks, under Horovod's names."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from usbyte.errors import UsageError
from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.runtime.process_groups import gloo_group
from usbyte.torch.world.consistency import verify_same_on_all_ranks
from usbyte.torch.world.rank_group import RankGroup

__all__ = ["ProcessSet", "global_process_set"]

_NAMED = 8  # most ranks that a key lists, so that keys stay short


def _checked(ranks: Any) -> list[int]:
    try:
        checked = sorted(operator.index(rank) for rank in ranks)
    except TypeError:
        raise UsageError(
            f"a process set is made of ranks, as [0, 2], not of {ranks!r}; for one over an MPI "
            "communicator, list the ranks"
        ) from None
    if not checked or checked[0] < 0 or len(set(checked)) != len(checked):
        raise UsageError(f"process set {checked}: name at least one rank, from 0 on, each once")
    return checked


class ProcessSet:
    """A subset of the ranks that runs eager collectives among itself.

    `init(process_sets=[...])` or `add_process_set` adds the set to the run; `remove_process_set` or
    `shutdown` removes it. Names of operations in different sets do not collide. The first operation
    of a set starts two threads and opens some connections on each of its ranks.

    Args:
        ranks_or_comm: Ranks of the whole job, at least one, in any order, without duplicates. MPI
            communicators are refused.

    Attributes:
        ranks: The ranks, ascending. Those of `global_process_set` are empty before `init` and after
            `shutdown`.
        process_set_id: Number of the set, the same on all ranks; None while the set is not part of
            a run. `global_process_set` has 0.

    Raises:
        UsageError: A value is not a rank, or occurs twice.
    """

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        self.ranks = _checked(ranks_or_comm)
        self.process_set_id: int | None = None
        self._here: int | None = None  # this process's rank in the whole job; None outside a run

    def size(self) -> int | None:
        """Returns the number of ranks in the set; None while the set is not part of a run."""
        return None if self._here is None else len(self.ranks)

    def rank(self) -> int | None:
        """Returns this process's position in `ranks`, -1 if it is no member; None outside a run."""
        if self._here is None:
            return None
        return self.ranks.index(self._here) if self._here in self.ranks else -1

    def included(self) -> bool | None:
        """Returns whether this process is a member of the set; None outside a run."""
        return None if self._here is None else self._here in self.ranks

    def enter(self, number: int, here: int) -> None:
        """Makes the set part of a run as number `number`; this process has rank `here` there."""
        self.process_set_id, self._here = number, here

    def leave(self) -> None:
        """Marks the set as not part of any run."""
        self.process_set_id = self._here = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


#: The process set of all ranks, the default of every `process_set=`.
global_process_set = ProcessSet([0])
global_process_set.ranks, global_process_set.process_set_id = [], 0

#: Types of `process_set=`: a `ProcessSet`, a list of ranks of the whole job, a process group of
#: torch.distributed, or a `DeviceMesh` of one dimension. All but a `ProcessSet` need no
#: `add_process_set`: only the selected ranks call the operation, and the threads and connections
#: that it makes for them stay until `shutdown`.
ProcessSetLike = ProcessSet | Sequence[int] | dist.ProcessGroup | DeviceMesh


def ranks_of(members: ProcessSetLike, size: int) -> list[int]:
    """Returns the ranks that a `process_set=` argument selects, ascending. Not collective.

    Args:
        members: The argument, of any type that `ProcessSetLike` lists.
        size: Number of ranks in the job.

    Returns:
        Ranks of the whole job.

    Raises:
        UsageError: `members` is not part of this run, selects no valid ranks, or is a process group
            or mesh that cannot be resolved on this rank.
    """
    if isinstance(members, ProcessSet):
        if members is global_process_set:
            return list(range(size))
        if members.process_set_id is None:
            raise UsageError(
                f"{members} is not part of the run: pass it to init(process_sets=[...]) or to "
                "add_process_set() on every rank"
            )
        return list(members.ranks)
    if isinstance(members, DeviceMesh):
        if members.ndim != 1:
            raise UsageError(
                f"process_set: a mesh of {members.ndim} dimensions means several groups: pass one "
                'of its dimensions, as mesh["data"]'
            )
        members = members.mesh.tolist()
    elif isinstance(members, dist.ProcessGroup):
        try:
            members = dist.get_process_group_ranks(members)
        except (KeyError, ValueError):
            raise UsageError("process_set: this torch.distributed group is destroyed") from None
    elif members is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("process_set: this process is not in that torch.distributed group")
    ranks = _checked(members)
    if ranks[-1] >= size:
        raise UsageError(f"process set {ranks}: the job has ranks 0 to {size - 1}, no {ranks[-1]}")
    return ranks


class ProcessSets:
    """The process sets of a run, and this rank's eager queues for them.

    Args:
        rank_group: All ranks of the job.
        eager: Eager queue of all ranks.
        timeout: Timeout of the Gloo process groups that are made for the sets.
    """

    def __init__(self, rank_group: RankGroup, eager: EagerQueue, timeout: timedelta) -> None:
        self._rank_group, self._eager, self._timeout = rank_group, eager, timeout
        self._ids = itertools.count(1)  # equal on all ranks, because all add sets in the same order
        # Guards the attributes below. Reentrant, because signal handlers may call methods too.
        self._lock = threading.RLock()
        self._sets: dict[int, ProcessSet] = {}
        self._queues: dict[str, EagerQueue] = {}
        self._failure: str | None = None
        global_process_set.ranks = list(range(rank_group.size))
        global_process_set.enter(0, rank_group.rank)

    def add(self, *given: ProcessSet | Sequence[int]) -> list[ProcessSet]:
        """Adds process sets to the run, all or none. Collective among all ranks of the job.

        Args:
            *given: Process sets, or lists of ranks of the whole job.

        Returns:
            The added process sets, in the order of the arguments.

        Raises:
            UsageError: The argument of one rank cannot be used, or a set of the same ranks exists;
                raised on every rank.
            MismatchError: The ranks pass different sets; raised on every rank.
        """
        size, problem = self._rank_group.size, ""
        added: list[ProcessSet] = []
        try:
            added = [s if isinstance(s, ProcessSet) else ProcessSet(s) for s in given]
            ranks = [ranks_of(process_set.ranks, size) for process_set in added]
        except UsageError as error:  # raised below on all ranks, so that none waits for this one
            problem, ranks = str(error), []
        self._agree("add_process_set", {"the list of sets": ranks}, problem)
        with self._lock:
            known = [list(range(size)), *(s.ranks for s in self._sets.values())]
            for new in ranks:
                if new in known:
                    raise UsageError(
                        f"add_process_set: there is a set of ranks {new} already: use that one, "
                        "or global_process_set for all ranks"
                    )
                known.append(new)
            for process_set in added:
                number = next(self._ids)
                self._sets[number] = process_set
                process_set.enter(number, self._rank_group.rank)
        return added

    def remove(self, process_set: ProcessSet) -> bool:
        """Removes a process set from the run. Collective among all ranks of the job.

        Args:
            process_set: The set to remove, the same on all ranks.

        Returns:
            True if the set was removed, False if the set is the global one or not part of the run.

        Raises:
            UsageError: On some rank an operation of the set is in flight; raised on every rank.
            MismatchError: The ranks pass different sets; raised on every rank.
        """
        number, problem = getattr(process_set, "process_set_id", None), ""
        with self._lock:
            queue = self._queues.get(_of_set(number))
            if number and self._sets.get(number) is not process_set:
                problem = f"{process_set} is not part of this run"
        if queue is not None and (pending := queue.pending()):
            problem = f"{pending[0]} is in flight in {process_set}: synchronize it first"
        self._agree("remove_process_set", {"process_set_id": number}, problem)
        if not number:
            return False
        with self._lock:
            del self._sets[number]
            queue = self._queues.pop(_of_set(number), None)
        process_set.leave()
        if queue is not None:
            queue.close()
        return True

    def queue(self, what: str, members: ProcessSetLike) -> EagerQueue:
        """Returns the eager queue for operations among `members`. Not collective.

        Args:
            what: Name of the operation, for messages.
            members: The ranks, as a `ProcessSetLike`. Each `ProcessSet` has its own queue. All
                other arguments that select the same ranks share one queue.

        Raises:
            UsageError: This rank is not one of `members`, or `ranks_of` refuses them.
        """
        rank_group = self._rank_group
        ranks = ranks_of(members, rank_group.size)
        if len(ranks) == rank_group.size:
            return self._eager
        if rank_group.rank not in ranks:
            raise UsageError(
                f"{what}: rank {rank_group.rank} is not in the process set of {name_ranks(ranks)}: "
                "call it on these ranks only, as process_set.included() tells"
            )
        key = name_of(ranks)
        with self._lock:
            if isinstance(members, ProcessSet):
                key = _of_set(members.process_set_id)
                if self._sets.get(members.process_set_id or 0) is not members:
                    raise UsageError(f"{what}: {members} is not part of this run")
            if key not in self._queues:
                self._queues[key] = self._open(key, ranks)
                if self._failure is not None:
                    self._queues[key].fail(self._failure)
            return self._queues[key]

    def fail(self, message: str) -> None:
        """Ends every pending and later operation of every set with `FaultError(message)`."""
        with self._lock:
            self._failure = self._failure or message
            queues = list(self._queues.values())
        for queue in queues:
            queue.fail(message)

    def close(self) -> None:
        """Ends all process sets. Pending operations fail."""
        with self._lock:
            sets, queues = list(self._sets.values()), list(self._queues.values())
            self._sets, self._queues = {}, {}
        for process_set in sets:
            process_set.leave()
        for queue in queues:
            queue.close()
        global_process_set.leave()
        global_process_set.ranks, global_process_set.process_set_id = [], 0

    def _open(self, key: str, ranks: Sequence[int]) -> EagerQueue:
        rank_group, position = self._rank_group, ranks.index(self._rank_group.rank)
        store = dist.PrefixStore(key, rank_group.store)

        return EagerQueue(
            partial(gloo_group, store, position, len(ranks), self._timeout),
            store,
            position,
            len(ranks),
            stall_limit_s=rank_group.env.stall_limit_s,
            stall_warning_s=rank_group.env.stall_warning_s,
            on_fault=lambda text: rank_group.report_fault(
                f"{text} (in the process set of {name_ranks(ranks)})"
            ),
            members=ranks,
        )

    def _agree(self, what: str, meant: Mapping[str, object], problem: str) -> None:
        """Raises on every rank if one rank has a problem or the ranks mean different sets."""
        remedy = (
            "Call it on every rank of the job, members or not, for the same sets in the same order."
        )
        verify_same_on_all_ranks(self._rank_group, what, meant, remedy, problem)


def _of_set(number: int | None) -> str:
    return f"process_set.{number}"


def name_of(ranks: Sequence[int]) -> str:
    """Returns the key of a set of ranks that was not added to the run and has no number.

    Only the members know such a set. The key lists up to 8 ranks; longer lists are hashed.

    Args:
        ranks: Ranks of the whole job, ascending.
    """
    if len(ranks) <= _NAMED:
        return f"ranks.{'.'.join(map(str, ranks))}"
    return f"ranks.{hashlib.sha256(json.dumps(list(ranks)).encode()).hexdigest()[:32]}"

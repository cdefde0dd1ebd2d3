"""Process sets: collectives among some of the ranks, under Horovod's names."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from usbyte.errors import MismatchError, UsageError
from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.runtime.process_groups import gloo_group
from usbyte.torch.world.rank_group import RankGroup

__all__ = ["ProcessSet", "global_process_set"]

_NAMED = 8  # ranks; of more the name would be long


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
    """Ranks that run collectives among themselves.

    `init(process_sets=[...])` or `add_process_set` makes it part of the run, up to
    `remove_process_set` or `shutdown`. Names of operations in different sets do not collide. From
    its first operation on, it costs each of its ranks two threads and some connections.

    Args:
        ranks_or_comm: Ranks of the whole job, in any order. MPI communicators are not taken.

    Attributes:
        ranks: Ascending; of the global set, empty without a run.
        process_set_id: What all ranks call it while it is part of the run: 0 is the set of all
            ranks. None before and after.

    Raises:
        UsageError: These are no ranks, or one occurs twice.
    """

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        self.ranks = _checked(ranks_or_comm)
        self.process_set_id: int | None = None
        self._here: int | None = None  # this process's rank in the job, during a run

    def size(self) -> int | None:
        """Number of its ranks; None while it is not part of a run."""
        return None if self._here is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's position among its ranks, -1 outside; None while not part of a run."""
        if self._here is None:
            return None
        return self.ranks.index(self._here) if self._here in self.ranks else -1

    def included(self) -> bool | None:
        """Whether this process is one of its ranks; None while it is not part of a run."""
        return None if self._here is None else self._here in self.ranks

    def enter(self, number: int, here: int) -> None:
        """Makes it part of a run, in which this process has the rank `here`."""
        self.process_set_id, self._here = number, here

    def leave(self) -> None:
        """Ends that."""
        self.process_set_id = self._here = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


#: All ranks.
global_process_set = ProcessSet([0])
global_process_set.ranks, global_process_set.process_set_id = [], 0

#: What stands for some of the ranks: a set, their numbers in the whole job, a group of
#: torch.distributed's, or a mesh of one dimension. For all but the first, only those ranks need to
#: call, and what they share is kept until `shutdown`.
ProcessSetLike = ProcessSet | Sequence[int] | dist.ProcessGroup | DeviceMesh


def ranks_of(members: ProcessSetLike, size: int) -> list[int]:
    """The ranks, in the whole job and ascending, that `process_set=` means. Not collective.

    Args:
        members: See `ProcessSetLike`.
        size: Number of ranks in the job.

    Raises:
        UsageError: It means no ranks of this job, or this process cannot tell which.
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
    """The process sets of a run, and what its operations go through on this rank.

    Args:
        rank_group: All ranks of the job.
        eager: Collectives among all ranks.
        timeout: Of the backend.
    """

    def __init__(self, rank_group: RankGroup, eager: EagerQueue, timeout: timedelta) -> None:
        self._rank_group, self._eager, self._timeout = rank_group, eager, timeout
        self._ids = itertools.count(1)  # equal on all ranks, who add sets in one order
        self._lock = threading.RLock()  # guards what is below; signal handlers may use this
        self._sets: dict[int, ProcessSet] = {}
        self._queues: dict[str, EagerQueue] = {}
        self._failure: str | None = None
        global_process_set.ranks = list(range(rank_group.size))
        global_process_set.enter(0, rank_group.rank)

    def add(self, *given: ProcessSet | Sequence[int]) -> list[ProcessSet]:
        """Makes sets part of the run, all or none. Collective among all ranks of the job.

        Raises:
            UsageError: On every rank: one rank's argument cannot be used, or there is such a set.
            MismatchError: On every rank: the ranks mean different sets.
        """
        size, problem = self._rank_group.size, None
        added: list[ProcessSet] = []
        try:
            added = [s if isinstance(s, ProcessSet) else ProcessSet(s) for s in given]
            ranks = [ranks_of(process_set.ranks, size) for process_set in added]
        except UsageError as error:  # the others must not wait for this rank
            problem, ranks = str(error), []
        self._agree("add_process_set", ranks, problem)
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
        """Takes a set out of the run. Collective among all ranks of the job.

        Returns:
            False if it is the global one or not part of the run.

        Raises:
            UsageError: On every rank: on one of them an operation of the set is in flight.
            MismatchError: On every rank: the ranks mean different sets.
        """
        number, problem = getattr(process_set, "process_set_id", None), None
        with self._lock:
            queue = self._queues.get(_of_set(number))
            if number and self._sets.get(number) is not process_set:
                problem = f"{process_set} is not part of this run"
        if queue is not None and (pending := queue.pending()):
            problem = f"{pending[0]} is in flight in {process_set}: synchronize it first"
        self._agree("remove_process_set", [] if number is None else [number], problem)
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
        """What operations among `members` go through. Not collective.

        Args:
            what: Name of the operation, for messages.
            members: A list of ranks that is no `ProcessSet` means the same set whenever it has the
                same ranks.

        Raises:
            UsageError: This rank is not one of them, or see `ranks_of`.
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
        """Ends every operation of every set with FaultError(message)."""
        with self._lock:
            self._failure = self._failure or message
            queues = list(self._queues.values())
        for queue in queues:
            queue.fail(message)

    def close(self) -> None:
        """Ends all sets; what is pending fails."""
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

    def _agree(self, what: str, meant: list[Any], problem: str | None) -> None:
        """Raises on every rank if one has a problem or the ranks do not mean the same."""
        answers = self._rank_group.eager.allgather_json(
            f"usbyte.{what}", [problem, meant], tuple[str | None, list[Any]]
        )
        for rank, (found, _) in enumerate(answers):
            if found is not None:
                raise UsageError(f"{what} on rank {rank}: {found}")
        holders: dict[str, list[int]] = {}
        for rank, (_, theirs) in enumerate(answers):
            holders.setdefault(str(theirs), []).append(rank)
        if len(holders) > 1:
            found = "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in holders.items())
            raise MismatchError(
                f"{what}: the ranks disagree about the sets: {found}. Call it on every rank of the "
                "job, members or not, for the same sets in the same order."
            )


def _of_set(number: int | None) -> str:
    return f"process_set.{number}"


def name_of(ranks: Sequence[int]) -> str:
    """Of a set that only its members know, and which so has no number; for keys."""
    if len(ranks) <= _NAMED:
        return f"ranks.{'.'.join(map(str, ranks))}"
    return f"ranks.{hashlib.sha256(json.dumps(list(ranks)).encode()).hexdigest()[:32]}"

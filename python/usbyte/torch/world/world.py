# SPDX-License-Identifier: Apache-2.0
"""`init` and `shutdown`, and the `World`: all ranks of the run and the objects made for them."""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from usbyte import _core
from usbyte._util import files
from usbyte._util.fd_limit import allow_open_files
from usbyte.cluster_env import Cluster, detect
from usbyte.errors import Error, FaultError, UsageError
from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.fault.coordinator import FaultCoordinator
from usbyte.torch.fault.decision import RankProgress, decide_recovery
from usbyte.torch.fault.report import State
from usbyte.torch.runtime import default_group
from usbyte.torch.runtime.format import brief_error
from usbyte.torch.runtime.log_level import set_level
from usbyte.torch.runtime.messages import check
from usbyte.torch.runtime.placement import local_ranks
from usbyte.torch.runtime.process_groups import connect_all
from usbyte.torch.runtime.uncaught_exceptions import UncaughtExceptions
from usbyte.torch.world.orphaned_engines import OrphanedEngines
from usbyte.torch.world.participants import Participants
from usbyte.torch.world.process_sets import ProcessSet, ProcessSets
from usbyte.torch.world.rank_group import OrphanedEngine, Participant, RankGroup
from usbyte.torch.world.step_report import StepReport, make_report

__all__ = ["init", "is_initialized", "shutdown"]

log = logging.getLogger("usbyte")

# The backend's timeout is later than the engine's stall limit, so that the engine's error, which
# has names in it, comes first.
_BACKEND_GRACE_S = 30.0


class World:
    """All ranks of the run, and the objects that `init` makes and `shutdown` ends.

    Implements `RankGroup`. The constructor is collective.

    Attributes:
        rank: This process's rank, 0 <= rank < size.
        size: Number of ranks.
        timeout: Timeout of process groups; 30 s longer than the stall limit of the engine.
        ranks: All ranks: 0, 1, ..., size - 1.
        local_rank: Position among the ranks on this host.
        local_size: Number of ranks on this host.
        machines: Identity of each rank's host; equal for ranks on the same host.
        env: The USBYTE_* settings.
        eager: Eager collectives among all ranks.
        participants: What the optimizers of this run have registered.
        process_sets: Process sets, with eager collectives among some of the ranks.
        subgroups: Subgroups that this rank belongs to, by their ranks.
        orphans: Engines whose optimizers were garbage-collected before all ranks closed them.
        store: torch's key-value store, with keys of this run only.
        report: Writes the page of USBYTE_REPORT; None on ranks that write none.
    """

    def __init__(self, cluster: Cluster, env: _core.Env) -> None:
        self.env = env
        self.timeout = timedelta(seconds=env.stall_limit_s + _BACKEND_GRACE_S)
        if warning := allow_open_files(cluster.size):
            log.warning("rank %d: %s", cluster.rank, warning)
        met = default_group.init_default_group(cluster, env, self.timeout)
        self._local = local_ranks(met.places)
        self.machines = [place.machine for place in met.places]
        self.hosts = [place.host for place in met.places]
        self.store = store = met.store
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ranks = list(range(self.size))
        self.local_rank, self.local_size = self._local[self.rank]
        self.participants = Participants()
        self.orphans = OrphanedEngines()
        self._labels = 0
        self._on_close: list[Callable[[], None]] = []
        self.subgroups: dict[tuple[int, ...], RankGroup] = {}
        self._writer: _core.TimelineWriter | None = None
        self._faults: FaultCoordinator | None = None
        self.report: StepReport | None = None
        # Only for the queue, which moves CPU tensors and closes the process group after a fault.
        group = connect_all(
            partial(dist.new_group, backend="gloo", timeout=self.timeout),
            dist.PrefixStore("connected", store),
            *(self.rank, self.size, timedelta(seconds=env.start_limit_s)),
        )
        self.eager = EagerQueue(
            group,
            dist.PrefixStore("eager", store),
            self.rank,
            self.size,
            stall_limit_s=env.stall_limit_s,
            stall_warning_s=env.stall_warning_s,
            on_fault=self.report_fault,
        )
        self.process_sets = ProcessSets(self, self.eager, self.timeout)
        self._uncaught = UncaughtExceptions(self.rank, self._announce)
        try:
            if self.size > 1:
                self._faults = FaultCoordinator(
                    store, self.rank, self.size, self._describe, self._block_reads, self._on_fault
                )
            if env.timeline:
                self.start_timeline(env.timeline, env.timeline_steps)
            self.report = make_report(env, self.rank, self.size)
        except BaseException as error:
            self._uncaught.tell(error)
            with suppress(Error, RuntimeError):  # errors that follow from `error`
                self.close()
            raise
        self._uncaught.install()

    def places(self) -> list[tuple[int, int]]:
        """Returns (local rank, number of ranks on the host) for each rank. Not collective."""
        return list(self._local)

    def new_group(self) -> dist.ProcessGroup:
        """Makes a process group over all ranks that nothing else uses. Collective."""
        group = self._make_group(None, self.host_backend)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def new_group_of(
        self, ranks: Sequence[int], backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Makes a process group over some ranks. Collective among all ranks.

        Args:
            ranks: Ranks of the run.
            backend: Backend of torch.distributed; default `host_backend`.

        Returns:
            The process group; None on ranks that are not in `ranks`.
        """
        group = self._make_group(list(ranks), backend or self.host_backend)
        return group if isinstance(group, dist.ProcessGroup) else None

    def _make_group(self, ranks: list[int] | None, backend: str) -> object:
        try:
            group = dist.new_group(ranks, backend=backend, timeout=self.timeout)
            if isinstance(group, dist.ProcessGroup):
                # A rank that ended the group now would break connections that others still make.
                dist.barrier(group)
            return group
        except RuntimeError as error:  # names no rank, and another may be the cause
            noticed = f"a process group could not be made: {brief_error(error)}"
            raise FaultError(self.report_fault(noticed)) from error

    @property
    def host_backend(self) -> str:
        """Backend of torch.distributed for tensors on the CPU: USBYTE_BACKEND, or "gloo"."""
        return self.env.backend if self.env.backend not in ("", "nccl") else "gloo"

    def next_label(self) -> str:
        """Returns the next optimizer's name.

        It is the same on all ranks, because they construct optimizers in the same order.
        """
        self._labels += 1
        return f"optimizer.{self._labels}"

    def add(self, participant: Participant) -> None:
        """Registers an optimizer for timelines, faults and shutdown. Keeps a weak reference."""
        self.participants.add(participant)
        participant.set_timeline(self._writer)

    def on_close(self, undo: Callable[[], None]) -> None:
        """Makes `close` call `undo` once, to undo a change outside of usbyte.

        A forked child calls it too.
        """
        if undo not in self._on_close:
            self._on_close.append(undo)

    def adopt_orphan(self, engine: OrphanedEngine) -> None:
        """Takes ownership of an engine until all ranks can close it. Any thread may call this."""
        self.orphans.add(engine)

    def find_orphans(self) -> list[str]:
        """Returns the labels of the engines that are orphaned on this rank, for `close_orphans`."""
        return self.orphans.find(self, collect=bool(self.participants.sending()))

    def close_orphans(self, labels: Sequence[Sequence[str]]) -> None:
        """Closes the engines that are orphaned on all ranks. Collective.

        Args:
            labels: The results of `find_orphans` of all ranks.
        """
        self.orphans.close_common(self, labels)

    def warn(self, text: str) -> None:
        """Logs a warning of the engine, with this rank."""
        log.warning("rank %d: %s", self.rank, text)

    def query_stragglers(self, topic: str, text: str) -> str:
        """Returns a warning with the ranks that are behind added, for the first rank that asks."""
        more = self._faults.query_stragglers(topic) if self._faults else ""
        return f"{text}: {more}" if more else text

    def check(self) -> None:
        """Raises FaultError if there was a fault."""
        if self._faults is not None and (verdict := self._faults.verdict) is not None:
            raise FaultError(verdict)

    def report_fault(self, noticed: str) -> str:
        """Diagnoses a fault with the other ranks; returns the fault verdict that all ranks raise.

        With a single rank, the verdict is `noticed`.
        """
        return self._faults.report(noticed) if self._faults else noticed

    def drain(self) -> None:
        """Applies the pending updates of all optimizers."""
        for participant in self.participants:
            participant.drain()

    def start_timeline(self, path: str, steps: str = "0:") -> None:
        """Starts recording a timeline of all optimizers.

        Args:
            path: File to write. "%r" is replaced by the rank; without it only rank 0 records.
            steps: Range "A:B" of the steps to record, half-open; default "0:" for all.
        """
        if self.rank > 0 and "%r" not in path:  # two ranks must not write one file
            log.info("rank %d: no timeline here, as '%s' has no %%r", self.rank, path)
            self.stop_timeline()
            return
        if self.size == 1:
            log.warning("one rank sends nothing, so '%s' stays empty: start two or more", path)
        self._writer = _core.TimelineWriter(path.replace("%r", str(self.rank)), self.rank, steps)
        for participant in self.participants:
            participant.set_timeline(self._writer)

    def stop_timeline(self) -> None:
        """Writes the completed part of the timeline and stops recording."""
        self._writer = None
        for participant in self.participants:
            participant.set_timeline(None)
        for engine in self.orphans:
            engine.stop_timeline()

    def close(self) -> None:
        """Applies pending updates and ends every thread. After a fault, only ends the threads.

        All steps of the shutdown run, even if some fail. Then the first error is raised, an
        interrupt before others.
        """
        self._uncaught.restore()
        errors: list[BaseException] = []
        for end in self._shutdown_steps():
            try:
                end()
            except BaseException as error:  # also an interrupt: later steps end threads
                errors.append(error)
        if errors:
            raise next((e for e in errors if not isinstance(e, Exception)), errors[0])

    def _shutdown_steps(self) -> Iterator[Callable[[], None]]:
        """Yields the steps of `close`, in order."""
        if self._faults is not None:
            yield self._faults.announce_exit
        for participant in self.participants.in_order():  # communicators close on all ranks at once
            yield partial(participant.close, whole_state=False)
        for engine in sorted(self.orphans, key=lambda engine: engine.label):
            if self._faults is not None and (verdict := self._faults.verdict) is not None:
                engine.fail(verdict)  # the fault may be older than its entry here
            yield engine.close
        if self.report is not None:
            yield self.report.close
        for subgroup in self.subgroups.values():
            yield subgroup.close
        yield self.process_sets.close
        yield self.eager.close
        if self._faults is not None:
            yield self._faults.close
        yield from self._on_close

    def orphan(self) -> list[Any]:
        """In a forked child: returns all objects whose threads do not exist there."""
        return [self, *self.participants.orphan(), *self.orphans, *self.subgroups.values()]

    def _describe(self) -> State:
        found = self.participants.states()
        for engine in self.orphans:
            with suppress(UsageError):
                found[engine.label] = engine.status()
        return {"optimizers": found, "eager": self.eager.pending()}

    def _block_reads(self, verdict: str) -> None:
        """Blocks reads of parameters before the fault verdict becomes visible.

        No code can therefore notice the fault and still read parameters unchecked.
        """
        for participant in self.participants:
            participant.block_reads(verdict)

    def _on_fault(self, verdict: str) -> None:
        participants = list(self.participants)
        everyone = None
        leaving: dict[str, RankProgress] = {}
        try:
            state = self._describe()
            for participant in participants:
                with suppress(UsageError):  # the optimizer may be closing
                    participant.fail(verdict)
            for engine in self.orphans:
                engine.fail(verdict)
            self.eager.fail(verdict)
            self.process_sets.fail(verdict)
            for subgroup in list(self.subgroups.values()):
                subgroup.eager.fail(verdict)
            self._record_flight(verdict, state)
            assert self._faults is not None
            mine = {
                each.label: progress
                for each in participants
                if (progress := each.progress()) is not None
            }
            if self._faults.leaving:
                leaving = mine
            rows = {label: asdict(progress) for label, progress in mine.items()}
            if (found := self._faults.compare(rows)) is not None:
                everyone = {
                    rank: check(row, dict[str, RankProgress]) for rank, row in found.items()
                }
        except Exception:  # blocked reads need the decision below
            log.exception("the state of the ranks after the fault is unknown")
        for participant in participants:
            progress_of = everyone and {
                rank: theirs[participant.label]
                for rank, theirs in everyone.items()
                if participant.label in theirs
            }
            decision = decide_recovery(self.rank, progress_of, leaving.get(participant.label))
            participant.apply_decision(verdict, decision)

    def _record_flight(self, verdict: str, state: State) -> None:
        if not self.env.flight:
            return
        path = self.env.flight.replace("%r", str(self.rank))
        try:
            text = json.dumps({"rank": self.rank, "verdict": verdict, **state})
            files.write_bytes(Path(path), text.encode())
        except OSError as error:
            log.warning("rank %d: the last operations could not be written: %s", self.rank, error)

    def _announce(self, verdict: str) -> None:
        # Without this, the other ranks would wait for this one until the stall limit.
        if self._faults is not None:
            self._faults.announce(verdict)


_current: World | None = None


def init(
    comm: None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | Literal["dynamic"] | None = None,
) -> None:
    """Connects this process to the other ranks. Collective; further calls do nothing.

    Uses the default process group of torch.distributed if it is initialised. Otherwise it makes one
    from RANK, WORLD_SIZE and MASTER_*, or from the variables of Slurm, Open MPI or PMI. If none of
    these is set, the job is a single process. usbyte's traffic uses separate process groups.

    Args:
        comm: Horovod's; must be None.
        process_sets: Process sets to add at once, the same on every rank; default none. "dynamic"
            adds none: sets can always be added later, for which Horovod needs that value.

    Raises:
        EnvError: A variable has an unusable value; the message names it.
        UsageError: An argument cannot be used on some rank, usbyte is initialised already and
            `process_sets` is not empty, or the ranks have not met within `USBYTE_START_LIMIT_S`.
            This call has initialised nothing then.
        MismatchError: The ranks pass different process sets; nothing is initialised then.
        FaultError: Another rank has ended, or this one cannot make connections or threads.
    """
    global _current
    if comm is not None:
        raise UsageError(
            "init(comm=...) is not for usbyte, which takes the ranks that the launcher has "
            "started: leave it out, and list ranks in process_sets=[...] for a part of them"
        )
    added = [] if process_sets is None or process_sets == "dynamic" else list(process_sets)
    if _current is not None:
        if added:
            raise UsageError("usbyte is initialised already: use add_process_set for each set")
        return
    env = _core.Env.read()
    set_level(env)
    cluster = detect()
    try:
        _current = World(cluster, env)
    except (Error, NotImplementedError, RecursionError):
        raise
    except RuntimeError as error:  # torch's, which names no rank
        rank, size = cluster.rank, cluster.size
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        raise FaultError(
            f"init() on rank {rank} of {size} has failed: {brief_error(error)}. Where that is "
            "about the network, another rank may have ended meanwhile (see what each has said), or "
            "this one uses a wrong interface (GLOO_SOCKET_IFNAME)"
        ) from error
    try:
        if added:
            _current.process_sets.add(*added)
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Applies pending updates and ends usbyte's threads.

    It runs automatically at interpreter exit. A default process group that `init` made stays until
    the interpreter exits. A later `init` uses it to meet the other ranks, even those that are still
    shutting down.
    """
    global _current
    if _current is not None:
        context, _current = _current, None
        context.close()


def _before_fork() -> None:
    """Applies pending updates, because a forked child has no threads to wait for."""
    if _current is not None:
        with suppress(Error):  # after a fault, later reads of parameters raise it
            _current.drain()


def _after_fork_in_child() -> None:
    global _current
    if _current is not None:
        context, _current = _current, None
        context._uncaught.restore()
        for undo in context._on_close:
            undo()
        for each in [
            *context.orphan(),
            default_group.detach_after_fork(),
        ]:  # never destroyed: their destructors would join threads that do not exist here
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


@atexit.register
def _shutdown_at_exit() -> None:
    try:
        shutdown()
    except BaseException:
        # The last updates are lost. atexit has no other way to set the exit code.
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    default_group.destroy_default_group()


def is_initialized() -> bool:
    """Returns True between `init` and `shutdown`."""
    return _current is not None


def current() -> World:
    """Returns the world of this run.

    Raises:
        UsageError: `init` has not been called.
    """
    if _current is None:
        raise UsageError("usbyte is not initialised: call usbyte.torch.init() first")
    return _current

# SPDX-License-Identifier: Apache-2.0
"""The process's place among the ranks: init, shutdown, and what they own."""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import sys
import threading
import traceback
import weakref
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
from usbyte.torch.world.process_sets import ProcessSet, ProcessSets
from usbyte.torch.world.rank_group import OrphanedEngine, Participant, RankGroup

__all__ = ["init", "is_initialized", "shutdown"]

log = logging.getLogger("usbyte")

# The backend's own timeout comes after the engine's stall limit, so that the error with names in it
# comes first.
_BACKEND_GRACE_S = 30.0


class World:
    """What `init` makes and `shutdown` ends.

    Attributes:
        rank: 0 <= rank < size.
        size: Number of ranks.
        timeout: Of process groups, later than the stall limit of usbyte itself.
        ranks: What they are called in the whole job.
        local_rank: Position among the ranks on this host.
        local_size: Ranks on this host.
        machines: By rank; equal where ranks share one.
        env: The USBYTE_* knobs.
        eager: Collectives outside the plan.
        process_sets: The same among some of the ranks.
        subgroups: By ranks, those that share gradients among themselves, this rank among them.
        orphans: Engines that are to be closed with the other ranks.
        store: Keys of this run, which its ranks share.
    """

    def __init__(self, cluster: Cluster, env: _core.Env) -> None:
        self.env = env
        self.timeout = timedelta(seconds=env.stall_limit_s + _BACKEND_GRACE_S)
        if warning := allow_open_files(cluster.size):
            log.warning("rank %d: %s", cluster.rank, warning)
        met = default_group.init_default_group(cluster, env, self.timeout)
        self._local = local_ranks(met.places)
        self.machines = [place.machine for place in met.places]
        self.store = store = met.store
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ranks = list(range(self.size))
        self.local_rank, self.local_size = self._local[self.rank]
        self._optimizers: weakref.WeakSet[Participant] = weakref.WeakSet()
        self._adding = threading.RLock()  # a set must not grow while another thread goes through it
        self.orphans = OrphanedEngines()
        self._labels = 0
        self._on_close: list[Callable[[], None]] = []
        self.subgroups: dict[tuple[int, ...], RankGroup] = {}
        self._writer: _core.TimelineWriter | None = None
        self._faults: FaultCoordinator | None = None
        # The queue moves CPU tensors and closes the group after a fault, so nobody else has it.
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
                    store, self.rank, self.size, self._describe, self._hold, self._on_fault
                )
            if env.timeline:
                self.start_timeline(env.timeline, env.timeline_steps)
        except BaseException as error:
            self._uncaught.tell(error)
            with suppress(Error, RuntimeError):  # of what is broken already
                self.close()
            raise
        self._uncaught.install()

    def places(self) -> list[tuple[int, int]]:
        """By rank, its local rank and the ranks on its host. Not collective."""
        return list(self._local)

    def new_group(self) -> dist.ProcessGroup:
        """A process group over all ranks that nothing else uses. Collective."""
        group = self._make_group(None, self.host_backend)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def new_group_of(
        self, ranks: Sequence[int], backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """A group over some ranks, for those; None for the others. Collective, on all ranks.

        Args:
            ranks: Of the run.
            backend: That of gradients on the CPU if left out.
        """
        group = self._make_group(list(ranks), backend or self.host_backend)
        return group if isinstance(group, dist.ProcessGroup) else None

    def _make_group(self, ranks: list[int] | None, backend: str) -> object:
        try:
            return dist.new_group(ranks, backend=backend, timeout=self.timeout)
        except RuntimeError as error:  # which may be that of another rank, and names none
            noticed = f"a process group could not be made: {brief_error(error)}"
            raise FaultError(self.report_fault(noticed)) from error

    @property
    def host_backend(self) -> str:
        """Of torch.distributed, for tensors on the CPU."""
        return self.env.backend if self.env.backend not in ("", "nccl") else "gloo"

    def next_label(self) -> str:
        """Name of the next optimizer; the same on all ranks, which construct them in one order."""
        self._labels += 1
        return f"optimizer.{self._labels}"

    def add(self, optimizer: Participant) -> None:
        """Lets the optimizer take part in timelines, faults and shutdown."""
        with self._adding:
            self._optimizers.add(optimizer)
        optimizer.set_timeline(self._writer)

    def on_close(self, undo: Callable[[], None]) -> None:
        """Has `close` call this, once: what was changed outside of usbyte is undone there."""
        if undo not in self._on_close:
            self._on_close.append(undo)

    def adopt_orphan(self, engine: OrphanedEngine) -> None:
        """Takes over an engine that all ranks still have to close; any thread may call this."""
        self.orphans.add(engine)

    def close_orphans(self) -> None:
        """Closes the engines that are orphaned on all ranks. Collective."""
        self.orphans.close_common(self, collect=bool(self.active_optimizers()))

    def active_optimizers(self) -> list[Participant]:
        """Optimizers whose gradients, or parameters, go to other ranks."""
        return [o for o in self._live_optimizers() if o.sends]

    def warn(self, text: str) -> None:
        """Logs a warning of the engine."""
        log.warning("rank %d: %s", self.rank, text)

    def query_stragglers(self, topic: str, text: str) -> str:
        """Adds to a warning which ranks are behind, where this rank is the first to ask."""
        more = self._faults.query_stragglers(topic) if self._faults else ""
        return f"{text}: {more}" if more else text

    def check(self) -> None:
        """Raises FaultError after a fault."""
        if self._faults is not None and (verdict := self._faults.verdict) is not None:
            raise FaultError(verdict)

    def report_fault(self, noticed: str) -> str:
        """Asks the other ranks what happened; returns what every rank is going to raise."""
        return self._faults.report(noticed) if self._faults else noticed

    def drain(self) -> None:
        """Applies every pending update."""
        for optimizer in self._live_optimizers():
            optimizer.drain()

    def start_timeline(self, path: str, steps: str = "0:") -> None:
        """Records all optimizers' steps "A:B" into `path`; see `basics.start_timeline`."""
        if self.rank > 0 and "%r" not in path:  # two ranks must not write one file
            log.info("rank %d: no timeline here, as '%s' has no %%r", self.rank, path)
            self.stop_timeline()
            return
        self._writer = _core.TimelineWriter(path.replace("%r", str(self.rank)), self.rank, steps)
        for optimizer in self._live_optimizers():
            optimizer.set_timeline(self._writer)

    def stop_timeline(self) -> None:
        """Writes out what is complete and stops recording."""
        self._writer = None
        for optimizer in self._live_optimizers():
            optimizer.set_timeline(None)
        for engine in self.orphans:
            engine.stop_timeline()

    def close(self) -> None:
        """Applies pending updates and ends every thread; after a fault only the latter."""
        self._uncaught.restore()
        errors: list[BaseException] = []
        for end in self._shutdown_steps():
            try:
                end()
            except BaseException as error:  # an interrupt too: what is left has threads
                errors.append(error)
        if errors:
            raise next((e for e in errors if not isinstance(e, Exception)), errors[0])

    def _shutdown_steps(self) -> Iterator[Callable[[], None]]:
        """What `close` consists of."""
        if self._faults is not None:
            yield self._faults.announce_exit
        for optimizer in self._in_order():  # as communicators may end together only
            yield partial(optimizer.close, whole_state=False)
        for engine in sorted(self.orphans, key=lambda engine: engine.label):
            if self._faults is not None and (verdict := self._faults.verdict) is not None:
                engine.fail(verdict)  # which may have come when nobody knew of it
            yield engine.close
        for subgroup in self.subgroups.values():
            yield subgroup.close
        yield self.process_sets.close
        yield self.eager.close
        if self._faults is not None:
            yield self._faults.close
        yield from self._on_close

    def orphan(self) -> list[Any]:
        """In a process that was forked: everything that has threads, which are not here."""
        # Without the lock, which a thread may have held that is not here.
        optimizers = [each for o in list(self._optimizers) for each in o.orphan()]
        return [self, *optimizers, *self.orphans, *self.subgroups.values()]

    def _live_optimizers(self) -> list[Participant]:
        with self._adding:
            return list(self._optimizers)

    def _in_order(self) -> list[Participant]:
        """Those that there are, in an order that is the same on all ranks."""
        return sorted(self._live_optimizers(), key=lambda optimizer: optimizer.label)

    def _describe(self) -> State:
        found: dict[str, dict[str, Any]] = {}
        for optimizer in self._in_order():
            found[optimizer.label] = {}
            with suppress(UsageError):  # of one that is being closed
                found |= optimizer.states()
        for engine in self.orphans:
            with suppress(UsageError):
                found[engine.label] = engine.status()
        return {"optimizers": found, "eager": self.eager.pending()}

    def _hold(self, verdict: str) -> None:
        """Nobody gets to know of a fault and then reads parameters as if there were none."""
        for optimizer in self._live_optimizers():
            optimizer.hold(verdict)

    def _on_fault(self, verdict: str) -> None:
        optimizers = self._live_optimizers()
        everyone = None
        try:
            state = self._describe()
            for optimizer in optimizers:
                with suppress(UsageError):  # one that is being closed
                    optimizer.fail(verdict)
            for engine in self.orphans:
                engine.fail(verdict)
            self.eager.fail(verdict)
            self.process_sets.fail(verdict)
            for subgroup in list(self.subgroups.values()):
                subgroup.eager.fail(verdict)
            self._record_flight(verdict, state)
            assert self._faults is not None
            mine = {o.label: asdict(left) for o in optimizers if (left := o.left()) is not None}
            if (found := self._faults.compare(mine)) is not None:
                everyone = {
                    rank: check(row, dict[str, RankProgress]) for rank, row in found.items()
                }
        except Exception:  # readers of parameters wait for what is decided below
            log.exception("what the fault has left cannot be found out")
        for optimizer in optimizers:
            lefts = everyone and {
                rank: theirs[optimizer.label]
                for rank, theirs in everyone.items()
                if optimizer.label in theirs
            }
            optimizer.settle_fault(verdict, decide_recovery(self.rank, lefts))

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
        # The others would wait for this rank until the stall limit.
        if self._faults is not None:
            self._faults.announce(verdict)


_current: World | None = None


def init(
    comm: None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | Literal["dynamic"] | None = None,
) -> None:
    """Joins the other ranks. Collective; calling it again does nothing.

    Uses the default process group of torch.distributed if there is one, and makes one otherwise,
    from RANK, WORLD_SIZE and MASTER_*, from SLURM's, Open MPI's or PMI's variables, or for a single
    process if none is set. usbyte's own traffic runs on groups of its own.

    Args:
        comm: Horovod's; must be None.
        process_sets: Sets to add at once, the same on every rank. "dynamic", which Horovod needs
            for adding sets later, is always so here.

    Raises:
        EnvError: A variable has an unusable value; the message names it.
        UsageError: An argument cannot be used on some rank, or the ranks have not met within
            `USBYTE_START_LIMIT_S`; nothing is initialised then.
        MismatchError: The ranks name different process sets; nothing is initialised then.
        FaultError: A rank has ended meanwhile, or this one can make no connections or threads.
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
    """Applies pending updates and ends usbyte's threads. Interpreter exit calls it by itself.

    A default process group that `init` made stays until the interpreter ends: another `init` meets
    the other ranks in it, even those that are still shutting down.
    """
    global _current
    if _current is not None:
        context, _current = _current, None
        context.close()


def _before_fork() -> None:
    """Nothing is to be waited for in a process that has none of this one's threads."""
    if _current is not None:
        with suppress(Error):  # who reads parameters after a fault gets it
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
        ]:  # or threads would be joined
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


@atexit.register
def _shutdown_at_exit() -> None:
    try:
        shutdown()
    except BaseException:
        # The last updates are lost, and atexit has no other way to let the exit code say so.
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    default_group.destroy_default_group()


def is_initialized() -> bool:
    """True between `init` and `shutdown`."""
    return _current is not None


def current() -> World:
    """The running context.

    Raises:
        UsageError: `init` has not been called.
    """
    if _current is None:
        raise UsageError("usbyte is not initialised: call usbyte.torch.init() first")
    return _current

# SPDX-License-Identifier: Apache-2.0
"""The engine's communicator over any torch.distributed backend."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch
import torch.distributed as dist

from usbyte import _core
from usbyte.torch.comm.base import MeshLike
from usbyte.torch.comm.direct_allreduce import DirectAllReduce
from usbyte.torch.comm.pack_buffers import PackBufferPool, PackedMessage
from usbyte.torch.runtime.device import Device
from usbyte.torch.runtime.format import brief_error
from usbyte.torch.runtime.process_groups import destroy_group
from usbyte.torch.runtime.ring import (
    abort,
    all_gather_ranges,
    exchange_chunks,
    ring_reduce_scatter,
)

_WAITERS = 4  # threads that wait for ops to end, and go through the steps of some
_SHOT_WAITERS = 2  # as one may be launching, and packing, what comes next
_ABORT_S = 5.0  # how long what was aborted may take to end
_TAGS = 0x20000000  # tickets are counted modulo that where they tell messages apart


class TorchCommunicator:
    """Starts the engine's collectives on a process group.

    The engine calls `_launch` with the GIL held, from its own thread or from a waiter that reports
    an op's end, one at a time and in plan order, so every rank uses the group in one order. The
    waiters take what was launched in the same order, so the oldest op is always being looked after;
    two of them have those of one shot to themselves. Completion is not taken from the backend's
    futures: their callbacks would run Python code on the backend's threads, which cannot be joined
    before the interpreter ends.

    Args:
        group: A process group that nothing else uses.
        small: Another one, for small all_reduces.
        most_one_shot_bytes: Payload of the largest that goes there, in one shot.

    Attributes:
        most_one_shot_bytes: As given.
        device: The host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        small: dist.ProcessGroup | None = None,
        direct_allreduce_max_bytes: int = 0,
    ) -> None:
        self._group = group
        self._one_shot = DirectAllReduce(small) if small is not None else None
        self.direct_allreduce_max_bytes = direct_allreduce_max_bytes
        self.device = Device()
        self._rank, self._size = group.rank(), group.size()
        self._flat_buffer: torch.Tensor | None = None
        self._views: dict[tuple[int, int, str], torch.Tensor] = {}
        self._staging = PackBufferPool()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._shots: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._in_flight: set[int] = set()  # tickets
        self._served = [self._tasks] * _WAITERS + [self._shots] * _SHOT_WAITERS
        self._waiters = [
            threading.Thread(target=_serve, args=(tasks,), name="usbyte-waiter", daemon=True)
            for tasks in self._served
        ]
        for waiter in self._waiters:
            waiter.start()
        # A plain bound method would be a reference cycle through C++, which Python's collector
        # cannot see.
        launch = weakref.WeakMethod(self._launch)

        def call(ticket: int, kind: str, dtype: str, spans: list[tuple[int, int]]) -> None:
            method = launch()
            if method is None:
                raise RuntimeError("the communicator is gone")
            method(ticket, kind, dtype, spans)

        self.core = _core.PythonCommunicator(self._rank, self._size, call)

    @property
    def mesh(self) -> MeshLike | None:
        """None: operations go between all ranks at once."""
        return None

    def allocate(self, size: int) -> torch.Tensor:
        """Memory of so many bytes for an arena, 1-d uint8, zeros."""
        return torch.zeros(size, dtype=torch.uint8, device="cpu")

    def register(self, arena: torch.Tensor) -> None:
        """Names the buffer (1-d uint8) of an engine to come; addresses may point into it."""
        self._flat_buffer = arena
        self._views.clear()
        self._staging = PackBufferPool()  # as large as the ops need that follow

    def close(self) -> None:
        """Ends the waiters; what is still in flight, after a fault, is aborted."""
        if self._closed:
            return
        self._closed = True
        groups = [self._group] if self._one_shot is None else [self._group, self._one_shot.group]
        faulty = bool(self._in_flight)
        for group in groups:
            if faulty and dist.is_initialized():
                abort(group)
        for tasks in self._served:
            tasks.put(None)
        deadline = time.monotonic() + _ABORT_S
        for waiter in self._waiters:
            waiter.join(max(0.0, deadline - time.monotonic()) if faulty else None)
        if any(waiter.is_alive() for waiter in self._waiters):
            return  # they may still be inside the groups, which stay; see `abort`
        for group in groups:
            destroy_group(group)
        # After a fault this may be kept for long, with the parameters that nobody may read.
        del groups, self._group, self._one_shot

    def __del__(self) -> None:
        self.close()

    def _view(self, address: int, count: int, dtype: str) -> torch.Tensor:
        key = (address, count, dtype)
        view = self._views.get(key)
        if view is None:
            kind: torch.dtype = getattr(torch, dtype)
            size = count * kind.itemsize
            begin = -1 if self._flat_buffer is None else address - self._flat_buffer.data_ptr()
            if self._flat_buffer is not None and 0 <= begin <= len(self._flat_buffer) - size:
                view = self._flat_buffer[begin : begin + size].view(kind)
            else:  # the engine's own memory, which outlives what is in flight
                memory = (ctypes.c_byte * size).from_address(address)
                view = torch.frombuffer(memory, dtype=kind)
            self._views[key] = view
        return view

    def _launch(self, ticket: int, kind: str, dtype: str, spans: list[tuple[int, int]]) -> None:
        self._in_flight.add(ticket)
        views = [self._view(address, count, dtype) for address, count in spans]
        small = sum(view.nbytes for view in views) <= self.direct_allreduce_max_bytes
        if small and kind == "all_reduce" and self._one_shot is not None:
            shot = self._one_shot.start(ticket % _TAGS, views)
            self._shots.put(partial(self._finish, ticket, partial(self._one_shot.finish, shot)))
        elif kind == "all_reduce":
            staged = None if len(views) == 1 else self._staging.pack(views)
            tensor = views[0] if staged is None else staged.message
            work = self._group.allreduce([tensor], dist.AllreduceOptions())
            self._tasks.put(partial(self._finish, ticket, partial(self._settle, work, staged)))
        else:
            steps = partial(self._step_by_step, ticket, kind, views)
            self._tasks.put(partial(self._finish, ticket, steps))

    def _settle(self, work: dist.Work, staged: PackedMessage | None) -> None:
        work.wait()
        if staged is not None:
            self._staging.unpack(staged)

    def _step_by_step(self, ticket: int, kind: str, views: list[torch.Tensor]) -> None:
        for i, view in enumerate(views):
            bounds = shards(view.numel(), self._size)
            # Tickets count up alike on every rank; the tag keeps what is in flight at once apart.
            tag = (ticket * 1024 + i) % _TAGS
            if kind == "all_to_all":
                exchange_chunks(view, self._group, tag)
            elif kind == "reduce_scatter":
                ring_reduce_scatter(view, bounds, self._group, dist.ReduceOp.SUM, tag)
            else:
                all_gather_ranges(view, bounds, self._group, tag)

    def _finish(self, ticket: int, wait: Callable[[], None]) -> None:
        error = None
        try:
            wait()
        except Exception as e:
            error = brief_error(e)
        self._in_flight.discard(ticket)
        self.core.complete(ticket, error)


def _serve(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    with torch.no_grad():
        while (task := tasks.get()) is not None:
            task()
            del task  # and what it refers to, while this waits for the next one


def shards(numel: int, size: int) -> list[tuple[int, int]]:
    """Ranges of elements that the ranks own between a reduce_scatter and its all_gather.

    The same rule as `usbyte::shard`: ceil(numel / size) elements each, the last ones shorter or
    empty.
    """
    chunk = -(-numel // size)
    return [(min(r * chunk, numel), min((r + 1) * chunk, numel)) for r in range(size)]

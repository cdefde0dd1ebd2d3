# SPDX-License-Identifier: Apache-2.0
"""The engine's communicator over any torch.distributed backend."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable
from functools import partial

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
from usbyte.torch.runtime.worker_thread import WorkerThread

_WAITERS = 4  # threads that wait for ops, or run the rounds of reduce_scatter and the like
_SHOT_WAITERS = 2  # two, because one may be launching and packing the next ops
_ABORT_S = 5.0  # timeout for aborted ops to end
_TAGS = 0x20000000  # tags are tickets modulo this number


class TorchCommunicator:
    """Runs the engine's collectives on process groups of torch.distributed, with CPU tensors.

    The engine calls `_launch` with the GIL held, one call at a time and in plan order. So all ranks
    use the process group in the same order. The calling thread is the engine's, or a waiter thread
    that reports the end of an op.

    Waiter threads take the launched ops in the same order, so the oldest op is always waited for.
    Two of the threads serve only direct all-reduces. Completion does not use the backend's futures:
    their callbacks would run Python code on the backend's threads, which cannot be joined before
    the interpreter ends.

    Args:
        group: A process group that nothing else uses. Owned: `close` destroys it.
        small: Another process group, for direct all-reduces; owned. Default None for no direct
            all-reduces.
        direct_allreduce_max_bytes: Largest payload of a direct all-reduce, in bytes; default 0.

    Attributes:
        direct_allreduce_max_bytes: Largest payload of a direct all-reduce, in bytes.
        device: The CPU.
        core: The C++ communicator that the engine calls.
    """

    _closed = True  # until the threads have started

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
        self._in_flight: set[int] = set()  # tickets of launched ops
        self._tasks = WorkerThread("usbyte-waiter", _WAITERS)
        self._shots = WorkerThread("usbyte-waiter", _SHOT_WAITERS)
        self._closed = False
        # A bound method would make a reference cycle through C++, which Python's garbage collector
        # cannot find.
        launch = weakref.WeakMethod(self._launch)

        def call(ticket: int, kind: str, dtype: str, spans: list[tuple[int, int]]) -> None:
            method = launch()
            if method is None:
                raise RuntimeError("the communicator is gone")
            method(ticket, kind, dtype, spans)

        self.core = _core.PythonCommunicator(self._rank, self._size, call)

    @property
    def mesh(self) -> MeshLike | None:
        """None: every op runs between all ranks of this communicator."""
        return None

    def allocate(self, size: int) -> torch.Tensor:
        """Allocates a flat buffer of `size` bytes on the CPU: shape [size], uint8, zeros."""
        return torch.zeros(size, dtype=torch.uint8, device="cpu")

    def register(self, flat_buffer: torch.Tensor) -> None:
        """Sets the flat buffer (1-d, uint8) of the next engine. Requests may point into it."""
        self._flat_buffer = flat_buffer
        self._views.clear()
        self._staging = PackBufferPool()  # drops buffers of the old plan's sizes

    def close(self) -> None:
        """Ends the waiter threads and destroys the process groups. Aborts ops in flight first.

        After a fault, it waits at most a few seconds for the aborted ops. The process groups are
        not destroyed while a waiter thread may still be inside them.
        """
        if self._closed:
            return
        self._closed = True
        groups = [self._group] if self._one_shot is None else [self._group, self._one_shot.group]
        faulty = bool(self._in_flight)
        for group in groups:
            if faulty and dist.is_initialized():
                abort(group)
        workers = (self._tasks, self._shots)
        for worker in workers:
            worker.end()
        deadline = time.monotonic() + _ABORT_S
        if not all(
            [worker.join(deadline - time.monotonic() if faulty else None) for worker in workers]
        ):
            return  # threads may still be inside the groups, which therefore stay
        for group in groups:
            destroy_group(group)
        # After a fault this object may live on with the parameters, whose reads are refused.
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
            else:  # memory of the engine, which outlives the ops in flight
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
            whole = (0, view.numel())
            bounds = [_core.shard(whole, rank, self._size) for rank in range(self._size)]
            # Tickets are equal on all ranks. Tags must differ between messages in flight.
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

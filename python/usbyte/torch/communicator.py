"""The engine's communicator over any torch.distributed backend."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from usbyte import _core
from usbyte.torch.collectives import all_gather_ranges, ring_reduce_scatter

_RING_THREADS = 4  # rings in flight at once; a ring is a sequence of blocking steps


class TorchCommunicator:
    """Starts the engine's collectives on a process group.

    The engine's thread calls `_launch` with the GIL held, in plan order, so every rank uses the group in one order.
    All-reduces complete through the backend's own futures; reduce_scatter and all_gather run as rings on threads.

    Args:
        group: A process group that nothing else uses.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._views: dict[tuple[int, int, str], torch.Tensor] = {}
        self._rings: ThreadPoolExecutor | None = None
        # A plain bound method would be a reference cycle through C++, which Python's collector cannot see.
        launch = weakref.WeakMethod(self._launch)

        def call(ticket: int, kind: str, dtype: str, spans: list[tuple[int, int]]) -> None:
            method = launch()
            if method is None:
                raise RuntimeError("the communicator is gone")
            method(ticket, kind, dtype, spans)

        self.core = _core.PythonCommunicator(self._rank, self._size, call)

    def register(self, arena: torch.Tensor) -> None:
        """Names the buffer (1-d uint8) that the addresses in later launches point into."""
        self._arena = arena
        self._views.clear()

    def close(self) -> None:
        """Ends the ring threads."""
        if self._rings is not None:
            self._rings.shutdown(wait=False, cancel_futures=True)

    def _view(self, address: int, count: int, dtype: str) -> torch.Tensor:
        key = (address, count, dtype)
        view = self._views.get(key)
        if view is None:
            kind: torch.dtype = getattr(torch, dtype)
            begin = address - self._arena.data_ptr()
            view = self._arena[begin : begin + count * kind.itemsize].view(kind)
            self._views[key] = view
        return view

    def _launch(self, ticket: int, kind: str, dtype: str, spans: list[tuple[int, int]]) -> None:
        views = [self._view(address, count, dtype) for address, count in spans]
        if kind != "all_reduce":
            if self._rings is None:
                self._rings = ThreadPoolExecutor(_RING_THREADS, thread_name_prefix="usbyte-ring")
            self._rings.submit(self._ring, ticket, kind, views)
        elif len(views) == 1:
            self._reduce(ticket, views[0])
        else:
            staged = torch.cat(views)
            self._reduce(ticket, staged, views)

    def _reduce(
        self, ticket: int, tensor: torch.Tensor, targets: list[torch.Tensor] | None = None
    ) -> None:
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        work.get_future().add_done_callback(partial(self._done, ticket, tensor, targets))

    def _done(
        self,
        ticket: int,
        tensor: torch.Tensor,
        targets: list[torch.Tensor] | None,
        future: torch.futures.Future[list[torch.Tensor]],
    ) -> None:
        error = None
        try:
            future.value()
            if targets is not None:
                for target, part in zip(
                    targets, tensor.split([t.numel() for t in targets]), strict=True
                ):
                    target.copy_(part)
        except RuntimeError as e:
            error = str(e)
        self.core.complete(ticket, error)

    def _ring(self, ticket: int, kind: str, views: list[torch.Tensor]) -> None:
        error = None
        try:
            for i, view in enumerate(views):
                bounds = shards(view.numel(), self._size)
                # Tickets count up alike on every rank; the tag keeps concurrent rings apart.
                tag = (ticket * 1024 + i) & 0x3FFFFFFF
                if kind == "reduce_scatter":
                    ring_reduce_scatter(view, bounds, self._group, dist.ReduceOp.SUM, tag)
                else:
                    all_gather_ranges(view, bounds, self._group, tag)
        except Exception as e:
            error = str(e)
        self.core.complete(ticket, error)


def shards(numel: int, size: int) -> list[tuple[int, int]]:
    """Ranges of elements that the ranks own between a reduce_scatter and its all_gather.

    The same rule as `usbyte::shard`: ceil(numel / size) elements each, the last ones shorter or empty.
    """
    chunk = -(-numel // size)
    return [(min(r * chunk, numel), min((r + 1) * chunk, numel)) for r in range(size)]

# SPDX-License-Identifier: Apache-2.0
"""The exchange: point-to-point messages of sparse schemes, over any torch.distributed backend."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from usbyte import _core
from usbyte.torch.runtime.format import brief_error
from usbyte.torch.runtime.process_groups import destroy_group
from usbyte.torch.runtime.ring import abort

_TAG = 0x3FFFFFFE  # unlikely to be used by other messages of the group

Leg = tuple[int, memoryview, memoryview]  # peer, what to send and where to receive


class TorchExchange:
    """Sends the messages of sparse schemes, whose sizes depend on the gradients.

    Args:
        group: A process group that supports CPU tensors and tags. Owned: `close` destroys it.

    Attributes:
        core: The C++ exchange that the engine calls.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # Bound methods would make a reference cycle through C++, which Python's garbage collector
        # cannot find.
        this = weakref.ref(self)

        def transfer(legs: list[Leg]) -> str | None:
            exchange = this()
            return exchange._transfer(legs) if exchange else "the exchange is gone"

        def abort_all() -> None:
            if this() is not None and dist.is_initialized():
                abort(group)

        self.core = _core.PythonExchange(group.rank(), group.size(), transfer, abort_all)

    def close(self) -> None:
        """Destroys the process group. Call it when no message is in flight."""
        destroy_group(self._group)

    def _transfer(self, legs: list[Leg]) -> str | None:
        """Sends and receives the messages of one transfer.

        Returns:
            The error message; None on success.
        """
        try:
            with torch.no_grad():
                coming = [
                    self._group.recv([_tensor(memory)], peer, _TAG)
                    for peer, _, memory in legs
                    if memory
                ]
                # One send at a time: each rank has its peers in a different order, so each link
                # carries at most one message at a time.
                for peer, memory, _ in legs:
                    if memory:
                        self._group.send([_tensor(memory)], peer, _TAG).wait()
                for work in coming:
                    work.wait()
        except RuntimeError as error:
            return brief_error(error)
        return None


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a process group of the same ranks that supports CPU tensors. Collective.

    Returns `group` itself if it supports them, or else a new Gloo group.
    """
    if "cpu:" in dist.get_backend_config(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)

# SPDX-License-Identifier: Apache-2.0
"""Messages whose sizes depend on the data, over any torch.distributed backend."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from usbyte import _core
from usbyte.torch.runtime.format import brief_error
from usbyte.torch.runtime.process_groups import destroy_group
from usbyte.torch.runtime.ring import abort

_TAG = 0x3FFFFFFE  # which nobody else is likely to use on a group

Leg = tuple[int, memoryview, memoryview]  # peer, what to send and where to receive


class TorchExchange:
    """What sparse gradients travel over.

    Args:
        group: A process group; `close` ends it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # Plain bound methods would be reference cycles through C++, which Python's collector cannot
        # see.
        this = weakref.ref(self)

        def transfer(legs: list[Leg]) -> str | None:
            exchange = this()
            return exchange._transfer(legs) if exchange else "the exchange is gone"

        def abort_all() -> None:
            if this() is not None and dist.is_initialized():
                abort(group)

        self.core = _core.PythonExchange(group.rank(), group.size(), transfer, abort_all)

    def close(self) -> None:
        """Ends the group; nothing is on its way any more."""
        destroy_group(self._group)

    def _transfer(self, legs: list[Leg]) -> str | None:
        """Carries out one transfer; returns what went wrong."""
        try:
            with torch.no_grad():
                coming = [
                    self._group.recv([_tensor(memory)], peer, _TAG)
                    for peer, _, memory in legs
                    if memory
                ]
                # One after the other: peers come in another order on each rank, so that no link has
                # more than one message at a time.
                for peer, memory, _ in legs:
                    if memory:
                        self._group.send([_tensor(memory)], peer, _TAG).wait()
                for work in coming:
                    work.wait()
        except RuntimeError as error:
            return brief_error(error)
        return None


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group, or one of the same ranks that takes memory of the host, too. Collective."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)

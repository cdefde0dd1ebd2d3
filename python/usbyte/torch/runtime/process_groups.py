"""Process groups that some of the ranks make without the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist

from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.runtime.store import private_store
from usbyte.torch.runtime.worker_thread import call_within

T = TypeVar("T")


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A group that torch.distributed does not know. Collective among its ranks alone.

    `dist.new_group` is collective among all ranks of the job; a backend by itself is so among its
    own, and has the same collectives as a group.

    Args:
        store: Keys that nothing else uses.
        rank: This one's position in the group.
        size: Number of ranks in the group.
        timeout: Of its operations.
    """
    own = private_store(store, "gloo")
    keys = dist.PrefixStore("connected", own)
    return connect_all(
        lambda: cast(dist.ProcessGroup, dist.ProcessGroupGloo(own, rank, size, timeout)),
        *(keys, rank, size, timeout),
    )


def connect_all(
    connect: Callable[[], T], store: dist.Store, rank: int, size: int, timeout: timedelta
) -> T:
    """Calls `connect`, and returns when all ranks have; who left earlier would break connections.

    Args:
        connect: Makes connections to all other ranks.
        store: Keys that nothing else uses.
        rank: This one's position.
        size: Number of ranks.
        timeout: For the connections, and again for ranks that are slower. Torch by itself waits for
            a rank that has ended as long as an operation may take.

    Raises:
        RuntimeError: Some rank has not made its connections; says which.
    """
    keys = [f"{other}" for other in range(size)]
    try:
        made = call_within(timeout.total_seconds(), "usbyte-connect", connect)
        store.set(keys[rank], "")
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [other for other in range(size) if not store.check([keys[other]])]
        raise RuntimeError(f"{name_ranks(missing)} made no connections: {error}") from error
    return made


def destroy_group(group: dist.ProcessGroup) -> None:
    """Ends a group that nobody uses any more; one that is by itself ends with its last user."""
    if dist.is_initialized() and not isinstance(group, dist.ProcessGroupGloo):
        dist.destroy_process_group(group)

# SPDX-License-Identifier: Apache-2.0
"""Process groups that a subset of the ranks makes without the other ranks."""

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
    """Makes a Gloo backend object, used as a process group. Collective among its ranks only.

    `dist.new_group` is collective among all ranks of the run. A backend object is collective only
    among its own ranks and has the same collective methods as a group. torch.distributed does not
    know it, so `dist.all_reduce(..., group=...)` and the like do not accept it.

    Args:
        store: Store whose keys nothing else uses.
        rank: This rank's position in the group.
        size: Number of ranks in the group.
        timeout: Timeout of the group's operations.

    Raises:
        RuntimeError: Some ranks have not made their connections; the message names them.
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
    """Calls `connect` and returns its result when all ranks have connected.

    A rank that exited earlier would break connections that other ranks are making.

    Args:
        connect: Makes connections to all other ranks.
        store: Store whose keys nothing else uses.
        rank: This rank's position in the group.
        size: Number of ranks in the group.
        timeout: Limit for `connect`, and again for slower ranks. Without it, torch waits for a rank
            that has ended until the timeout of the group's operations.

    Raises:
        RuntimeError: Some ranks have not made their connections; the message names them.
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
    """Destroys a group that nothing uses any more.

    A backend object from `gloo_group` is left alone: it ends with its last reference.
    """
    if dist.is_initialized() and not isinstance(group, dist.ProcessGroupGloo):
        dist.destroy_process_group(group)

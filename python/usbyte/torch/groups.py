"""Process groups that some of the ranks make without the others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from usbyte.torch.store import private_store


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
    gloo: Any = dist.ProcessGroupGloo(own, rank, size, timeout)
    # Whoever left now would break connections that others are still making.
    if own.add("usbyte/connected", 1) == size:
        own.set("usbyte/all connected", "")
    own.wait(["usbyte/all connected"], timeout)
    return cast(dist.ProcessGroup, gloo)


def end(group: dist.ProcessGroup) -> None:
    """Ends a group that nobody uses any more; one that is by itself ends with its last user."""
    if dist.is_initialized() and not isinstance(group, dist.ProcessGroupGloo):
        dist.destroy_process_group(group)

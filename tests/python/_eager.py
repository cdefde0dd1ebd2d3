# SPDX-License-Identifier: Apache-2.0
"""An eager queue in a rank of a test."""

from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.world import world


@contextmanager
def eager(rank, size, limit_s=60.0, warning_s=0.0, on_fault=lambda text: text):
    """A queue over a fresh job, and the public functions on top of it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    shared = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    queue = EagerQueue(
        dist.new_group(timeout=timedelta(seconds=60)),
        shared, rank, size, limit_s, warning_s, on_fault,
    )  # fmt: skip
    world.current = lambda: SimpleNamespace(rank=rank, size=size, eager=queue)
    dist.barrier()  # the store may go when rank 0 does
    try:
        yield queue
    finally:
        queue.close()


def leave_last(rank, others, word):
    """Rank 0 waits until the others have come here, so that they need not do without the store."""
    shared = dist.distributed_c10d._get_default_store()
    if rank == 0:
        shared.wait([f"{word}/{r}" for r in others])
    else:
        shared.set(f"{word}/{rank}", "1")


def same(actual, expected):
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.cpu(), expected), (actual, expected)

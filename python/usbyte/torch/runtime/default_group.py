# SPDX-License-Identifier: Apache-2.0
"""Initializes torch.distributed's default process group, unless the script has done so."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from usbyte import _core
from usbyte.cluster_env import Cluster
from usbyte.errors import UsageError
from usbyte.torch.runtime.credential import Credential
from usbyte.torch.runtime.format import brief_error
from usbyte.torch.runtime.placement import place_here
from usbyte.torch.runtime.rendezvous import Met, Rendezvous
from usbyte.torch.runtime.rendezvous_store import open_store
from usbyte.torch.runtime.store import private_store
from usbyte.torch.runtime.worker_thread import call_within
from usbyte.torch.torch_private import default_store

_own: dist.ProcessGroup | None = None  # the default group, if usbyte initialized it
_runs = 0  # rendezvous completed by this process


def init_default_group(cluster: Cluster, env: _core.Env, timeout: timedelta) -> Met:
    """Runs the rendezvous, and initializes the default group unless there is one. Collective.

    Args:
        cluster: Rank, size, addresses and job id of this process, as the launcher gave them.
        env: The USBYTE_* settings of this process.
        timeout: Timeout of the group's operations.

    Returns:
        The store of this run, and where each rank runs.

    Raises:
        UsageError: The other ranks did not come in time, or are ranks of another job.
        RuntimeError: A rank has ended since the rendezvous, or cannot be reached.
    """
    global _runs
    run = _runs + 1  # counted by each process; equal on all ranks
    if dist.is_initialized():
        rank, size, base = dist.get_rank(), dist.get_world_size(), default_store()
    else:
        rank, size, base = cluster.rank, cluster.size, None
    local = (cluster.local_rank, cluster.local_size) if size == cluster.size else (None, None)
    place = place_here(*local)
    if size == 1:
        if base is None:
            _make(cluster, env, timeout, dist.HashStore())
        return Met(default_store(), [place])
    credential = Credential(cluster, env.job_token)
    if base is None:
        base = open_store(cluster, credential, env.start_limit_s, timeout)
    met = Rendezvous(
        base, run, rank, size, place, credential, _is_own(), partial(_check_network, rank, size)
    ).meet(env.start_limit_s)
    _runs = run
    if not dist.is_initialized():
        make = partial(_make, cluster, env, timeout, met.store)
        call_within(env.start_limit_s, "usbyte-connect", make)
    return Met(private_store(met.store, "run"), met.places)


def destroy_default_group() -> None:
    """Destroys the default group if usbyte initialized it."""
    if dist.is_initialized() and _is_own():
        dist.destroy_process_group()


def detach_after_fork() -> Any:
    """Forgets the default group in a forked process, where the group's threads do not exist.

    Returns:
        The group. The caller must keep a reference to it, so that it is never destroyed.
    """
    global _own
    group, _own = _own, None
    return group


def _is_own() -> bool:
    return _own is not None and _own is dist.group.WORLD


def _check_network(rank: int, size: int) -> None:
    """Raises UsageError if this rank cannot make Gloo connections.

    The check runs before the other ranks wait for these connections.
    """
    try:
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    except RuntimeError as error:
        raise UsageError(
            f"rank {rank} of {size} cannot make network connections: {brief_error(error)}. Set "
            "GLOO_SOCKET_IFNAME to the interface of its host that connects it to the others"
        ) from error


def _make(cluster: Cluster, env: _core.Env, timeout: timedelta, store: dist.Store) -> None:
    global _own
    backend = env.backend if env.backend not in ("", "nccl") else "gloo"
    if env.backend in ("", "nccl") and torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"  # for the user's own collectives; NCCL starts at first use
    dist.init_process_group(
        backend, rank=cluster.rank, world_size=cluster.size, timeout=timeout, store=store
    )
    _own = dist.group.WORLD

"""torch.distributed's default process group, where usbyte is the one that makes it."""

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

_own: dist.ProcessGroup | None = None  # the default group, if made here
_runs = 0


def init_default_group(cluster: Cluster, env: _core.Env, timeout: timedelta) -> Met:
    """Makes the default group unless there is one. Collective.

    Args:
        cluster: This process's place.
        env: Its knobs.
        timeout: Of the group's operations.

    Raises:
        UsageError: The other ranks are not there in time, or are those of another job.
        RuntimeError: A rank has ended since all met, or cannot be reached.
    """
    global _runs
    run = _runs + 1  # of this process, equal on all ranks
    if dist.is_initialized():
        rank, size, base = dist.get_rank(), dist.get_world_size(), default_store()
    else:
        rank, size, base = cluster.rank, cluster.size, None
    told = (cluster.local_rank, cluster.local_size) if size == cluster.size else (None, None)
    place = place_here(*told)
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
    """Destroys the default group if it was made here."""
    if dist.is_initialized() and _is_own():
        dist.destroy_process_group()


def detach_after_fork() -> Any:
    """In a process that was forked: gives what has threads, which are not here."""
    global _own
    group, _own = _own, None
    return group


def _is_own() -> bool:
    return _own is not None and _own is dist.group.WORLD


def _check_network(rank: int, size: int) -> None:
    """Fails where this rank can make no connections, before the others wait for them."""
    try:
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    except RuntimeError as error:
        raise UsageError(
            f"rank {rank} of {size} can make no connections: {brief_error(error)}. Set "
            "GLOO_SOCKET_IFNAME to the interface of its host that connects it to the others"
        ) from error


def _make(cluster: Cluster, env: _core.Env, timeout: timedelta, store: dist.Store) -> None:
    global _own
    backend = env.backend if env.backend not in ("", "nccl") else "gloo"
    if env.backend in ("", "nccl") and torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"  # for the user's own tensors; NCCL starts when it is used
    dist.init_process_group(
        backend, rank=cluster.rank, world_size=cluster.size, timeout=timeout, store=store
    )
    _own = dist.group.WORLD

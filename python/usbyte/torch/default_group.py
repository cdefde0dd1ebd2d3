"""torch.distributed's default process group, where usbyte is the one that makes it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from usbyte import _core
from usbyte.env import Cluster
from usbyte.errors import UsageError
from usbyte.torch.membership import check_member
from usbyte.torch.store import fresh_store, private_store

_own: dist.ProcessGroup | None = None  # the default group, if made here
_runs = 0  # of this process, equal on all ranks


def meet(cluster: Cluster, env: _core.Env, timeout: timedelta) -> dist.Store:
    """Makes the default group unless there is one. Collective.

    Returns:
        A store that the ranks of this run alone share.

    Raises:
        UsageError: The other ranks are not there within `timeout`, or are those of another job.
    """
    global _runs
    if not dist.is_initialized():
        try:
            check_member(cluster, env.job_token, timeout)
            _make(cluster, env, timeout)
        except UsageError:
            raise
        except RuntimeError as error:
            raise UsageError(
                f"rank {cluster.rank} of {cluster.size} has not met the others at "
                f"{cluster.master_addr}, port {cluster.master_port}: "
                f"{str(error).rstrip('.')}. See that all ranks are started with the same "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, that rank 0 is alive, and that its host "
                "can be reached there"
            ) from error
    _runs += 1
    store = dist.distributed_c10d._get_default_store()
    if dist.get_world_size() == 1:
        return store
    if cluster.kept_store and not _is_own():  # or it is fresh already
        store = fresh_store(store, dist.get_rank(), dist.get_world_size())
    return private_store(store, f"usbyte/{_runs}")


def end() -> None:
    """Destroys the default group if it was made here."""
    if dist.is_initialized() and _is_own():
        dist.destroy_process_group()


def orphan() -> Any:
    """In a process that was forked: gives what has threads, which are not here."""
    global _own
    group, _own = _own, None
    return group


def _is_own() -> bool:
    return _own is not None and _own is dist.group.WORLD


def _make(cluster: Cluster, env: _core.Env, timeout: timedelta) -> None:
    global _own
    backend = env.backend if env.backend not in ("", "nccl") else "gloo"
    if env.backend in ("", "nccl") and torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"  # for the user's own tensors; NCCL starts when it is used
    if cluster.size == 1:
        where: dict[str, Any] = {"store": dist.HashStore()}
    elif cluster.kept_store:
        meeting = dist.rendezvous("env://", cluster.rank, cluster.size, timeout=timeout)
        where = {"store": fresh_store(next(meeting)[0], cluster.rank, cluster.size)}
    elif cluster.source == "torchrun":
        where = {"init_method": "env://"}
    else:
        address = cluster.master_addr
        if ":" in address:  # IPv6
            address = f"[{address}]"
        where = {"init_method": f"tcp://{address}:{cluster.master_port}"}
    dist.init_process_group(
        backend, rank=cluster.rank, world_size=cluster.size, timeout=timeout, **where
    )
    _own = dist.group.WORLD

"""The store at which the ranks of a job meet, where no default process group has one."""

from __future__ import annotations

import logging
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from usbyte.cluster_env import JOB_KEY, Cluster
from usbyte.errors import UsageError
from usbyte.torch.runtime.credential import Credential
from usbyte.torch.runtime.format import brief_error

log = logging.getLogger("usbyte")

_NOTICE_S = 5.0  # between messages that tell that nobody serves the store
_PAUSE_S = 0.2  # between attempts to connect
_CONNECT_S = 5.0  # for one attempt


def open_store(
    cluster: Cluster, credential: Credential, limit_s: float, timeout: timedelta
) -> dist.TCPStore:
    """Connects to the store, which rank 0 serves unless the launcher does.

    Args:
        cluster: This process's place.
        credential: Its mark is put into a store that is served here.
        limit_s: Seconds to wait for the process that serves the store.
        timeout: Of the store's operations afterwards.

    Raises:
        UsageError: Nobody serves it in time, or its port is taken.
    """
    if cluster.rank == 0 and not cluster.kept_store:
        store = _serve(cluster, credential, limit_s)
    else:
        deadline = time.monotonic() + limit_s
        _wait_for_server(cluster, deadline)
        store = _connect(cluster, max(1.0, deadline - time.monotonic()))
    store.set_timeout(timeout)
    return store


def _serve(cluster: Cluster, credential: Credential, limit_s: float) -> dist.TCPStore:
    try:
        store = dist.TCPStore(
            cluster.master_addr,
            cluster.master_port,
            is_master=True,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        where = _address(cluster)
        if not _listens(cluster):
            raise UsageError(
                f"rank 0 of {cluster.size} cannot serve a store at {where}: {brief_error(error)}. "
                "See that MASTER_ADDR is the address of this host, and that its other ranks can "
                "reach it"
            ) from error
        # The port may belong to the store of another job, which is the cause then.
        credential.check_mark(_connect(cluster, _CONNECT_S), where)
        raise UsageError(
            f"rank 0 of {cluster.size} cannot serve a store at {where}, as another program does: "
            "see that only one process has RANK=0, or choose another MASTER_PORT"
        ) from error
    store.set(JOB_KEY, credential.mark)
    return store


def _connect(cluster: Cluster, limit_s: float) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            cluster.master_addr,
            cluster.master_port,
            is_master=False,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise UsageError(
            f"rank {cluster.rank} of {cluster.size}: what listens at {_address(cluster)} is no "
            f"store of torch.distributed ({brief_error(error)}). See that MASTER_ADDR and "
            "MASTER_PORT are those of rank 0, or choose another MASTER_PORT"
        ) from error


def _wait_for_server(cluster: Cluster, deadline: float) -> None:
    """Torch would wait as well, but says nothing meanwhile."""
    server = "the launcher's store" if cluster.kept_store else "rank 0"
    began = time.monotonic()
    notice = began + _NOTICE_S
    while (problem := _try_to_connect(cluster)) is not None:
        now = time.monotonic()
        if now > deadline:
            raise UsageError(
                f"rank {cluster.rank} of {cluster.size} has waited {now - began:.0f} s for "
                f"{server} at {_address(cluster)} in vain: {problem}. See that all ranks are "
                "started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, that rank 0 is "
                "alive, and that its host can be reached there; raise USBYTE_START_LIMIT_S if it "
                "needs longer to start"
            )
        if now > notice:
            notice += _NOTICE_S
            text = "rank %d: waiting for %s of %d at %s: %s"
            log.warning(text, cluster.rank, server, cluster.size, _address(cluster), problem)
        time.sleep(_PAUSE_S)


def _try_to_connect(cluster: Cluster) -> OSError | None:
    try:
        address = (cluster.master_addr, cluster.master_port)
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except OSError as error:
        return error
    return None


def _address(cluster: Cluster) -> str:
    return f"{cluster.master_addr}, port {cluster.master_port}"


def _listens(cluster: Cluster) -> bool:
    return _try_to_connect(cluster) is None

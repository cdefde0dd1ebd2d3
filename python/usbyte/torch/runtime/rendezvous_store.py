# SPDX-License-Identifier: Apache-2.0
"""Opens the store for the rendezvous, if there is no default process group that has one."""

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
from usbyte.torch.runtime.worker_thread import call_within

log = logging.getLogger("usbyte")

_NOTICE_S = 5.0  # between log messages that the store cannot be reached
_PAUSE_S = 0.2  # between attempts to connect
_CONNECT_S = 5.0  # for one attempt


def open_store(
    cluster: Cluster, credential: Credential, limit_s: float, timeout: timedelta
) -> dist.TCPStore:
    """Connects to the store. Rank 0 serves it, unless the launcher does.

    Args:
        cluster: Rank, size and addresses of this process, as the launcher gave them.
        credential: Its job mark is written to a store that this process serves.
        limit_s: Seconds to wait for the process that serves the store.
        timeout: Timeout of the store's operations afterwards.

    Raises:
        UsageError: The store could not be reached in time, or its port is in use.
    """
    if cluster.rank == 0 and not cluster.kept_store:
        store = _serve(cluster, credential, limit_s)
    else:
        deadline = time.monotonic() + limit_s
        _wait_for_server(cluster, deadline)
        store = _connect(cluster, max(1.0, round(deadline - time.monotonic(), 1)))
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
                "Set MASTER_ADDR to an address of this host that the other ranks can reach"
            ) from error
        # If the port belongs to the store of another job, this raises an error that says so.
        credential.check_mark(_connect(cluster, _CONNECT_S), where)
        raise UsageError(
            f"rank 0 of {cluster.size} cannot serve a store at {where}: another program uses this "
            "port. Start only one process with RANK=0, or choose another MASTER_PORT"
        ) from error
    store.set(JOB_KEY, credential.mark)
    return store


def _connect(cluster: Cluster, limit_s: float) -> dist.TCPStore:
    # torch waits without limit for the first answer of a program that accepts the connection.
    try:
        return call_within(
            limit_s,
            "usbyte-connect",
            lambda: dist.TCPStore(
                cluster.master_addr,
                cluster.master_port,
                is_master=False,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,
            ),
        )
    except RuntimeError as error:
        raise UsageError(
            f"rank {cluster.rank} of {cluster.size}: what listens at {_address(cluster)} is no "
            f"store of torch.distributed ({brief_error(error)}). Check that MASTER_ADDR and "
            "MASTER_PORT are those of rank 0, or choose another MASTER_PORT"
        ) from error


def _wait_for_server(cluster: Cluster, deadline: float) -> None:
    """Waits until the store's port accepts connections.

    Torch would wait, too, but would not log what it waits for.
    """
    server = "the launcher's store" if cluster.kept_store else "rank 0"
    began = time.monotonic()
    notice = began + _NOTICE_S
    while (problem := _try_to_connect(cluster)) is not None:
        now = time.monotonic()
        if now > deadline:
            raise UsageError(
                f"rank {cluster.rank} of {cluster.size} could not connect to {server} at "
                f"{_address(cluster)} within {now - began:.0f} s: {problem}. Check that all ranks "
                "are started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, that rank 0 is "
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

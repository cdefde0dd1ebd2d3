# SPDX-License-Identifier: Apache-2.0
"""Starts Horovod in ranks that another launcher has started."""

from __future__ import annotations

import importlib
import os
from typing import Any

import usbyte.torch as ub
from usbyte.cluster_env import detect

_server: Any = None  # between start and stop
_ours = False  # not started by Horovod's launcher


def start() -> Any:
    """Returns horovod.torch, initialised. All ranks call it; `stop` ends it.

    Horovod's own launcher tells ranks their places by environment variables and opens a server at
    which they meet; under any other launcher rank 0 opens it here.

    Raises:
        ImportError: Horovod is not installed.
        RuntimeError: It does not see all ranks.
    """
    global _ours
    hvd = importlib.import_module("horovod.torch")
    _ours = _ours or "HOROVOD_RANK" not in os.environ
    if _ours:
        os.environ.update(_environment())
    hvd.init()
    if hvd.size() != ub.size():
        raise RuntimeError(f"Horovod sees {hvd.size()} ranks of {ub.size()}")
    return hvd


def stop() -> None:
    """Ends it on all ranks, since its thread takes part in every millisecond of what comes after.

    Under Horovod's own launcher it goes on: ranks meet there only once.
    """
    global _server
    if not _ours:
        return
    importlib.import_module("horovod.torch").shutdown()
    ub.barrier()
    if _server is not None:
        _server.stop()
        _server = None


def _environment() -> dict[str, str]:
    global _server
    gloo_run = importlib.import_module("horovod.runner.gloo_run")
    # Each rank is a host of its own to Horovod; on CPUs nothing depends on it.
    hosts = gloo_run.parse_hosts(",".join(f"rank{i}:1" for i in range(ub.size())))
    slots = gloo_run.get_host_assignments(hosts, ub.size())
    port = 0
    if ub.rank() == 0:
        _server = gloo_run.RendezvousServer(0)
        port = _server.start()
        _server.init(slots)
    port = ub.broadcast_object(port, 0)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    run = gloo_run.create_run_env_vars(detect().master_addr, [interface], port)
    return {k: str(v) for k, v in (run | gloo_run.create_slot_env_vars(slots[ub.rank()])).items()}

# SPDX-License-Identifier: Apache-2.0
"""How several ranks of one job can talk on this machine.

Ranks of NCCL want a GPU each. From 2.30 on it lets them share one if told so; before, ranks that
claim to be of different hosts pass. The staged path, over Gloo, works everywhere.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from _ranks import run_ranks

_LIMIT_S = 45.0


@dataclass(frozen=True, eq=False)
class Transport:
    """One way.

    Attributes:
        name: For people.
        backend: Of torch.distributed, and of usbyte.
        device: "cuda" or "cpu".
        own_gpu: Every rank has a GPU of its own.
        host_ids: Ranks claim to be of different hosts.
        env: More variables for all ranks.
    """

    name: str
    backend: str
    device: str
    own_gpu: bool = False
    host_ids: bool = False
    env: dict[str, str] = field(default_factory=dict)

    def run(self, n, target, *args, timeout=120.0):
        """`run_ranks` of target(transport, rank, size, *args)."""
        env = {
            "USBYTE_BACKEND": self.backend,
            "USBYTE_LEARNING_STEPS": "2",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            **self.env,
        }
        where = [target.__code__.co_filename, target.__name__]
        return run_ranks(n, _enter, asdict(self), where, *args, timeout=timeout, env=env)

    def join(self, rank):
        """Prepares a rank; before it touches the GPU or NCCL."""
        if self.host_ids:
            os.environ["NCCL_HOSTID"] = f"usbyte-test-{rank}"
        if self.device == "cuda":
            torch.cuda.set_device(rank if self.own_gpu else 0)


def find(device):
    """Transports that work for two ranks, the best first, and why others do not.

    Returns:
        (transports, reasons): NCCL first, if it works in any way; then the staged path. Reasons are
        by name.
    """
    if device == "cpu":
        return [Transport("Gloo", "gloo", "cpu")], {}
    loopback = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    shared = {**loopback, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    version = torch.cuda.nccl.version()
    tried = [
        Transport("NCCL, a GPU for each rank", "nccl", device, own_gpu=True, env=loopback),
        Transport("NCCL, ranks sharing a GPU", "nccl", device, env=shared),
        Transport("NCCL, ranks claiming different hosts", "nccl", device, host_ids=True,
                  env={**loopback, "NCCL_NET": "Socket"}),
    ]  # fmt: skip
    staged = Transport("staged over Gloo", "gloo", device)
    reasons, possible = {}, []
    for transport in [*tried, staged]:
        if transport.own_gpu and torch.cuda.device_count() < 2:
            reasons[transport.name] = "there is one GPU"
        elif "NCCL_MULTI_RANK_GPU_ENABLE" in transport.env and version < (2, 30):
            reasons[transport.name] = f"NCCL {'.'.join(map(str, version))} is older than 2.30"
        else:
            possible.append(transport)
    with ThreadPoolExecutor(len(possible)) as pool:
        told = dict(zip(possible, pool.map(_broken, possible), strict=True))
    reasons |= {transport.name: why for transport, why in told.items() if why}
    works = [transport for transport, why in told.items() if not why]
    nccl = [transport for transport in works if transport is not staged][:1]
    return [*nccl, *(t for t in works if t is staged)], reasons


def for_ranks(transports, n):
    """Those that can hold n ranks."""
    found, _ = transports
    return [t for t in found if not t.own_gpu or torch.cuda.device_count() >= n]


def everywhere(usable, n, target, *args, timeout=120.0):
    """Results of `Transport.run` by each transport, all at once; the list must not be empty.

    Raises:
        AssertionError: Ranks failed; the text tells by which transport.
    """
    assert usable, "no ranks can talk here"
    with ThreadPoolExecutor(len(usable)) as pool:
        runs = [pool.submit(t.run, n, target, *args, timeout=timeout) for t in usable]
    stories = [
        f"=== {t.name}:\n{run.exception()}"
        for t, run in zip(usable, runs, strict=True)
        if run.exception() is not None
    ]
    assert not stories, "\n".join(stories)
    return [run.result() for run in runs]


def _broken(transport):
    """Why two ranks cannot add numbers by it with torch alone; "" if they can."""
    try:
        results = transport.run(2, _adds, timeout=_LIMIT_S)
    except AssertionError as error:
        lines = str(error).splitlines() or ["it failed"]
        telling = [line for line in lines if "rror" in line and "Traceback" not in line]
        return (telling or lines)[-1].strip()[:300]
    return "" if results == [3.0, 3.0] else f"the sum of 1 and 2 was {results}"


def _adds(transport, rank, size):
    dist.init_process_group(transport.backend)
    tensor = torch.full((1 << 20,), rank + 1.0, device=transport.device)
    dist.all_reduce(tensor)
    value = tensor.max().item()
    dist.destroy_process_group()
    return value


def _enter(rank, size, transport, where, *args):
    file, name = where
    chosen = Transport(**transport)
    chosen.join(rank)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)(chosen, rank, size, *args)

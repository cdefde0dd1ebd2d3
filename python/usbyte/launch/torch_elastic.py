# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one host with torch's elastic agent. Works with torch 2.4 and newer.

`launch_agent` of torch.distributed.launcher does not fit, for three reasons. Its agent polls every
0.1 s which ranks have ended, so of two ranks that fail together it may blame the wrong one. It
waits 30 s for ranks that ignore SIGTERM (in older releases without a limit). It closes its store
300 s after its own ranks have ended, although remote ranks may still use it. So torch's elastic
agent only meets the other agents, numbers the ranks and starts them; usbyte's own agent does the
rest.
"""

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from usbyte.cluster_env import JOB_KEY, job_mark
from usbyte.launch.protocol import STDERR, STDOUT, AgentSpec

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def serve_store(timeout: float, address: str, token: str) -> TCPStore:
    """Opens the job's store on a free port; the store lives as long as the returned object.

    The elastic agent of this process finds the store by its port (multi-tenancy) and does not open
    another one. So no other program can take the port in between.

    Args:
        timeout: Timeout of the store's operations, in seconds.
        address: The IPv4 address to listen on; "" for all addresses of this host, IPv6 included.
        token: The job token, by which ranks check that the store belongs to their job.
    """
    with _listen(address) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            address or "localhost",
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=os.dup(listener.fileno()),
        )
    store.set(JOB_KEY, job_mark(token))
    return store


def _listen(address: str) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        # IPv6 may be compiled in and yet disabled on this host.
        with suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=socket.SOMAXCONN, dualstack_ipv6=True
            )
    return socket.create_server((address, 0), backlog=socket.SOMAXCONN)


def interface_address(interface: str) -> str:
    """Returns the IPv4 address of the first of the comma-separated interfaces.

    Raises:
        ValueError: One of them does not exist on this host, or the first has no address.
    """
    names = interface.split(",")
    present = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name not in present:
            raise ValueError(f"no network interface {name!r}; this host has {', '.join(present)}")
    request = struct.pack("256s", names[0].encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise ValueError(f"network interface {names[0]!r} has no IPv4 address") from error
    return socket.inet_ntoa(answer[20:24])


class Pipes(LogsSpecs):
    """Gives every rank a pipe for stdout and one for stderr, in place of torch's log files.

    Args:
        restarts: Number of restarts so far, and the most restarts of the job.

    Attributes:
        ends: For each pipe its read end, STDOUT or STDERR, and the global rank.
    """

    def __init__(self, restarts: tuple[int, int]) -> None:
        super().__init__()
        self._restarts = restarts
        self.ends: list[tuple[int, int, int]] = []

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Opens the pipes; torch calls this to get the destinations of the ranks' output."""
        paths: dict[int, dict[int, str]] = {STDOUT: {}, STDERR: {}}
        for local_rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = ""
            # Each restart makes a new elastic agent of torch, which would count from zero.
            made, allowed = self._restarts
            env["TORCHELASTIC_RESTART_COUNT"] = str(made)
            env["TORCHELASTIC_MAX_RESTARTS"] = str(allowed)
            for kind in (STDOUT, STDERR):
                end, write_end = os.pipe()
                self.ends.append((end, kind, int(env["RANK"])))
                paths[kind][local_rank] = f"/proc/self/fd/{write_end}"
        no_files = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=paths[STDOUT], stderrs=paths[STDERR], error_files=no_files)

    @property
    def root_log_dir(self) -> str:
        """Required by torch; no log files are written."""
        return os.devnull


class ElasticAgent(LocalElasticAgent):
    """Starts the ranks of this host, then calls `on_started`.

    Args:
        spec: The ranks to start.
        master: Address and port of the store.
        pipes: Destinations of the ranks' output.
        on_started: Called when the ranks run, with the global rank of each process id. It does not
            return.
    """

    def __init__(
        self,
        spec: AgentSpec,
        master: tuple[str, int],
        pipes: Pipes,
        on_started: Callable[[dict[int, int]], NoReturn],
    ) -> None:
        self._on_started = on_started
        rendezvous = StaticTCPRendezvous(
            master_addr=master[0],
            master_port=master[1],
            rank=spec.node,
            world_size=spec.nodes,
            run_id=spec.run_id,
            timeout=max(1, round(spec.start_timeout)),
        )
        worker = Path(__file__).with_name("worker.py")
        arguments = ["-I", "-S", str(worker), str(os.getpid()), *spec.command]
        workers = WorkerSpec(
            role="default",
            local_world_size=spec.ranks,
            entrypoint=sys.executable,
            # torch expands ${local_rank} and halves $$ in arguments.
            args=tuple(argument.replace("$", "$$") for argument in arguments),
            rdzv_handler=rendezvous,
            max_restarts=0,
            monitor_interval=0.01,
            master_addr=master[0],
            master_port=master[1],
        )
        super().__init__(workers, logs_specs=pipes)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._on_started({worker.id: worker.global_rank for worker in worker_group.workers})

# SPDX-License-Identifier: Apache-2.0
"""The job that the launcher runs, and the commands that start an agent on each host."""

import math
import os
import secrets
import shlex
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from usbyte.launch.hosts import Host, Placement
from usbyte.launch.protocol import AgentSpec

_FORWARDED_PREFIXES = ("USBYTE_", "NCCL_", "GLOO_")
_FORWARDED = ("OMP_NUM_THREADS", "PYTHONPATH")


def _new_name() -> str:
    return uuid.uuid4().hex


def _new_token() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Ssh:
    """How to reach remote hosts.

    Attributes:
        port: Port of sshd on the hosts; None for ssh's own default.
        identity: Private key file; None for ssh's own default.
        options: Options of the user, which take precedence over those of the launcher.
    """

    port: int | None = None
    identity: str | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One run of `command` on all ranks.

    Attributes:
        command: The program and its arguments.
        env: Variables for every rank, in addition to those that it inherits.
        cwd: Working directory of the ranks, on every host.
        placements: Placement of the ranks on hosts, in the order of ranks; set by `attempt`.
        interface: Names of network interfaces, separated by commas; None for any.
        start_timeout: Seconds in which the agents of all hosts must have met.
        ssh: How to reach remote hosts.
        remote_python: Python that runs the agents on remote hosts.
        run_id: Unique name of this run.
        token: The job token, a secret by which the ranks recognise each other.
        restarts: Number of restarts before this run.
        max_restarts: The most restarts of the job.
    """

    command: list[str]
    env: dict[str, str]
    cwd: str
    placements: list[Placement] = field(default_factory=list)
    interface: str | None = None
    start_timeout: float = 30.0
    ssh: Ssh = field(default_factory=Ssh)
    remote_python: str = sys.executable
    run_id: str = field(default_factory=_new_name)
    token: str = field(default_factory=_new_token, repr=False)
    restarts: int = 0
    max_restarts: int = 0

    def attempt(self, placements: list[Placement], restarts: int) -> "Job":
        """Returns the job for its next run, with a new run id and a new job token.

        Processes of an earlier run that are still alive cannot join the new run.

        Args:
            placements: Placement of the ranks.
            restarts: Number of restarts so far, this run included.
        """
        return replace(
            self,
            placements=placements,
            run_id=_new_name(),
            token=_new_token(),
            restarts=restarts,
        )

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return sum(placement.count for placement in self.placements)

    def agent_spec(self, node: int) -> AgentSpec:
        """Returns the spec for the agent of the host with index `node` in `placements`."""
        placement = self.placements[node]
        env = {} if placement.host.local else forwarded(os.environ)
        sockets = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if self.interface:
            env.update(dict.fromkeys(sockets, self.interface))
        elif len(self.placements) == 1:
            env.update({name: os.environ.get(name, "lo") for name in sockets})
        if "PYTHONPATH" in os.environ:
            env["PYTHONPATH"] = os.environ["PYTHONPATH"]
        return AgentSpec(
            host=placement.host.name,
            remote=not placement.host.local,
            node=node,
            nodes=len(self.placements),
            ranks=placement.count,
            size=self.size,
            command=self.command,
            env={**env, "PYTHONUNBUFFERED": "1", **self.env, "USBYTE_JOB_TOKEN": self.token},
            cwd=self.cwd,
            interface=self.interface,
            run_id=self.run_id,
            start_timeout=self.start_timeout,
            restarts=self.restarts,
            max_restarts=self.max_restarts,
        )

    def agent_command(self, host: Host) -> list[str]:
        """Returns the command that starts the agent of `host`.

        It does not include the command of the ranks, which is sent as JSON. So no shell expands it.
        """
        module = ["-m", "usbyte.launch.agent"]
        if host.local:
            return [sys.executable, *module]
        path = agent_env().get("PYTHONPATH")
        python = ["env", f"PYTHONPATH={path}"] if path else []
        remote = shlex.join([*python, self.remote_python, *module])
        return ["ssh", *self._ssh_options(), "--", host.name, f"cd / && exec {remote}"]

    def _ssh_options(self) -> list[str]:
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(math.ceil(self.start_timeout)),
            "StrictHostKeyChecking": "accept-new",
            # Detects a lost host within a minute.
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "4",
            # A shared master connection would stay open after the job.
            "ControlMaster": "no",
            "ClearAllForwardings": "yes",
            "LogLevel": "ERROR",
        }
        words = ["-T", "-x", *self.ssh.options]  # First: ssh uses the first value of an option.
        if self.ssh.port is not None:
            words += ["-p", str(self.ssh.port)]
        if self.ssh.identity is not None:
            words += ["-i", self.ssh.identity]
        for name, value in options.items():
            words += ["-o", f"{name}={value}"]
        return words


def agent_env() -> dict[str, str]:
    """Returns the environment in which local agents start.

    Agents start in `/`, because `python -m` puts the current directory first on its path, where a
    file of the user could hide a module. So relative entries of PYTHONPATH are made absolute.
    """
    env = dict(os.environ)
    if env.get("PYTHONPATH"):
        entries = env["PYTHONPATH"].split(os.pathsep)
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in entries)
    return env


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of `environ` that are forwarded to remote ranks."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_FORWARDED_PREFIXES) or name in _FORWARDED
    }

# SPDX-License-Identifier: Apache-2.0
"""An emulated cluster on one machine.

Each host is a network namespace. A bridge connects all hosts, and tbf shapes each link in both
directions. Host i of the lab NAME is called NAME-i and has the address 10.98.0.(i+1) on eth0. There
is no state file, which could become stale: every call asks `ip` for the namespaces and links. The
lab needs Linux, root, iproute2, util-linux, and the kernel's bridge, veth and sch_tbf.

In a lab of several dimensions, every host has an interface for each dimension: eth0 for the
innermost, whose hosts stand for the GPUs of a machine, then eth1 and so on. The coordinates of host
i are the digits of i in the mixed radix of the dimensions' sizes, innermost first. Two hosts reach
each other over the outermost dimension in which their coordinates differ. One bridge connects the
hosts that have the same coordinates in all dimensions further out. A host has one address for all
paths, that of eth0, so programs in the lab need no knowledge of the dimensions.

Each host computes on its own share of the cores. With fewer cores than hosts, several hosts share a
core, which disturbs small messages: the scheduler lets the receiver preempt the sender at once, and
the receiver's answer wakes Gloo's thread in the sender, which then spins, for up to a scheduler
tick, on a lock that the preempted thread holds. A small all_reduce takes several times as long.
Hosts of a real cluster cannot preempt each other. So ranks that share a core run as batch jobs
(SCHED_BATCH), which do not preempt each other on wake-up. The drawback: while layers really
compute, messages wait for the scheduler tick, those of the same rank included. The simulated
compute of `benchmarks/compare.py` yields to communication, also to that of other ranks; the lab's
control group makes this work.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from usbyte.errors import UsageError
from usbyte.lab.cores import ControlGroup, core_shares
from usbyte.lab.shaping import rate_of, shape_link
from usbyte.lab.system_commands import run_command, run_json, unusable

log = logging.getLogger("usbyte")

#: Default name of a lab.
DEFAULT = "usbyte"
#: The interface that has the address of its host.
INTERFACE = "eth0"
# `ip netns exec` mounts the files of the namespace's folder here over those of /etc.
_ETC = Path("/etc/netns")
#: The most hosts; the last byte of the address has their number.
MAX_HOSTS = 250
#: The most dimensions; the interface names have one digit for it.
MAX_DIMENSIONS = 10

# Each rank first enters the lab's control group, which is not visible inside a host. Then it enters
# its host, on that host's cores. The store of the launcher is outside of the lab and not reachable,
# so the variables that refer to it are removed.
_ENTER = (
    '[ -z "$LAB_CGROUP" ] || echo 0 > "$LAB_CGROUP/cgroup.procs"; '
    'cores=$(echo "$LAB_CORES" | cut -d " " -f $((RANK + 1))); '
    'exec ip netns exec "$LAB_PREFIX$RANK" taskset -c "$cores" chrt "$LAB_POLICY" 0 '
    "env -u LAB_PREFIX -u LAB_CGROUP -u LAB_CORES -u LAB_POLICY -u LAB_LOCAL_SIZE "
    "-u TORCHELASTIC_USE_AGENT_STORE -u USBYTE_JOB_TOKEN MASTER_ADDR=10.98.0.1 "
    'LOCAL_RANK=$((RANK % LAB_LOCAL_SIZE)) LOCAL_WORLD_SIZE="$LAB_LOCAL_SIZE" '
    'GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 "$@"'
)


@dataclass(frozen=True)
class Host:
    """One host of a lab.

    Attributes:
        namespace: Name of the network namespace.
        address: IPv4 address.
        bytes_per_s: Rate of the link in each direction, by dimension; None for a link without
            shaping.
        pids: Processes in the namespace.
    """

    namespace: str
    address: str
    bytes_per_s: list[float | None]
    pids: list[int]


class Lab:
    """An emulated cluster.

    Args:
        name: Name of the lab: a lower-case letter, then up to 7 lower-case letters and digits. Labs
            with different names are isolated from each other.

    Raises:
        UsageError: The name is not valid, or the process is not root on Linux with iproute2 and
            util-linux.
    """

    def __init__(self, name: str = DEFAULT) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]{0,7}", name):
            raise UsageError(
                f"lab {name!r}: a name has up to 8 lower-case letters and digits, a letter first"
            )
        if missing := unusable():
            raise UsageError(f"the lab cannot be used here: {missing}")
        self.name = name
        self._control_group = ControlGroup(name)

    def hosts(self) -> int:
        """Returns the number of hosts that are up; 0 if the lab is down."""
        return len(self._namespaces())

    def dimensions(self) -> int:
        """Returns the number of dimensions of the network; 0 if the lab is down."""
        links = (re.fullmatch(rf"{self.name}-v0d([0-9])", link) for link in self._links())
        return sum(link is not None for link in links)

    def up(
        self,
        sizes: int | Sequence[int],
        bytes_per_s: float | Sequence[float | None] | None = None,
        congestion: str | None = None,
    ) -> None:
        """Starts the cluster.

        Args:
            sizes: Number of hosts, or the size of each dimension, innermost first. The product is
                at most `MAX_HOSTS`.
            bytes_per_s: Rate of each link in each direction: one for all dimensions, or one for
                each. None: no shaping.
            congestion: TCP's congestion control, such as "cubic"; None for the system's default.

        Raises:
            UsageError: The lab is up already, an argument is out of range, or a command of the
                system failed. After a failed command, everything is removed again.
        """
        shape = [sizes] if isinstance(sizes, int) else list(sizes)
        hosts = math.prod(shape)
        if not 1 <= hosts <= MAX_HOSTS or min(shape) < 1:
            raise UsageError(f"a lab has 1 to {MAX_HOSTS} hosts, not {'x'.join(map(str, shape))}")
        if len(shape) > MAX_DIMENSIONS:
            raise UsageError(f"a lab has up to {MAX_DIMENSIONS} dimensions, not {len(shape)}")
        rates = _by_dimension(bytes_per_s, len(shape))
        if self._namespaces() or self._links():
            raise UsageError(
                f"lab '{self.name}' is up already, with {self.hosts()} hosts; end it with "
                f"`{self._command('down')}`, or name another with --name"
            )
        try:
            for k in range(len(shape)):
                for group in range(math.prod(shape[k + 1 :])):
                    bridge = self._bridge(k, group)
                    run_command("ip", "link", "add", bridge, "type", "bridge")
                    run_command("ip", "link", "set", bridge, "up")
            for i in range(hosts):
                self._add_host(i, shape)
                self._forget_connections(i)
                self._add_routes(i, shape, congestion)
                self._name_hosts(i, hosts)
            self._shape(hosts, rates)
            self._control_group.make()
        except BaseException:
            self._remove()
            raise

    def rate(self, bytes_per_s: float | Sequence[float | None] | None) -> None:
        """Changes the rate of the links, also while ranks run.

        Args:
            bytes_per_s: Rate of each link in each direction: one for all dimensions, or one for
                each. None: no shaping.

        Raises:
            UsageError: The lab is not up, or has another number of dimensions.
        """
        hosts = self._require()
        self._shape(hosts, _by_dimension(bytes_per_s, self.dimensions()))

    def status(self) -> list[Host]:
        """Returns the hosts; empty if the lab is down."""
        found = []
        dimensions = self.dimensions()
        for i in range(self.hosts()):
            namespace = f"{self.name}-{i}"
            pids = _pids(namespace)
            rates = [rate_of(self._link(i, k)) for k in range(dimensions)]
            found.append(Host(namespace, _address(i), rates, pids))
        return found

    def run(self, command: Sequence[str]) -> NoReturn:
        """Replaces this process by a usbyterun with one rank on each host, on the host's cores.

        The first rank that fails ends all others, and its exit code is that of the process.

        Args:
            command: The program of the ranks, with its arguments.

        Raises:
            UsageError: The lab is not up.
        """
        size = self._require()
        shares = [",".join(map(str, share)) for share in core_shares(size)]
        inner = len(run_json("ip", "-j", "link", "show", "master", self._bridge(0, 0)))
        group = self._control_group.path
        env = os.environ | {
            "LAB_PREFIX": f"{self.name}-",
            "LAB_CGROUP": str(group) if group.is_dir() else "",
            "LAB_CORES": " ".join(shares),
            "LAB_POLICY": "--batch" if len(set(shares)) < size else "--other",
            "LAB_LOCAL_SIZE": str(inner if self.dimensions() > 1 else 1),
        }
        launcher = [sys.executable, "-m", "usbyte.launch", "-np", str(size)]
        sys.stdout.flush()
        os.execve(sys.executable, [*launcher, "sh", "-c", _ENTER, "sh", *command], env)

    def down(self, kill: bool = False) -> None:
        """Removes the cluster.

        Args:
            kill: Whether to kill the processes that still run in the lab.

        Raises:
            UsageError: The lab is not up, or processes still run in it and `kill` is False.
        """
        if not self._links():  # A lab that was left half built has links, and can be removed.
            self._require()
        pids = [pid for namespace in self._namespaces() for pid in _pids(namespace)]
        if pids and not kill:
            raise UsageError(
                f"lab '{self.name}' is in use by the processes {', '.join(map(str, pids))}; wait "
                f"for them, or end them too with `{self._command('down')} --kill`"
            )
        if pids:
            run_command("kill", "-KILL", *map(str, pids))
        self._remove()

    def _bridge(self, dimension: int, group: int) -> str:
        return f"{self.name}-b{dimension}g{group}"

    def _link(self, i: int, dimension: int) -> str:
        """Returns the name of the outer end of a host's link, which is outside the namespace."""
        return f"{self.name}-v{i}d{dimension}"

    def _add_host(self, i: int, shape: Sequence[int]) -> None:
        namespace = f"{self.name}-{i}"
        run_command("ip", "netns", "add", namespace)
        inside = ["ip", "-n", namespace]
        run_command(*inside, "link", "set", "lo", "up")
        for k in range(len(shape)):
            link = self._link(i, k)
            peer = ["type", "veth", "peer", "name", f"eth{k}", "netns", namespace]
            run_command("ip", "link", "add", link, *peer)
            bridge = self._bridge(k, i // math.prod(shape[: k + 1]))
            run_command("ip", "link", "set", link, "master", bridge, "up")
            run_command(*inside, "link", "set", f"eth{k}", "up")
        run_command(*inside, "addr", "add", f"{_address(i)}/32", "dev", INTERFACE)

    def _add_routes(self, i: int, shape: Sequence[int], congestion: str | None) -> None:
        # Congestion control is set by route, since in some containers the sysctl would change that
        # of the whole machine.
        control = ["congctl", congestion] if congestion is not None else []
        routes = [
            " ".join(
                ["route", "add", _address(j), "dev", f"eth{_dimension_between(i, j, shape)}",
                 "scope", "link", "src", _address(i), *control]
            )
            for j in range(math.prod(shape)) if j != i
        ]  # fmt: skip
        try:
            run_command("ip", "-n", f"{self.name}-{i}", "-batch", "-", stdin="\n".join(routes))
        except UsageError as error:
            known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
            if congestion is None or congestion in known:
                raise
            raise UsageError(
                f"the system does not take '{congestion}' as TCP's congestion control; it knows "
                + ", ".join(known)
            ) from error

    def _forget_connections(self, i: int) -> None:
        # Without this, TCP starts a connection with the metrics of earlier ones to the same host,
        # and a measurement would depend on those before it. In some containers /proc/sys is
        # read-only.
        inside = ["ip", "netns", "exec", f"{self.name}-{i}"]
        try:
            run_command(*inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save")
        except UsageError as error:
            log.warning("TCP connections of host %d reuse metrics of earlier ones: %s", i, error)

    def _name_hosts(self, i: int, hosts: int) -> None:
        # Some libraries look up the machine's own name for the address to listen on.
        lines = ["127.0.0.1 localhost", f"{_address(i)} {socket.gethostname()}"]
        lines += [f"{_address(k)} {self.name}-{k}" for k in range(hosts)]
        folder = _ETC / f"{self.name}-{i}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        except OSError as error:
            raise UsageError(
                f"cannot write '{folder / 'hosts'}': {error.strerror}; the lab needs {_ETC} to be "
                "writable"
            ) from error

    def _shape(self, hosts: int, rates: Sequence[float | None]) -> None:
        for i in range(hosts):
            inside = ["ip", "netns", "exec", f"{self.name}-{i}"]
            for k, bytes_per_s in enumerate(rates):
                for end in ([*inside, "tc"], f"eth{k}"), (["tc"], self._link(i, k)):
                    shape_link(*end, bytes_per_s)

    def _remove(self) -> None:
        # Links first: a namespace is removed in the background, and its links would stay meanwhile.
        for link in self._links():
            run_command("ip", "link", "del", link)
        for namespace in self._namespaces():
            run_command("ip", "netns", "del", namespace)
        for folder in _ETC.glob(f"{self.name}-*"):
            if re.fullmatch(rf"{self.name}-[0-9]+", folder.name):
                (folder / "hosts").unlink(missing_ok=True)
                folder.rmdir()
        self._control_group.remove()

    def _namespaces(self) -> list[str]:
        names = [entry["name"] for entry in run_json("ip", "-j", "netns", "list")]
        return [name for name in names if re.fullmatch(rf"{self.name}-[0-9]+", name)]

    def _links(self) -> list[str]:
        names = [entry["ifname"] for entry in run_json("ip", "-j", "link", "show")]
        return [
            name for name in names if re.fullmatch(rf"{self.name}-(v[0-9]+d|b[0-9]g)[0-9]+", name)
        ]

    def _require(self) -> int:
        hosts = self.hosts()
        if hosts == 0:
            up = self._command("up") + " --hosts 4 --rate 1gbit"
            raise UsageError(f"lab '{self.name}' is not up; start it with `{up}`")
        return hosts

    def _command(self, verb: str) -> str:
        return f"usbyte lab {verb}" + ("" if self.name == DEFAULT else f" --name {self.name}")


def _address(i: int) -> str:
    return f"10.98.0.{i + 1}"


def _dimension_between(i: int, j: int, shape: Sequence[int]) -> int:
    """Returns the outermost dimension in which the coordinates of two hosts differ."""
    places = (math.prod(shape[:k]) for k in range(len(shape)))
    return max(k for k, place in enumerate(places) if i // place != j // place)


def _by_dimension(
    bytes_per_s: float | Sequence[float | None] | None, dimensions: int
) -> list[float | None]:
    if bytes_per_s is None or isinstance(bytes_per_s, int | float):
        return [bytes_per_s] * dimensions
    if len(bytes_per_s) != dimensions:
        raise UsageError(
            f"the lab has {dimensions} dimensions, so give one rate or {dimensions}, not "
            f"{len(bytes_per_s)}"
        )
    return list(bytes_per_s)


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in run_command("ip", "netns", "pids", namespace).split()]

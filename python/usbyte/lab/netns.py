"""An emulated cluster on one machine.

Each host is a network namespace; all are joined by a bridge, and each link is shaped by tbf in both
directions. Host i of the lab NAME is 10.98.0.(i+1) on eth0, and called NAME-i. What is up is asked
of `ip` every time: there is no state file to go stale. Needs Linux, root, iproute2, util-linux, and
the kernel's bridge, veth and sch_tbf.

Each host computes on its own share of the cores. With fewer cores than hosts, several share one. A
message would then at once wake its receiver in the sender's place, who answers, and then Gloo's
thread in the sender, which spins for up to a tick of the scheduler on the lock that the sender
still holds: a small all_reduce takes several times as long as without. Hosts of a cluster cannot do
that to each other, so ranks that share a core run as batch jobs, which are not woken in one
another's place. The price: where layers really compute, messages wait for the scheduler's tick,
also those of the rank itself. What `benchmarks/compare.py` computes in place of an accelerator
gives way to them, also to other ranks': that is what the lab's control group is for.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from usbyte.errors import UsageError

log = logging.getLogger("usbyte")

#: Name of the lab that commands mean where none is given.
DEFAULT = "usbyte"
#: Interface of every host.
INTERFACE = "eth0"
# `ip netns exec` lays the files of the namespace's folder here over those of /etc.
_ETC = Path("/etc/netns")
#: More do not fit into one byte of the address.
MAX_HOSTS = 250

# A bucket of 1 ms lets a link reach its rate; the queue holds what 32 ms of it carry.
_BURST_S, _LEAST_BURST = 1e-3, 128 << 10
_QUEUE_S, _LEAST_QUEUE = 32e-3, 4 << 20

_CGROUPS = Path("/sys/fs/cgroup")
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_TRIES, _PAUSE_S = 100, 0.05  # until what was killed has left its control group

# Each rank enters the lab's control group, which cannot be seen from inside a host, then its host,
# on that host's cores. It must not look for the launcher's own store, which is outside.
_ENTER = (
    '[ -z "$LAB_CGROUP" ] || echo 0 > "$LAB_CGROUP/cgroup.procs"; '
    'cores=$(echo "$LAB_CORES" | cut -d " " -f $((RANK + 1))); '
    'exec ip netns exec "$LAB_PREFIX$RANK" taskset -c "$cores" chrt "$LAB_POLICY" 0 '
    "env -u LAB_PREFIX -u LAB_CGROUP -u LAB_CORES -u LAB_POLICY -u TORCHELASTIC_USE_AGENT_STORE "
    "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.98.0.1 GLOO_SOCKET_IFNAME=eth0 "
    'NCCL_SOCKET_IFNAME=eth0 "$@"'
)


@dataclass(frozen=True)
class Host:
    """One host of a lab.

    Attributes:
        namespace: Its network namespace.
        address: Its IPv4 address.
        bytes_per_s: Rate of its link in each direction; None if it is not shaped.
        pids: Processes that run in it.
    """

    namespace: str
    address: str
    bytes_per_s: float | None
    pids: list[int]


class Lab:
    """A cluster of the name `name`; several of different names do not see each other.

    Raises:
        UsageError: The name cannot be part of an interface's name, or this is not root on Linux
            with iproute2 and util-linux.
    """

    def __init__(self, name: str = DEFAULT) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]{0,7}", name):
            raise UsageError(
                f"lab {name!r}: a name has up to 8 lower-case letters and digits, a letter first"
            )
        if missing := unusable():
            raise UsageError(f"the lab cannot be used here: {missing}")
        self.name = name
        self._bridge = f"{name}-br"
        legacy = _CGROUPS / "cpu"  # of version 1
        self._cgroup = (legacy if legacy.is_dir() else _CGROUPS) / f"usbyte-lab-{name}"

    def hosts(self) -> int:
        """How many hosts are up."""
        return len(self._namespaces())

    def up(
        self, hosts: int, bytes_per_s: float | None = None, congestion: str | None = None
    ) -> None:
        """Starts the cluster.

        Args:
            hosts: How many.
            bytes_per_s: Of each link in each direction; None for as fast as it goes.
            congestion: TCP's congestion control, such as "cubic"; None for the system's default.

        Raises:
            UsageError: It is up already, or the system refuses; then nothing is left behind.
        """
        if not 1 <= hosts <= MAX_HOSTS:
            raise UsageError(f"a lab has 1 to {MAX_HOSTS} hosts, not {hosts}")
        if self._namespaces() or self._links():
            raise UsageError(
                f"lab '{self.name}' is up already, with {self.hosts()} hosts; end it with "
                f"`{self._command('down')}`, or name another with --name"
            )
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "link", "set", self._bridge, "up")
            for i in range(hosts):
                self._add_host(i)
                self._forget_connections(i)
                if congestion is not None:
                    self._control_congestion(i, congestion)
                self._name_hosts(i, hosts)
            if bytes_per_s is not None:
                self._shape(hosts, bytes_per_s)
            self._weigh_together()
        except BaseException:
            self._remove()
            raise

    def rate(self, bytes_per_s: float | None) -> None:
        """Shapes the links anew, also while ranks run; None ends shaping."""
        self._shape(self._require(), bytes_per_s)

    def status(self) -> list[Host]:
        """The hosts; empty if the lab is down."""
        found = []
        for i in range(self.hosts()):
            namespace = f"{self.name}-{i}"
            pids = _pids(namespace)
            shaping = _json("tc", "-j", "qdisc", "show", "dev", f"{self.name}-v{i}", "root")
            rate = next((q["options"]["rate"] for q in shaping if q["kind"] == "tbf"), None)
            found.append(Host(namespace, f"10.98.0.{i + 1}", rate, pids))
        return found

    def run(self, command: Sequence[str]) -> NoReturn:
        """Becomes a usbyterun that starts one rank of `command` on each host, on its own cores.

        The first rank that fails ends all others, and the exit status is its code.
        """
        size = self._require()
        shares = [",".join(map(str, share)) for share in _shares(size)]
        env = os.environ | {
            "LAB_PREFIX": f"{self.name}-",
            "LAB_CGROUP": str(self._cgroup) if self._cgroup.is_dir() else "",
            "LAB_CORES": " ".join(shares),
            "LAB_POLICY": "--batch" if len(set(shares)) < size else "--other",
        }
        launcher = [sys.executable, "-m", "usbyte.run", "-np", str(size)]
        sys.stdout.flush()
        os.execve(sys.executable, [*launcher, "sh", "-c", _ENTER, "sh", *command], env)

    def down(self, kill: bool = False) -> None:
        """Removes the cluster.

        Args:
            kill: Also ends what still runs in it.

        Raises:
            UsageError: It is not up, or something still runs in it and `kill` is not set.
        """
        if not self._links():  # also true of one that was left half built
            self._require()
        pids = [pid for namespace in self._namespaces() for pid in _pids(namespace)]
        if pids and not kill:
            raise UsageError(
                f"lab '{self.name}' is in use by the processes {', '.join(map(str, pids))}; wait "
                f"for them, or end them too with `{self._command('down')} --kill`"
            )
        if pids:
            _run("kill", "-KILL", *map(str, pids))
        self._remove()

    def _add_host(self, i: int) -> None:
        namespace, link = f"{self.name}-{i}", f"{self.name}-v{i}"
        _run("ip", "netns", "add", namespace)
        peer = ["type", "veth", "peer", "name", INTERFACE, "netns", namespace]
        _run("ip", "link", "add", link, *peer)
        _run("ip", "link", "set", link, "master", self._bridge, "up")
        inside = ["ip", "-n", namespace]
        _run(*inside, "addr", "add", f"10.98.0.{i + 1}/24", "dev", INTERFACE)
        _run(*inside, "link", "set", INTERFACE, "up")
        _run(*inside, "link", "set", "lo", "up")

    def _control_congestion(self, i: int, algorithm: str) -> None:
        # Of the route, since the sysctl belongs to the whole machine in some containers.
        route = ["10.98.0.0/24", "dev", INTERFACE, "proto", "kernel", "scope", "link"]
        route += ["src", f"10.98.0.{i + 1}", "congctl", algorithm]
        try:
            _run("ip", "-n", f"{self.name}-{i}", "route", "replace", *route)
        except UsageError as error:
            known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
            raise UsageError(
                f"the system does not take '{algorithm}' as TCP's congestion control; it knows "
                + known.read_text().strip().replace(" ", ", ")
            ) from error

    def _forget_connections(self, i: int) -> None:
        # Else a connection starts from what an earlier one to the same host met with, and who is
        # measured after whom decides. Some containers have /proc/sys read-only.
        inside = ["ip", "netns", "exec", f"{self.name}-{i}"]
        try:
            _run(*inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save")
        except UsageError as error:
            log.warning("connections of host %d inherit from earlier ones: %s", i, error)

    def _weigh_together(self) -> None:
        # Where the scheduler weighs sessions as wholes, and so ranks, no thread of one gives way to
        # those of another on the same core. Inside a control group sessions do not count.
        if not _AUTOGROUP.exists() or _AUTOGROUP.read_text().strip() == "0":
            return
        try:
            controllers = self._cgroup.parent / "cgroup.subtree_control"  # of version 2
            if controllers.exists() and "cpu" not in controllers.read_text().split():
                controllers.write_text("+cpu")
            if not (self._cgroup.parent / "cgroup.procs").exists():
                raise UsageError(f"{self._cgroup.parent} is no place for control groups")
            self._cgroup.mkdir(exist_ok=True)
            _run("sh", "-c", f"echo 0 > {self._cgroup / 'cgroup.procs'}")  # as ranks do
        except (OSError, UsageError) as error:
            log.warning("ranks that share a core do not give way to each other: %s", error)
            self._remove_cgroup()

    def _name_hosts(self, i: int, hosts: int) -> None:
        # Its own name too, by which some libraries look for the address to listen at.
        lines = ["127.0.0.1 localhost", f"10.98.0.{i + 1} {socket.gethostname()}"]
        lines += [f"10.98.0.{k + 1} {self.name}-{k}" for k in range(hosts)]
        folder = _ETC / f"{self.name}-{i}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        except OSError as error:
            raise UsageError(
                f"cannot write '{folder / 'hosts'}': {error.strerror}; the lab needs {_ETC} to be "
                "writable"
            ) from error

    def _shape(self, hosts: int, bytes_per_s: float | None) -> None:
        for i in range(hosts):
            inside = ["ip", "netns", "exec", f"{self.name}-{i}"]
            for end in ([*inside, "tc"], INTERFACE), (["tc"], f"{self.name}-v{i}"):
                _shape_link(*end, bytes_per_s)

    def _remove(self) -> None:
        # Links first: a namespace is torn down in the background, and its veth would linger.
        for link in self._links():
            _run("ip", "link", "del", link)
        for namespace in self._namespaces():
            _run("ip", "netns", "del", namespace)
        for folder in _ETC.glob(f"{self.name}-*"):
            if re.fullmatch(rf"{self.name}-[0-9]+", folder.name):
                (folder / "hosts").unlink(missing_ok=True)
                folder.rmdir()
        self._remove_cgroup()

    def _remove_cgroup(self) -> None:
        for _ in range(_TRIES):
            if not self._cgroup.is_dir():
                return
            try:
                self._cgroup.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise UsageError(f"cannot remove {self._cgroup}: {error.strerror}") from error
                time.sleep(_PAUSE_S)
        raise UsageError(f"something still runs in {self._cgroup}; end it, then remove that folder")

    def _namespaces(self) -> list[str]:
        names = [entry["name"] for entry in _json("ip", "-j", "netns", "list")]
        return [name for name in names if re.fullmatch(rf"{self.name}-[0-9]+", name)]

    def _links(self) -> list[str]:
        names = [entry["ifname"] for entry in _json("ip", "-j", "link", "show")]
        return [name for name in names if re.fullmatch(rf"{self.name}-(v[0-9]+|br)", name)]

    def _require(self) -> int:
        hosts = self.hosts()
        if hosts == 0:
            up = self._command("up") + " --hosts 4 --rate 1gbit"
            raise UsageError(f"lab '{self.name}' is not up; start it with `{up}`")
        return hosts

    def _command(self, verb: str) -> str:
        return f"usbyte lab {verb}" + ("" if self.name == DEFAULT else f" --name {self.name}")


def _shares(hosts: int) -> list[list[int]]:
    """The cores of each host, of those that this process may use, as many for each."""
    cores = sorted(os.sched_getaffinity(0), key=_place)
    if hosts > len(cores):
        return [[cores[i % len(cores)]] for i in range(hosts)]
    each = len(cores) // hosts
    return [cores[i * each : (i + 1) * each] for i in range(hosts)]


def _place(core: int) -> tuple[int, ...]:
    """Sorts the threads of one physical core beside each other, where the system tells."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        names = ("physical_package_id", "core_id")
        return (*(int((topology / name).read_text()) for name in names), core)
    except OSError:
        return (0, core, core)


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]


def unusable() -> str:
    """Why labs cannot be used here, and what to do; "" if they can."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux's network namespaces; use a Linux machine"
    tools = {"iproute2": ("ip", "tc"), "util-linux": ("taskset", "chrt")}
    for package, commands in tools.items():
        for command in commands:
            if shutil.which(command) is None:
                return f"the command '{command}' is missing; install {package}"
    if os.geteuid() != 0:
        return "network namespaces need root; run the command with sudo"
    return ""


def shape_own_link(bytes_per_s: float | None) -> None:
    """Shapes what this host of a lab sends, from inside, also while ranks run; None ends shaping.

    Raises:
        UsageError: This is not a host of a lab.
    """
    if missing := unusable():
        raise UsageError(f"the lab cannot be used here: {missing}")
    found = [a["local"] for link in _json("ip", "-j", "addr") for a in link["addr_info"]]
    if not any(address.startswith("10.98.0.") for address in found):
        raise UsageError(
            "this is no host of a lab, whose link could be shaped: start it by `usbyte lab run`"
        )
    _shape_link(["tc"], INTERFACE, bytes_per_s)


def _shape_link(tc: list[str], device: str, bytes_per_s: float | None) -> None:
    if bytes_per_s is None:
        shaped = _json(*tc, "-j", "qdisc", "show", "dev", device, "root")
        if any(q["kind"] == "tbf" for q in shaped):
            _run(*tc, "qdisc", "del", "dev", device, "root")
        return
    burst = max(_LEAST_BURST, round(bytes_per_s * _BURST_S))
    queue = max(_LEAST_QUEUE, round(bytes_per_s * _QUEUE_S))
    options = ["rate", f"{round(bytes_per_s * 8)}bit", "burst", f"{burst}b", "limit", f"{queue}b"]
    _run(*tc, "qdisc", "replace", "dev", device, "root", "tbf", *options)


def _json(*command: str) -> list[dict[str, Any]]:
    text = _run(*command).strip()
    return [entry for entry in json.loads(text or "[]") if entry]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}").strip()
        raise UsageError(
            f"`{' '.join(command)}` failed: {reason}. The lab needs the right to make network "
            "namespaces, and the kernel's bridge, veth and sch_tbf"
        )
    return done.stdout

# SPDX-License-Identifier: Apache-2.0
"""Cores, memory and network interfaces of this machine."""

import os
import platform
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from usbyte.cli.doctor.findings import Finding

_NET = Path("/sys/class/net")
_CGROUP = Path("/sys/fs/cgroup")
_SIOCGIFADDR = 0x8915


def hardware() -> Iterator[Finding]:
    """Yields the operating system, the cores and the RAM, with the limits of a container."""
    yield Finding("machine", "system", f"{platform.system()} {platform.release()}")
    cores = f"{os.cpu_count()}"
    if hasattr(os, "sched_getaffinity"):
        cores = f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    quota = _read(_CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        cores += f", limited to the time of {int(quota[0]) / int(quota[1]):.1f}"
    yield Finding("machine", "cores", f"{cores}, {platform.machine()}")
    with suppress(ValueError, OSError, AttributeError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = _read(_CGROUP / "memory.max")
        memory = f"{total / 2**30:.1f} GiB"
        if limit.isdigit() and int(limit) < total:
            memory += f", limited to {int(limit) / 2**30:.1f} GiB"
        yield Finding("machine", "memory", memory)


def interfaces() -> Iterator[Finding]:
    """Yields the network interfaces: state, speed, MTU and addresses."""
    addresses6 = _addresses6()
    for _, name in socket.if_nameindex():
        state = _read(_NET / name / "operstate")
        # The state of loopback is "unknown".
        facts = [state] if state not in ("", "unknown") else []
        speed = _read(_NET / name / "speed")
        # Virtual interfaces have no speed: the file has -1 or cannot be read.
        facts.append(f"{int(speed) / 1000:g} Gb/s" if speed.isdigit() else "speed unknown")
        mtu = _read(_NET / name / "mtu")
        facts += [f"MTU {mtu}"] if mtu else []
        facts += _addresses4(name) + addresses6.get(name, [])
        yield Finding("network", name, ", ".join(facts))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _addresses4(interface: str) -> list[str]:
    """Returns the first IPv4 address of an interface, if it has one."""
    with suppress(ImportError, OSError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", interface.encode()[:15])
            return [socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])]
    return []


def _addresses6() -> dict[str, list[str]]:
    """Returns the IPv6 addresses by interface, without link-local ones."""
    found: dict[str, list[str]] = {}
    for line in _read(Path("/proc/net/if_inet6")).splitlines():
        digits, _, _, scope, _, interface = line.split()
        if scope != "20":
            text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            found.setdefault(interface, []).append(text)
    return found

# SPDX-License-Identifier: Apache-2.0
"""Hosts, their slots, and the placement of ranks on hosts."""

import functools
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from usbyte._util import files
from usbyte.cluster_env import MOST_RANKS

_ITEM = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[\w.@%-]+)(?::(\d+))?", re.ASCII)
_SHOWN_CHARS = 60  # Longer words are cut in error messages.


@dataclass(frozen=True)
class Host:
    """A machine that ranks may run on.

    Attributes:
        name: The name as the user wrote it, without brackets; may begin with `user@` for ssh.
        slots: The most ranks on this host.
        local: Whether it is this host, whose ranks are started without ssh.
    """

    name: str
    slots: int
    local: bool


@dataclass(frozen=True)
class Placement:
    """The ranks `first_rank` .. `first_rank + count - 1` on one host."""

    host: Host
    first_rank: int
    count: int

    def __str__(self) -> str:
        last = self.first_rank + self.count - 1
        ranks = f"rank {last}" if self.count == 1 else f"ranks {self.first_rank}-{last}"
        return f"{self.host.name} ({'this host' if self.host.local else 'ssh'}): {ranks}"


def parse_hosts(text: str) -> list[Host]:
    """Parses the value of `-H`: `host:slots,host:slots,...`; the default is one slot.

    Raises:
        ValueError: An item is malformed, or a host has more than `MOST_RANKS` slots.
    """
    return _merge((_parse_item(item.strip(), "-H") for item in text.split(",")), "-H")


def parse_hostfile(path: Path) -> list[Host]:
    """Reads a host file: `host slots=2` or `host:2` on each line; `#` begins a comment.

    Raises:
        ValueError: The file cannot be read or names no host, a line is malformed, or a host has
            more than `MOST_RANKS` slots.
    """
    try:
        text = files.read_text(path).removeprefix("\ufeff")  # Some editors write this mark.
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the host file {path}: {error}") from error
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_parse_line(words, f"{path}, line {number}"))
    if not hosts:
        raise ValueError(f"the host file {path} names no host; write lines such as 'node1 slots=2'")
    return _merge(hosts, str(path))


def this_host(slots: int) -> list[Host]:
    """Returns the host list of a job that runs on this host only."""
    return [Host("localhost", slots, local=True)]


def place(hosts: list[Host], ranks: int) -> list[Placement]:
    """Places ranks on the slots in the order of the hosts; leaves out hosts without a rank.

    Raises:
        ValueError: There are fewer slots than ranks.
    """
    slots = sum(host.slots for host in hosts)
    if slots < ranks:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            f"-np {ranks} asks for more ranks than the {slots} slots of {listed}; "
            "lower -np or give the hosts more slots"
        )
    placements = []
    first = 0
    for host in hosts:
        count = min(host.slots, ranks - first)
        if count:
            placements.append(Placement(host, first, count))
            first += count
    return placements


def _parse_line(words: list[str], where: str) -> Host:
    host = _parse_item(words[0], where)
    for word in words[1:]:
        key, _, value = word.partition("=")
        is_number = re.fullmatch(r"[0-9]+", value)
        if key.replace("-", "_") not in ("slots", "max_slots") or not is_number:
            raise ValueError(f"{where}: {_shown(word)} is not understood; write 'host slots=N'")
        if key == "slots":
            host = replace(host, slots=_slots(value, where))
    return host


def _parse_item(text: str, where: str) -> Host:
    match = _ITEM.fullmatch(text)
    # ssh would read a name with a leading dash as an option.
    if match is None or text.startswith("-"):
        form = "'[address]:slots'" if text.count(":") > 1 else "'host' or 'host:slots'"
        raise ValueError(f"{where}: {_shown(text)} is no host; write {form}")
    name = match[1].strip("[]")
    return Host(name, _slots(match[2] or "1", where), _is_local(name))


def _slots(text: str, where: str) -> int:
    digits = text.lstrip("0")
    if not digits:
        raise ValueError(f"{where}: a host needs at least one slot")
    # The length is checked first, as int() raises ValueError for thousands of digits.
    if len(digits) > len(str(MOST_RANKS)) or int(digits) > MOST_RANKS:
        given = text if len(text) <= _SHOWN_CHARS else f"a number of {len(text)} digits"
        raise ValueError(f"{where}: a host may have {MOST_RANKS} slots at most, not {given}")
    return int(digits)


def _shown(text: str) -> str:
    """Returns the word in quotes for an error message, cut if it is long."""
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


def _is_local(name: str) -> bool:
    return name.lower() in _own_names()


@functools.cache
def _own_names() -> frozenset[str]:
    own = socket.gethostname()
    names = ("localhost", "127.0.0.1", own, own.partition(".")[0], socket.getfqdn())
    return frozenset(name.lower() for name in names)


def _merge(hosts: Iterable[Host], where: str) -> list[Host]:
    """Adds up the slots of a host that is listed several times, as Open MPI does.

    Two agents on one machine would assign the same local ranks, and so the same GPUs.
    """
    merged: dict[str, Host] = {}
    for host in hosts:
        key = "localhost" if host.local else host.name
        known = merged.get(key, replace(host, slots=0))
        merged[key] = replace(known, slots=known.slots + host.slots)
        if merged[key].slots > MOST_RANKS:
            raise ValueError(
                f"{where}: host {known.name} is listed several times, with more than {MOST_RANKS} "
                "slots together, which is the most that a host may have; lower them"
            )
    return list(merged.values())

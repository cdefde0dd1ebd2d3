"""Which ranks share a host."""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from usbyte.errors import EnvError
from usbyte.torch.runtime.format import name_ranks


class Place(NamedTuple):
    """Where a rank runs.

    Attributes:
        host: The name of its host.
        machine: Equal on the ranks that share a machine, and a container if they run in one.
        local_rank: As the launcher tells; None if it does not.
        local_size: As the launcher tells; None if it does not.
    """

    host: str
    machine: str
    local_rank: int | None
    local_size: int | None


def place_here(local_rank: int | None, local_size: int | None) -> Place:
    """That of this process."""
    host = socket.gethostname()
    # Machines that were cloned may share a name. Containers of one machine may share its name too,
    # and each of them may have devices of its own.
    parts = [host]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    machine = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return Place(host, machine, local_rank, local_size)


def local_ranks(places: Sequence[Place]) -> list[tuple[int, int]]:
    """By rank, its number among the ranks of its host, and how many those are.

    What launchers tell is taken; what they do not tell is counted.

    Args:
        places: By rank.

    Raises:
        EnvError: Ranks of one host are told the same number, or a number that is too large.
    """
    by_machine: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        by_machine.setdefault(place.machine, []).append(rank)
    found: list[tuple[int, int]] = [(0, 1)] * len(places)
    for ranks in by_machine.values():
        for index, rank in enumerate(ranks):
            told = places[rank]
            size = len(ranks) if told.local_size is None else told.local_size
            found[rank] = (index % size if told.local_rank is None else told.local_rank, size)
        _check(places, ranks, found)
    return found


def _check(places: Sequence[Place], ranks: Sequence[int], found: Sequence[tuple[int, int]]) -> None:
    """Refuses what cannot be true of the ranks of one machine."""
    sizes = Counter(found[rank][1] for rank in ranks)
    uses = Counter(found[rank] for rank in ranks)
    for rank in ranks:
        number, size = found[rank]
        # A machine may stand for several hosts of that many ranks, each with all the numbers.
        hosts = -(-sizes[size] // size)
        host = places[rank].host
        if number >= size:
            problem = f"rank {rank} has local rank {number}, but host '{host}' has {size} ranks"
        elif uses[number, size] > hosts:
            same = [other for other in ranks if found[other] == found[rank]]
            problem = f"{name_ranks(same)} on host '{host}' all have local rank {number} of {size}"
        else:
            continue
        raise EnvError(
            f"{problem}. Give the ranks of a host LOCAL_RANK from 0 on and LOCAL_WORLD_SIZE, or "
            "set neither of them on any rank: the ranks of each host are counted then. Where each "
            "process sees one device of its own, set LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1"
        )

# SPDX-License-Identifier: Apache-2.0
"""Finds out which ranks share a host, and their local ranks."""

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
        host: Host name.
        machine: Hash that is equal on ranks that share a machine and, in containers, a container.
        local_rank: LOCAL_RANK from the launcher; None if the launcher does not set it.
        local_size: LOCAL_WORLD_SIZE from the launcher; None if the launcher does not set it.
    """

    host: str
    machine: str
    local_rank: int | None
    local_size: int | None


def place_here(local_rank: int | None, local_size: int | None) -> Place:
    """Returns the place of this process."""
    host = socket.gethostname()
    # Cloned machines may share a host name. So may containers of one machine, each of which may
    # have devices of its own.
    parts = [host]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    machine = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return Place(host, machine, local_rank, local_size)


def local_ranks(places: Sequence[Place]) -> list[tuple[int, int]]:
    """Returns the local rank and the local size of every rank, by rank.

    Values from the launcher are used where it sets them; others are counted.

    Args:
        places: Place of each rank, by rank.

    Raises:
        EnvError: Ranks of one host have the same local rank, or one that is not below the local
            size.
    """
    by_machine: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        by_machine.setdefault(place.machine, []).append(rank)
    found: list[tuple[int, int]] = [(0, 1)] * len(places)
    for ranks in by_machine.values():
        for index, rank in enumerate(ranks):
            place = places[rank]
            size = len(ranks) if place.local_size is None else place.local_size
            found[rank] = (index % size if place.local_rank is None else place.local_rank, size)
        _check(places, ranks, found)
    return found


def _check(places: Sequence[Place], ranks: Sequence[int], found: Sequence[tuple[int, int]]) -> None:
    """Raises EnvError if the local ranks of one machine's ranks contradict each other."""
    sizes = Counter(found[rank][1] for rank in ranks)
    uses = Counter(found[rank] for rank in ranks)
    for rank in ranks:
        number, size = found[rank]
        # One machine may emulate several hosts of `size` ranks, each with the local ranks 0, 1, ...
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

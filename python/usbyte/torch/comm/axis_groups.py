# SPDX-License-Identifier: Apache-2.0
"""Process groups along the axes of a mesh, whose ranks differ in one coordinate only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.distributed as dist

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.comm.topology import sizes_of
from usbyte.torch.world.rank_group import RankGroup


def host_topology(rank_group: RankGroup) -> list[int]:
    """Returns the mesh of ranks in a host and hosts, as the launcher placed them.

    Returns:
        [ranks per host, number of hosts], the innermost dimension first. Either may be 1.

    Raises:
        UsageError: Hosts have different numbers of ranks, or the ranks of a host are not
            consecutive. Raised on every rank; the message names the hosts.
    """
    places = rank_group.places()
    rows = [(host, *place) for host, place in zip(rank_group.hosts, places, strict=True)]
    slots = rows[0][2]
    for rank, (host, local_rank, local_size) in enumerate(rows):
        if local_size != slots:
            raise UsageError(
                f"host '{rows[0][0]}' (rank 0) has {slots} ranks and host '{host}' (rank {rank}) "
                f"{local_size}: start as many on each"
            )
        first = rank - rank % slots
        if local_rank != rank - first or host != rows[first][0]:
            raise UsageError(
                f"rank {rank} is number {local_rank} of the {slots} on host '{host}' and rank "
                f"{first} number {rows[first][1]} on host '{rows[first][0]}', but ranks "
                f"{first}-{first + slots - 1} should share a host: fill one after the other"
            )
    return [slots, len(rows) // slots]


def axis_groups(
    rank_group: RankGroup, topology: _core.Topology | Sequence[int]
) -> list[dist.ProcessGroup | None]:
    """Makes this rank's process group along each axis of a mesh. Collective among `rank_group`.

    Every rank takes part in making the groups of all axes, in the same order. The groups have the
    backend and the timeout of `RankGroup.new_group`; nothing else uses them.

    Args:
        rank_group: The ranks that take part.
        topology: The mesh, or its sizes, innermost dimension first; the same on all ranks. A rank
            with coordinates c0, c1, ... in a mesh of sizes P0, P1, ... is rank c0 + c1 * P0 + ...

    Returns:
        The process group of each axis; None for an axis of size 1. It has the ranks that differ
        from this rank in that coordinate only, this rank included, in the order of the coordinate.
        The caller destroys the groups with torch.distributed.destroy_process_group.

    Raises:
        UsageError: The size of the mesh is not the number of ranks, or a dimension is below 1.
    """
    sizes = sizes_of(topology)
    if math.prod(sizes) != rank_group.size or min(sizes, default=0) < 1:
        raise UsageError(
            f"a mesh of sizes {_shape(sizes)} is not one of this job's {rank_group.size} ranks"
        )
    groups: list[dist.ProcessGroup | None] = []
    stride = 1
    for size in sizes:
        mine: dist.ProcessGroup | None = None
        for first in range(rank_group.size if size > 1 else 0):
            if first // stride % size == 0:
                members = range(first, first + size * stride, stride)
                mine = rank_group.new_group_of(members) or mine
        groups.append(mine)
        stride *= size
    return groups


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "of no dimension"

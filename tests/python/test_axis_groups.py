# SPDX-License-Identifier: Apache-2.0
"""Process groups along the dimensions of a mesh."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

import usbyte.torch as ub
from _hosts import on_hosts
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import MismatchError, UsageError
from usbyte.torch.comm.axis_groups import axis_groups, host_topology
from usbyte.torch.comm.factory import connect
from usbyte.torch.runtime.device import Device
from usbyte.torch.world.world import current


def members(rank, size, sizes, as_topology):
    ub.init()
    topology = sizes
    if as_topology:
        rows = [_core.Dimension(f"d{k}", n, 1e9) for k, n in enumerate(sizes)]
        topology = _core.Topology(rows)
    groups = axis_groups(current(), topology)
    sums = []
    for group in groups:
        one = torch.tensor([2.0**rank])
        if group is not None:
            dist.all_reduce(one, group=group)
        sums.append(one.item())
    ub.shutdown()
    return [dist.get_process_group_ranks(g) if g is not None else None for g in groups], sums


@pytest.mark.parametrize(
    ("sizes", "as_topology"), [([2, 2], True), ([1, 4], False), ([4, 1], False), ([3, 1, 2], True)]
)
def test_groups_are_the_lines_of_the_mesh(sizes, as_topology):
    mesh = _core.Topology([_core.Dimension(f"d{k}", n, 1e9) for k, n in enumerate(sizes)])
    for rank, (found, sums) in enumerate(run_ranks(mesh.ranks, members, sizes, as_topology)):
        groups = [mesh.axis_group(rank, k) for k in range(len(sizes))]
        assert found == [members if len(members) > 1 else None for members in groups]
        assert sums == [sum(2.0**r for r in members) for members in groups]


def hosts(rank, size, slots):
    on_hosts(rank, slots)
    ub.init()
    found = host_topology(current())
    ub.shutdown()
    return found


def test_hosts_and_slots_are_a_mesh():
    assert run_ranks(4, hosts, 2) == [[2, 2]] * 4


def unequal(rank, size):
    on_hosts(rank, 2)
    if rank == 2:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ub.init()
    with pytest.raises(UsageError, match=r"'host0' \(rank 0\) has 2 ranks and host 'host1' .* 1:"):
        host_topology(current())
    ub.shutdown()


def round_robin(rank, size):
    on_hosts(rank, 2)
    socket.gethostname = lambda: f"host{rank % 2}"
    os.environ["LOCAL_RANK"] = str(rank // 2)
    ub.init()
    with pytest.raises(UsageError, match="ranks 0-1 should share a host"):
        host_topology(current())
    ub.shutdown()


def other_meshes(rank, size):
    ub.init()
    with pytest.raises(
        MismatchError, match=r"topology is \[1, 2\] on rank 0 but \[2, 1\] on rank 1"
    ):
        connect(current(), Device(), [2, 1] if rank else [1, 2])
    with pytest.raises(UsageError, match="sizes 2x2 is not one of this job's 2 ranks"):
        axis_groups(current(), [2, 2])
    ub.shutdown()


def test_what_is_no_mesh_is_an_error_on_every_rank():
    run_ranks(3, unequal)
    run_ranks(4, round_robin)
    run_ranks(2, other_meshes)

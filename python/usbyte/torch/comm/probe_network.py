# SPDX-License-Identifier: Apache-2.0
"""Measures the network, with a communicator that is made for the measurement."""

from __future__ import annotations

import torch

from usbyte import _core
from usbyte.planning.cost_fit import Measured, fit
from usbyte.torch.comm.factory import connect
from usbyte.torch.comm.probe import LARGEST_BYTES, REPEATS, measure, measure_dimensions, share
from usbyte.torch.comm.topology import TopologyLike
from usbyte.torch.runtime.device import Device, device_at
from usbyte.torch.world.rank_group import RankGroup
from usbyte.torch.world.world import current

__all__ = ["probe"]


def probe(
    largest_bytes: int = LARGEST_BYTES,
    device: torch.device | str = "cpu",
    topology: TopologyLike | None = None,
) -> _core.NetworkModel:
    """Measures the network between all ranks. Collective.

    It times collectives on the path that training uses, with communicators made for this call.

    Args:
        largest_bytes: Upper limit of the payloads, in bytes; default 32 MiB. Payloads are chosen so
            that one operation takes about 0.05 s.
        device: Device of the payloads; default "cpu". Use the device of the parameters.
        topology: Dimensions of the network to measure as well, in the forms that
            `DistributedOptimizer(topology=...)` takes; default none.

    Returns:
        The network model, the same on every rank: cost lines of the collectives and, if `topology`
        is given, the speed of each dimension. A single rank gets a network model without costs.

    Raises:
        UsageError: Before `init`, or the arguments cannot be used.
        FaultError: The job has failed.
    """
    rank_group = current()
    if rank_group.size == 1:
        return _core.NetworkModel(1, [_core.AlphaBeta()])
    place = device_at(torch.device(device))
    rows, found = measure_apart(rank_group, place, topology, largest_bytes)
    network = fit(rank_group.size, rows).with_topology(found)
    return share(rank_group, "usbyte.probe", network)


def measure_apart(
    rank_group: RankGroup,
    device: Device,
    topology: TopologyLike | None,
    largest_bytes: int,
    *,
    repeats: int = REPEATS,
) -> tuple[list[Measured], _core.Topology | None]:
    """Measures the network with a communicator that exists only for this call. Collective.

    Args:
        rank_group: The ranks that take part.
        device: Device of the payloads.
        topology: Dimensions of the network to measure as well; None for none.
        largest_bytes: Upper limit of the payloads, in bytes.
        repeats: Measurements of each size; default 4.

    Returns:
        The timed collectives, and the topology with measured speeds, None if `topology` is None.
    """
    communicator = connect(rank_group, device, topology)
    try:
        rows = measure(rank_group, communicator, largest_bytes, repeats=repeats)
        return rows, measure_dimensions(rank_group, communicator, largest_bytes, repeats=repeats)
    finally:
        communicator.close()

# SPDX-License-Identifier: Apache-2.0
"""Makes the communicator of an engine: NCCL, Gloo or host-staged, flat or with dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.comm.axis_groups import axis_groups, host_topology
from usbyte.torch.comm.base import EngineCommunicator
from usbyte.torch.comm.direct_allreduce import direct_allreduce_max_bytes
from usbyte.torch.comm.hierarchical import MeshCommunicator
from usbyte.torch.comm.host_staged import HostStagedCommunicator
from usbyte.torch.comm.nccl import NcclCommunicator, NcclOffer, can_use_nccl, offer_nccl
from usbyte.torch.comm.process_group import TorchCommunicator
from usbyte.torch.comm.topology import (
    TopologyLike,
    canonical_topology,
    of_sizes,
    parse,
    sizes_of,
)
from usbyte.torch.runtime.device import CudaDevice, Device
from usbyte.torch.world.consistency import verify_same
from usbyte.torch.world.rank_group import RankGroup

_REMEDY = "Give all ranks the same arguments and environment."


@dataclass(frozen=True)
class ConnectionFacts:
    """What a rank tells the others before they connect.

    Attributes:
        settings: Values that must be equal on all ranks, by the names that users know.
        one_shot_bytes: USBYTE_ONE_SHOT_BYTES, which must be equal unless NCCL is used.
        nccl: Whether and how this rank can use NCCL; None if it does not try to.
    """

    settings: dict[str, Any]
    one_shot_bytes: int
    nccl: NcclOffer | None


class Connector:
    """Makes a communicator between all ranks of a rank group.

    CUDA gradients use NCCL if all ranks can, otherwise host memory and the backend of the CPU.
    `USBYTE_BACKEND` overrides this choice. The ranks exchange `facts` first, with others that they
    compare, in one round trip. Then all of them call `verify` and `connect`.

    Args:
        rank_group: The ranks that take part.
        device: Device of the gradients.
        topology: Dimensions that all_reduces may be routed through: "hosts", sizes, a file or a
            `Topology`; default none.

    Attributes:
        device: Device of the gradients.
        facts: What the other ranks must know about this one.
        nccl: The NCCL library; after `verify`, None if not all ranks can use it.
    """

    def __init__(
        self, rank_group: RankGroup, device: Device, topology: TopologyLike | None = None
    ) -> None:
        self._rank_group, self.device, self._topology = rank_group, device, topology
        self._mesh: _core.Topology | None = None
        env = rank_group.env
        settings: dict[str, Any] = {
            "topology": canonical_topology(topology, rank_group.size),
            "the parameters' device": device.torch_device.type,
            "USBYTE_BACKEND": env.backend or "not set",
            "USBYTE_CHUNK_BYTES": env.chunk_bytes,
        }
        self.nccl: _core.Nccl | None = None
        offer = None
        if isinstance(device, CudaDevice) and env.backend in ("", "nccl"):
            self.nccl, offer = offer_nccl(env, device, topology is not None)
            settings |= {
                "USBYTE_NCCL_COMMUNICATORS": env.nccl_communicators,
                "USBYTE_NCCL_MAX_CTAS": env.nccl_max_ctas,
                "USBYTE_NCCL_REGISTER": env.nccl_register,
            }
        self.facts = ConnectionFacts(settings, env.one_shot_bytes, offer)

    def verify(self, label: str, facts: Sequence[ConnectionFacts]) -> None:
        """Checks that all ranks can connect, and chooses how. Not collective.

        Args:
            label: Begins messages.
            facts: The facts of all ranks, in rank order.

        Raises:
            UsageError: The requested backend cannot be used, or `topology` is no mesh of these
                ranks; raised on every rank.
            MismatchError: Ranks have different devices or settings; raised on every rank.
        """
        rank_group, env = self._rank_group, self._rank_group.env
        verify_same(rank_group.ranks, label, [its.settings for its in facts], _REMEDY)
        self._mesh = _mesh(rank_group, self._topology)
        if env.backend == "nccl" and self.device.core is None:
            raise UsageError(
                "USBYTE_BACKEND=nccl moves CUDA tensors, and this model's parameters are on the "
                "CPU: move the model with model.cuda() before it is wrapped, or unset it"
            )
        offers = [its.nccl for its in facts if its.nccl is not None]
        if not can_use_nccl(offers, rank_group, env.backend == "nccl"):
            self.nccl = None
            sent = [{"USBYTE_ONE_SHOT_BYTES": its.one_shot_bytes} for its in facts]
            verify_same(rank_group.ranks, label, sent, _REMEDY)

    def connect(self) -> EngineCommunicator:
        """Makes the communicator; the caller closes it. Collective."""
        rank_group, device, mesh = self._rank_group, self.device, self._mesh
        if not isinstance(device, CudaDevice):
            return _on_host(rank_group, mesh)
        if self.nccl is not None:
            return _on_nccl(rank_group, self.nccl, device, mesh)
        return HostStagedCommunicator(
            device, _on_host(rank_group, mesh), rank_group.env.chunk_bytes
        )


def connect(
    rank_group: RankGroup, device: Device, topology: TopologyLike | None = None
) -> EngineCommunicator:
    """Makes a communicator between all ranks of a rank group. Collective.

    Args:
        rank_group: The ranks that take part.
        device: Device of the gradients.
        topology: As for `Connector`; default none.

    Returns:
        A communicator that the caller closes.

    Raises:
        UsageError: As from `Connector.verify`.
        MismatchError: As from `Connector.verify`.
    """
    connector = Connector(rank_group, device, topology)
    facts = rank_group.eager.allgather_json(
        "usbyte.connect", asdict(connector.facts), ConnectionFacts
    )
    connector.verify("usbyte", facts)
    return connector.connect()


def _mesh(rank_group: RankGroup, given: TopologyLike | None) -> _core.Topology | None:
    if given is None:
        return None
    parsed = parse(given, rank_group.size)
    if isinstance(parsed, str):
        parsed = host_topology(rank_group)
    return parsed if isinstance(parsed, _core.Topology) else of_sizes(parsed)


def _on_nccl(
    rank_group: RankGroup, nccl: _core.Nccl, device: CudaDevice, mesh: _core.Topology | None
) -> EngineCommunicator:
    if mesh is not None and not _has_dimensions(mesh):
        mesh = None
    flat, by_axis = NcclCommunicator.make(rank_group, nccl, device, mesh)
    if mesh is None:
        return flat
    slots = rank_group.env.nccl_communicators
    return MeshCommunicator(mesh, flat, by_axis, _has_speeds(mesh), slots=slots)


def _on_host(rank_group: RankGroup, mesh: _core.Topology | None) -> EngineCommunicator:
    flat = _flat(rank_group)
    if mesh is None or not _has_dimensions(mesh):
        return flat
    groups = axis_groups(rank_group, mesh)
    by_axis = [TorchCommunicator(group) if group is not None else None for group in groups]
    return MeshCommunicator(mesh, flat, by_axis, _has_speeds(mesh))


def _flat(rank_group: RankGroup) -> TorchCommunicator:
    # Gloo is the only backend in torch that supports tagged messages beside collectives.
    most = (
        direct_allreduce_max_bytes(rank_group.size, rank_group.env.one_shot_bytes)
        if rank_group.host_backend == "gloo"
        else 0
    )
    group = rank_group.new_group()
    return TorchCommunicator(group, rank_group.new_group() if most > 0 else None, most)


def _has_dimensions(mesh: _core.Topology) -> bool:
    return sum(size > 1 for size in sizes_of(mesh)) > 1


def _has_speeds(mesh: _core.Topology) -> bool:
    return mesh != of_sizes(sizes_of(mesh))

# SPDX-License-Identifier: Apache-2.0
"""Makes the communicator of an engine: NCCL, Gloo or host-staged, flat or with dimensions."""

from __future__ import annotations

from usbyte import _core
from usbyte.errors import MismatchError, UsageError
from usbyte.torch.comm.axis_groups import axis_groups, host_topology
from usbyte.torch.comm.base import EngineCommunicator
from usbyte.torch.comm.direct_allreduce import direct_allreduce_max_bytes
from usbyte.torch.comm.hierarchical import MeshCommunicator
from usbyte.torch.comm.host_staged import HostStagedCommunicator
from usbyte.torch.comm.nccl import NcclCommunicator, all_ranks_can
from usbyte.torch.comm.process_group import TorchCommunicator
from usbyte.torch.comm.topology import TopologyLike, of_sizes, parse, sizes_of
from usbyte.torch.runtime.device import CudaDevice, Device
from usbyte.torch.world.rank_group import RankGroup


def connect(
    rank_group: RankGroup, device: Device, topology: TopologyLike | None = None
) -> EngineCommunicator:
    """Makes a communicator between all ranks of a rank group. Collective.

    CUDA gradients use NCCL if all ranks can, otherwise host memory and the backend of the CPU.
    `USBYTE_BACKEND` overrides this choice.

    Args:
        rank_group: The ranks that take part.
        device: Device of the gradients.
        topology: Dimensions that all_reduces may be routed through: "hosts", sizes, a file or a
            `Topology`; default none.

    Returns:
        A communicator that the caller closes.

    Raises:
        UsageError: The requested backend cannot be used, or `topology` is no mesh of these ranks.
        MismatchError: Ranks have different devices or settings; raised on every rank.
    """
    mesh = None if topology is None else _mesh(rank_group, topology)
    _check_backend(rank_group, device)
    if not isinstance(device, CudaDevice):
        return _on_host(rank_group, mesh)
    env, nccl = rank_group.env, None
    if env.backend in ("", "nccl"):
        nccl = all_ranks_can(
            rank_group.eager, env, rank_group.rank, device, env.backend, mesh is not None
        )
    if nccl is not None:
        return _on_nccl(rank_group, nccl, device, mesh)
    return HostStagedCommunicator(device, _on_host(rank_group, mesh), env.chunk_bytes)


def _mesh(rank_group: RankGroup, given: TopologyLike) -> _core.Topology:
    parsed = parse(given, rank_group.size)
    if isinstance(parsed, str):
        parsed = host_topology(rank_group)
    return parsed if isinstance(parsed, _core.Topology) else of_sizes(parsed)


def _on_nccl(
    rank_group: RankGroup, nccl: _core.Nccl, device: CudaDevice, mesh: _core.Topology | None
) -> EngineCommunicator:
    flat = NcclCommunicator.of_all(rank_group, nccl, device)
    if mesh is None or not _has_dimensions(mesh):
        return flat
    by_axis = NcclCommunicator.along_axes(rank_group, nccl, mesh, device)
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
    sent = rank_group.env.one_shot_bytes
    others = rank_group.eager.allgather_bytes("usbyte.one_shot", str(sent).encode())
    for rank, other in enumerate(others):
        if int(other) != sent:
            raise MismatchError(
                f"USBYTE_ONE_SHOT_BYTES is {sent} on rank {rank_group.rank} but {int(other)} on "
                f"rank {rank}. Give all ranks the same environment."
            )
    # Gloo is the only backend in torch that supports tagged messages beside collectives.
    most = (
        direct_allreduce_max_bytes(rank_group.size, sent)
        if rank_group.host_backend == "gloo"
        else 0
    )
    group = rank_group.new_group()
    return TorchCommunicator(group, rank_group.new_group() if most > 0 else None, most)


def _check_backend(rank_group: RankGroup, device: Device) -> None:
    env = rank_group.env
    mine = [device.torch_device.type, env.backend, env.chunk_bytes]
    everyone = rank_group.eager.allgather_json("usbyte.backend", mine, tuple[str, str, int])
    for rank, other in enumerate(everyone):
        if list(other) != mine:
            raise MismatchError(
                f"parameters are on '{mine[0]}', USBYTE_BACKEND is '{mine[1]}' and "
                f"USBYTE_CHUNK_BYTES {mine[2]} on rank {rank_group.rank}, but '{other[0]}', "
                f"'{other[1]}' and {other[2]} on rank {rank}. Give all ranks the same."
            )
    if env.backend == "nccl" and device.core is None:
        raise UsageError(
            "USBYTE_BACKEND=nccl moves CUDA tensors, and this model's parameters are on the "
            "CPU: move the model with model.cuda() before it is wrapped, or unset it"
        )


def _has_dimensions(mesh: _core.Topology) -> bool:
    return sum(size > 1 for size in sizes_of(mesh)) > 1


def _has_speeds(mesh: _core.Topology) -> bool:
    return mesh != of_sizes(sizes_of(mesh))

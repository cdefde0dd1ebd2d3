# SPDX-License-Identifier: Apache-2.0
"""The engine's communicator on a network of several dimensions, for hierarchical all-reduces."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from usbyte import _core
from usbyte.torch.comm.nccl import NcclCommunicator
from usbyte.torch.comm.process_group import TorchCommunicator


class MeshCommunicator:
    """Runs ops with a route, and ops inside one dimension, on the mesh axis groups of this rank.

    All other ops run on the flat communicator.

    Args:
        topology: The mesh of all ranks.
        flat: Communicator between all ranks. Owned; nothing else uses it.
        axis_groups: Communicator of this rank's mesh axis group in each dimension; None where the
            group has only this rank. Owned. Either `flat` and all of them use NCCL, or none does.
        is_measured: Whether the speeds of the topology are known.
        slots: With NCCL: most ops that run at the same time; default 1.

    Attributes:
        topology: The mesh of all ranks.
        axis_groups: The communicators of the mesh axis groups, by dimension.
        is_measured: Whether the speeds of the topology are known.
        core: The C++ communicator that the engine calls.
        direct_allreduce_max_bytes: Largest payload of a direct all-reduce on `flat`, in bytes.
        device: Device of the gradients.
    """

    def __init__(
        self,
        topology: _core.Topology,
        flat: TorchCommunicator | NcclCommunicator,
        axis_groups: Sequence[TorchCommunicator | NcclCommunicator | None],
        is_measured: bool,
        slots: int = 1,
    ) -> None:
        self.topology, self._flat, self.axis_groups = topology, flat, axis_groups
        self.is_measured = is_measured
        self.direct_allreduce_max_bytes, self.device = flat.direct_allreduce_max_bytes, flat.device
        cores = [group.core if group is not None else None for group in axis_groups]
        self.core: _core.MeshCommunicator | _core.StreamMeshCommunicator
        if isinstance(flat, NcclCommunicator):
            assert flat.device.core is not None
            self.core = _core.StreamMeshCommunicator(
                topology, flat.device.core, flat.core, cores, slots
            )
        else:
            self.core = _core.MeshCommunicator(topology, flat.core, cores)

    @property
    def mesh(self) -> MeshCommunicator:
        """This communicator; communicators without dimensions return None."""
        return self

    def set_speeds(self, measured: _core.Topology) -> None:
        """Sets the speeds by which phases of ops are scheduled. No effect without NCCL.

        Args:
            measured: The topology with measured speeds, the same on all ranks.
        """
        if isinstance(self.core, _core.StreamMeshCommunicator):
            self.core.set_speeds(measured)

    def allocate(self, size: int) -> torch.Tensor:
        """Allocates a flat buffer of `size` bytes: shape [size], uint8, zeros."""
        return self._flat.allocate(size)

    def register(self, flat_buffer: torch.Tensor) -> None:
        """Sets the flat buffer (1-d, uint8) of the next engine, for all its communicators."""
        for communicator in self._all():
            communicator.register(flat_buffer)

    def close(self) -> None:
        """Closes all communicators. After a fault, aborts ops in flight."""
        for communicator in self._all():
            communicator.close()

    def _all(self) -> list[TorchCommunicator | NcclCommunicator]:
        return [self._flat, *(group for group in self.axis_groups if group is not None)]

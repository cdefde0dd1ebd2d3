# SPDX-License-Identifier: Apache-2.0
"""The engine's communicator on a network of several dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from usbyte import _core
from usbyte.torch.comm.nccl import NcclCommunicator
from usbyte.torch.comm.process_group import TorchCommunicator


class MeshCommunicator:
    """Carries out all_reduces with routes, and what goes along a line, over the lines of a mesh.

    All else goes flat.

    Args:
        topology: The mesh, of all ranks.
        flat: Between all ranks; nothing else uses it.
        lines: By dimension, between the ranks of this rank's line; None where it is alone. All over
            NCCL, or none.
        is_measured: The topology's speeds are known.
        slots: Over NCCL, how many operations run side by side at most.

    Attributes:
        topology: As given.
        lines: As given.
        is_measured: As given.
        core: For the engine.
        most_one_shot_bytes: The flat one's.
        device: That of the others.
    """

    def __init__(
        self,
        topology: _core.Topology,
        flat: TorchCommunicator | NcclCommunicator,
        lines: Sequence[TorchCommunicator | NcclCommunicator | None],
        is_measured: bool,
        slots: int = 1,
    ) -> None:
        self.topology, self._flat, self.lines = topology, flat, lines
        self.is_measured = is_measured
        self.direct_allreduce_max_bytes, self.device = flat.direct_allreduce_max_bytes, flat.device
        cores = [line.core if line is not None else None for line in lines]
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
        """Itself; None for communicators without dimensions."""
        return self

    def set_speeds(self, measured: _core.Topology) -> None:
        """By what was measured phases are launched from now on; the same on all ranks."""
        if isinstance(self.core, _core.StreamMeshCommunicator):
            self.core.set_speeds(measured)

    def allocate(self, size: int) -> torch.Tensor:
        """Memory of so many bytes for an arena, 1-d uint8, zeros."""
        return self._flat.allocate(size)

    def register(self, arena: torch.Tensor) -> None:
        """Names the buffer (1-d uint8) of an engine to come; addresses may point into it."""
        for communicator in self._all():
            communicator.register(arena)

    def close(self) -> None:
        """Ends all threads; what is still in flight, after a fault, is aborted."""
        for communicator in self._all():
            communicator.close()

    def _all(self) -> list[TorchCommunicator | NcclCommunicator]:
        return [self._flat, *(line for line in self.lines if line is not None)]

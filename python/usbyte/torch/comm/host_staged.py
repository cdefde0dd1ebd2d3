# SPDX-License-Identifier: Apache-2.0
"""Gradients on a CUDA device over a network of the host's."""

from __future__ import annotations

import torch

from usbyte import _core
from usbyte.torch.comm.base import EngineCommunicator, MeshLike
from usbyte.torch.runtime.device import Device


class HostStagedCommunicator:
    """The engine's communicator where ranks share a GPU or there is no NCCL.

    Args:
        device: Where gradients are.
        host: Carries the messages; nothing else uses it.
        chunk_bytes: Size of a message; while one is on the network, others are copied.

    Attributes:
        core: For the engine.
        most_one_shot_bytes: The host's.
        device: As given.
        host: As given.
    """

    def __init__(self, device: Device, host: EngineCommunicator, chunk_bytes: int) -> None:
        assert device.core is not None
        self.device, self.host = device, host
        self.core: _core.Communicator = _core.StagedCommunicator(
            device.core, host.core, chunk_bytes=chunk_bytes
        )
        self.direct_allreduce_max_bytes = host.direct_allreduce_max_bytes

    @property
    def mesh(self) -> MeshLike | None:
        """The host communicator's mesh."""
        return self.host.mesh

    def allocate(self, size: int) -> torch.Tensor:
        """Memory of so many bytes for an arena, 1-d uint8, zeros."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device.torch_device)

    def register(self, arena: torch.Tensor) -> None:
        """Any memory of the device will do."""

    def close(self) -> None:
        """Ends the host's threads."""
        self.host.close()

# SPDX-License-Identifier: Apache-2.0
"""The engine's communicator for CUDA gradients that are sent through host memory."""

from __future__ import annotations

import torch

from usbyte import _core
from usbyte.torch.comm.base import EngineCommunicator, MeshLike
from usbyte.torch.runtime.device import Device


class HostStagedCommunicator:
    """Sends CUDA gradients through host memory, where ranks share a GPU or NCCL is missing.

    Args:
        device: CUDA device of the gradients.
        host: Communicator for host memory. Owned; nothing else uses it.
        chunk_bytes: Size of a chunk in bytes. While one chunk is on the network, others are copied
            between device and host.

    Attributes:
        core: The C++ communicator that the engine calls.
        direct_allreduce_max_bytes: Largest payload of a direct all-reduce on `host`, in bytes.
        device: CUDA device of the gradients.
        host: Communicator for host memory.
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
        """The mesh of the host communicator; None if it has no dimensions."""
        return self.host.mesh

    def allocate(self, size: int) -> torch.Tensor:
        """Allocates a flat buffer of `size` bytes on the device: shape [size], uint8, zeros."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device.torch_device)

    def register(self, flat_buffer: torch.Tensor) -> None:
        """Does nothing: any memory of the device can be sent."""

    def close(self) -> None:
        """Closes the host communicator."""
        self.host.close()

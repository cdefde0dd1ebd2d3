# SPDX-License-Identifier: Apache-2.0
"""Protocols of the communicators that run the ops of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from usbyte import _core
from usbyte.torch.runtime.device import Device


class EngineCommunicator(Protocol):
    """A communicator between all ranks of a rank group. Only one engine uses it at a time.

    Attributes:
        direct_allreduce_max_bytes: Largest payload of a direct all-reduce, in bytes; 0 if there is
            no direct all-reduce.
    """

    direct_allreduce_max_bytes: int

    @property
    def device(self) -> Device:
        """Device of the gradients."""

    @property
    def core(self) -> Any:
        """The `_core.Communicator` that the engine calls."""

    @property
    def mesh(self) -> MeshLike | None:
        """The communicator with communicators along the axes of a mesh; None if there is none."""

    def allocate(self, size: int) -> torch.Tensor:
        """Allocates memory for a flat buffer.

        Args:
            size: Number of bytes.

        Returns:
            Tensor of shape [size], uint8, zeros, on the device of the gradients.
        """

    def register(self, flat_buffer: torch.Tensor) -> None:
        """Sets the flat buffer of the next engine. Addresses in its requests may point into it.

        Args:
            flat_buffer: The flat buffer, 1-d, uint8.
        """

    def close(self) -> None:
        """Ends all threads. After a fault, aborts ops in flight."""


class MeshLike(EngineCommunicator, Protocol):
    """A communicator that has a communicator along each axis of a mesh.

    Attributes:
        topology: The mesh of all ranks.
        is_measured: Whether the speeds of the topology are known. If not, the probe measures them.
    """

    topology: _core.Topology
    is_measured: bool

    @property
    def axis_groups(self) -> Sequence[EngineCommunicator | None]:
        """The communicator of this rank's mesh axis group along each axis; None for size 1."""

    def set_speeds(self, measured: _core.Topology) -> None:
        """Sets the speeds by which phases of ops are scheduled from now on.

        Args:
            measured: The topology with measured speeds, the same on all ranks.
        """

# SPDX-License-Identifier: Apache-2.0
"""What an engine needs of the communicator that carries out its operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from usbyte import _core
from usbyte.torch.runtime.device import Device


class EngineCommunicator(Protocol):
    """A communicator between all ranks of a group, used by one engine alone.

    Attributes:
        direct_allreduce_max_bytes: Largest payload that is all-reduced by direct exchange in one
            round; 0: none.
    """

    direct_allreduce_max_bytes: int

    @property
    def device(self) -> Device:
        """Where gradients are."""

    @property
    def core(self) -> Any:
        """The `_core.Communicator` that the engine calls."""

    @property
    def mesh(self) -> MeshLike | None:
        """The communicator that carries operations along axes of a mesh; None if there is none."""

    def allocate(self, size: int) -> torch.Tensor:
        """Allocates memory for a flat buffer.

        Args:
            size: Bytes.

        Returns:
            Shape [size], uint8, zeroed, where gradients are.
        """

    def register(self, arena: torch.Tensor) -> None:
        """Names the flat buffer of the engine to come; addresses may point into it.

        Args:
            arena: 1-d, uint8.
        """

    def close(self) -> None:
        """Ends all threads; after a fault, operations in flight are aborted."""


class MeshLike(EngineCommunicator, Protocol):
    """A communicator with a communicator along each axis of a mesh.

    Attributes:
        topology: The mesh of all ranks.
        is_measured: Whether the speeds of the topology are known.
    """

    topology: _core.Topology
    is_measured: bool

    @property
    def lines(self) -> Sequence[EngineCommunicator | None]:
        """By axis, the communicator among ranks that differ in that coordinate; None for size 1."""

    def set_speeds(self, measured: _core.Topology) -> None:
        """Schedules phases by measured speeds from now on; the same on all ranks."""

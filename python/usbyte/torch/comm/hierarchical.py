"""The engine's communicator on a network of several dimensions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from usbyte import _core
from usbyte._util import files
from usbyte.errors import UsageError
from usbyte.torch.comm.nccl import NcclCommunicator
from usbyte.torch.comm.process_group import TorchCommunicator
from usbyte.torch.comm.topology import sizes_of

#: What users give: "hosts", sizes such as "2x4" or [2, 4], the innermost first, the path of a JSON
#: file of a topology or a network that `usbyte probe --dimensions` has written, or a topology.
TopologyLike = str | Sequence[int] | _core.Topology

_SIZES = re.compile(r"\d+(x\d+)*")


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


def parse(given: TopologyLike, ranks: int) -> str | list[int] | _core.Topology:
    """What a user gave: "hosts", sizes or, if speeds are given too, a topology.

    Raises:
        UsageError: It is none of these, or not one of so many ranks.
    """
    if isinstance(given, str) and given != "hosts":
        given = _from_text(given)
    if isinstance(given, str):
        return given
    sizes = sizes_of(given)
    if min(sizes, default=0) < 1 or math.prod(sizes) != ranks:
        shape = "x".join(map(str, sizes)) or "no dimensions"
        raise UsageError(f"topology {shape} is not one of this job's {ranks} ranks")
    return given if isinstance(given, _core.Topology) else sizes


def canonical_topology(given: TopologyLike | None, ranks: int) -> str:
    """What `parse` makes of it, or says of it, in words that differ where it does."""
    try:
        parsed = None if given is None else parse(given, ranks)
    except UsageError as error:
        return str(error)
    return parsed.to_json() if isinstance(parsed, _core.Topology) else str(parsed)


def _from_text(text: str) -> list[int] | _core.Topology:
    if _SIZES.fullmatch(text):
        return [int(size) for size in text.split("x")]
    try:
        content = files.read_text(Path(text))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"topology {text!r} is neither 'hosts', nor sizes such as '2x4', nor a file that can "
            f"be read ({reason})"
        ) from None
    try:
        if '"usbyte-network-1"' in content:
            measured = _core.NetworkModel.from_json(content).topology
            if measured is None:
                raise UsageError("the network has no dimensions; probe it with --dimensions")
            return measured
        return _core.Topology.from_json(content)
    except UsageError as error:
        raise UsageError(f"topology '{text}': {error}") from None


def of_sizes(sizes: Sequence[int]) -> _core.Topology:
    """A mesh whose speeds are not known yet."""
    names = ["inside", "between"] if len(sizes) == 2 else [f"d{i}" for i in range(len(sizes))]
    return _core.Topology(
        [_core.Dimension(name, size, 1.0) for name, size in zip(names, sizes, strict=True)]
    )

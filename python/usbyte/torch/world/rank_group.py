# SPDX-License-Identifier: Apache-2.0
"""What the layers above ask of the ranks that share gradients, be they all or some of the job's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from usbyte import _core
from usbyte.torch.fault.decision import RankProgress, RecoveryDecision
from usbyte.torch.reduce_op import ReduceOp


class Participant(Protocol):
    """An optimizer, as the world sees it: it takes part in timelines, faults and shutdown."""

    @property
    def label(self) -> str:
        """Name, the same on all ranks."""

    @property
    def sends(self) -> bool:
        """True while other ranks wait for what this optimizer sends."""

    def drain(self) -> None:
        """Applies every pending update."""

    def states(self) -> dict[str, dict[str, Any]]:
        """Progress by label, for messages about faults."""

    def set_timeline(self, writer: _core.TimelineWriter | None) -> None:
        """Records from the next step on; None stops."""

    def hold(self, message: str) -> None:
        """After a fault: reads of parameters wait from now on, until `settle_fault`."""

    def fail(self, message: str) -> None:
        """After `hold`: every wait raises FaultError with this message."""

    def left(self) -> RankProgress | None:
        """After `hold`: which step the parameters have; None if nothing was held."""

    def settle_fault(self, verdict: str, judgement: RecoveryDecision) -> None:
        """Releases or refuses the reads that `hold` has made wait."""

    def orphan(self) -> list[Any]:
        """After a fork, in the child: objects with threads that do not exist there."""

    def close(self, whole_state: bool = True) -> None:
        """Ends the engine. Collective."""


class OrphanedEngine(Protocol):
    """An engine whose optimizer the garbage collector has taken before all ranks closed it.

    Attributes:
        rank_group: The ranks that it connects.
        label: Of the optimizer, the same on all ranks.
        orphaned: True once its optimizer is gone.
    """

    rank_group: RankGroup
    label: str
    orphaned: bool

    def status(self) -> dict[str, Any]:
        """Progress, for messages about faults."""

    def fail(self, message: str) -> None:
        """Ends every wait with FaultError(message)."""

    def stop_timeline(self) -> None:
        """Writes out what is complete and stops recording."""

    def close(self) -> None:
        """Ends all threads. Collective."""


class EagerCollectives(Protocol):
    """Blocking collectives among the group's ranks, matched by their names."""

    def allreduce(self, label: str, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduces a tensor in place."""

    def allgather(self, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the tensors of all ranks along the first dimension."""

    def allgather_bytes(self, label: str, payload: bytes) -> list[bytes]:
        """Gathers a byte string of any length from every rank, in rank order."""

    def allgather_json(self, label: str, value: Any, kind: Any) -> list[Any]:
        """Gathers a value of the type `kind` from every rank, in rank order."""

    def broadcast_bytes(self, label: str, payload: bytes, root: int) -> bytes:
        """Returns the root's byte string; other ranks' payloads are ignored."""

    def broadcast_json(self, label: str, value: Any, root: int, kind: Any) -> Any:
        """Returns the root's value of the type `kind`."""

    def fail(self, message: str) -> None:
        """Ends every pending and later operation with FaultError(message)."""


class RankGroup(Protocol):
    """The ranks that share gradients: `World`, or a `Subgroup` of it.

    Attributes:
        rank: This process's position, 0 <= rank < size.
        size: Number of ranks.
        ranks: The same ranks' numbers in the world, ascending.
        local_rank: Position among the group's ranks on this host.
        local_size: The group's ranks on this host.
        machines: By rank, an identity of its host; equal where ranks share one.
        env: The USBYTE_* settings.
        store: Keys that only these ranks use.
    """

    env: _core.Env
    rank: int
    size: int
    ranks: list[int]
    local_rank: int
    local_size: int
    machines: list[str]
    store: dist.Store

    @property
    def eager(self) -> EagerCollectives:
        """Collectives outside of the plan."""

    @property
    def host_backend(self) -> str:
        """Backend of torch.distributed for tensors on the CPU."""

    def new_group(self) -> dist.ProcessGroup:
        """Makes a process group over these ranks that nothing else uses. Collective."""

    def new_group_of(
        self, ranks: Sequence[int], backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Makes a process group over some of these ranks; None on the others. Collective.

        Args:
            ranks: Positions in this group.
            backend: Default: `host_backend`.
        """

    def next_label(self) -> str:
        """Returns the next optimizer's name, the same on all ranks."""

    def add(self, optimizer: Participant) -> None:
        """Lets the optimizer take part in timelines, faults and shutdown."""

    def adopt_orphan(self, engine: OrphanedEngine) -> None:
        """Takes over an engine that all ranks still have to close; any thread may call this."""

    def close_orphans(self) -> None:
        """Closes the engines that are orphaned on all ranks. Collective."""

    def check(self) -> None:
        """Raises FaultError after a fault."""

    def warn(self, text: str) -> None:
        """Logs a warning that names this rank."""

    def query_stragglers(self, topic: str, text: str) -> str:
        """Adds the ranks that are behind to a warning, if this rank is the first to ask."""

    def report_fault(self, noticed: str) -> str:
        """Asks the other ranks what happened; returns what every rank is going to raise."""

    def close(self) -> None:
        """Ends the threads that belong to the group."""

# SPDX-License-Identifier: Apache-2.0
"""Protocols of a rank group: the ranks that share gradients, which are all ranks or a subgroup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from usbyte import _core
from usbyte.torch.fault.decision import RankProgress, RecoveryDecision
from usbyte.torch.reduce_op import ReduceOp
from usbyte.torch.world.step_report import StepReport


class Participant(Protocol):
    """What the world calls on an optimizer: for timelines, faults, forks, joins and shutdown."""

    @property
    def label(self) -> str:
        """Name of the optimizer, the same on all ranks."""

    @property
    def size(self) -> int:
        """Number of ranks that share gradients."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that the script uses; None once it was garbage-collected."""

    @property
    def sends(self) -> bool:
        """Whether other ranks wait for gradients or parameters of this optimizer."""

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Returns the parameters whose gradients are sent, with their names."""

    def names_of_groups(self) -> list[list[str]] | None:
        """Returns the given parameter names by parameter group; None if a parameter has none."""

    def join_with_zeros(self) -> None:
        """Contributes zeros to the steps of other ranks until all ranks have joined. Collective."""

    def drain(self) -> None:
        """Applies every pending update and waits for gradients in flight."""

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns the progress by label, for messages about faults."""

    def set_timeline(self, writer: _core.TimelineWriter | None) -> None:
        """Records into `writer` from the next step on; None stops."""

    def block_reads(self, verdict: str) -> None:
        """After a fault: blocks reads of parameters until `apply_decision`.

        Args:
            verdict: The fault verdict.
        """

    def fail(self, verdict: str) -> None:
        """After `block_reads`: makes every wait raise FaultError(verdict)."""

    def progress(self) -> RankProgress | None:
        """After `block_reads`: returns this rank's progress; None if no reads were blocked."""

    def apply_decision(self, verdict: str, decision: RecoveryDecision) -> None:
        """Ends the block: reads of parameters go on, or raise FaultError.

        Args:
            verdict: The fault verdict.
            decision: Whether this rank's parameters are usable.
        """

    def orphan(self) -> list[Any]:
        """In a forked child: returns the objects whose threads do not exist there.

        These objects must never be destroyed in the child.
        """

    def close(self, whole_state: bool) -> None:
        """Applies pending updates, unless communication has failed; then ends the engine.

        Collective.

        Args:
            whole_state: With a sharded optimizer: whether the wrapped optimizer gets its whole
                state back.
        """


class OrphanedEngine(Protocol):
    """An engine whose optimizer was garbage-collected before all ranks closed it.

    Attributes:
        rank_group: The ranks that the engine connects.
        label: Name of the optimizer, the same on all ranks.
        orphaned: Whether the optimizer was garbage-collected.
    """

    rank_group: RankGroup
    label: str
    orphaned: bool

    def status(self) -> dict[str, Any]:
        """Returns the progress of the engine, for messages about faults."""

    def fail(self, message: str) -> None:
        """Makes every wait raise FaultError(message)."""

    def stop_timeline(self) -> None:
        """Writes the completed part of the timeline and stops recording."""

    def close(self) -> None:
        """Ends all threads. Collective."""


class EagerCollectives(Protocol):
    """Blocking eager collectives among the ranks of a rank group, matched by `label`."""

    def allreduce(self, label: str, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduces a tensor over the ranks, in place."""

    def allgather(self, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the tensors of all ranks along the first dimension."""

    def allgather_bytes(self, label: str, payload: bytes) -> list[bytes]:
        """Gathers a byte string of any length from every rank, in rank order."""

    def allgather_json(self, label: str, value: Any, kind: Any) -> list[Any]:
        """Gathers a value from every rank, in rank order.

        Args:
            label: Name of the collective.
            value: A value that JSON can represent.
            kind: Type that every rank's value is checked against and converted to.
        """

    def broadcast_bytes(self, label: str, payload: bytes, root: int) -> bytes:
        """Returns the root's byte string; other ranks' payloads are ignored."""

    def broadcast_json(self, label: str, value: Any, root: int, kind: Any) -> Any:
        """Returns the root's value; other ranks' values are ignored.

        Args:
            label: Name of the collective.
            value: A value that JSON can represent.
            root: Rank that sends.
            kind: Type that the value is checked against and converted to.
        """

    def fail(self, message: str) -> None:
        """Makes every pending and later collective raise FaultError(message)."""


class RankGroup(Protocol):
    """The ranks that share gradients: the `World`, or a `Subgroup` of it.

    Attributes:
        rank: Position of this process in the rank group, 0 <= rank < size.
        size: Number of ranks in the rank group.
        ranks: Rank in the world of each position, ascending.
        local_rank: Position among the rank group's ranks on this host.
        local_size: Number of the rank group's ranks on this host.
        machines: Identity of each rank's host; equal for ranks on the same host.
        hosts: Name of each rank's host.
        env: The USBYTE_* settings.
        store: Key-value store whose keys only these ranks use.
    """

    env: _core.Env
    rank: int
    size: int
    ranks: list[int]
    local_rank: int
    local_size: int
    machines: list[str]
    hosts: list[str]
    store: dist.Store

    @property
    def report(self) -> StepReport | None:
        """Writes the page of USBYTE_REPORT; None on ranks that write none."""

    @property
    def eager(self) -> EagerCollectives:
        """Eager collectives among these ranks."""

    def places(self) -> list[tuple[int, int]]:
        """Returns (local rank, number of these ranks on the host) for each rank."""

    @property
    def host_backend(self) -> str:
        """Backend of torch.distributed for tensors on the CPU."""

    def new_group(self) -> dist.ProcessGroup:
        """Makes a process group over these ranks that nothing else uses. Collective."""

    def new_group_of(
        self, ranks: Sequence[int], backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Makes a process group over some of these ranks. Collective among all of them.

        Args:
            ranks: Positions in this rank group.
            backend: Backend of torch.distributed; default `host_backend`.

        Returns:
            The process group; None on ranks that are not in `ranks`.
        """

    def next_label(self) -> str:
        """Returns the next optimizer's name, the same on all ranks."""

    def add(self, participant: Participant) -> None:
        """Registers an optimizer for timelines, faults and shutdown. Keeps a weak reference."""

    def adopt_orphan(self, engine: OrphanedEngine) -> None:
        """Takes ownership of an engine until all ranks can close it. Any thread may call this."""

    def find_orphans(self) -> list[str]:
        """Returns the labels of the engines that are orphaned on this rank, for `close_orphans`."""

    def close_orphans(self, labels: Sequence[Sequence[str]]) -> None:
        """Closes the engines that are orphaned on all ranks. Collective.

        Args:
            labels: The results of `find_orphans` of all ranks.
        """

    def check(self) -> None:
        """Raises FaultError if there was a fault."""

    def warn(self, text: str) -> None:
        """Logs a warning that names this rank."""

    def query_stragglers(self, topic: str, text: str) -> str:
        """Returns a warning with the ranks that are behind added.

        Args:
            topic: Only the first rank that asks about a topic gets the ranks.
            text: The warning.
        """

    def report_fault(self, noticed: str) -> str:
        """Diagnoses a fault with the other ranks; returns the fault verdict that all ranks raise.

        Args:
            noticed: What went wrong on this rank.
        """

    def close(self) -> None:
        """Ends the threads of the rank group."""

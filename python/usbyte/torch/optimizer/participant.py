# SPDX-License-Identifier: Apache-2.0
"""What the world calls on an optimizer: for timelines, faults, forks, joins and shutdown."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from usbyte import _core
from usbyte.torch.fault.decision import RankProgress, RecoveryDecision
from usbyte.torch.optimizer.session import OptimizerSession


class OptimizerParticipant:
    """Implements the world's `Participant` for a DistributedOptimizer.

    The optimizer owns its participant, and the world refers to it weakly.

    Args:
        session: What the optimizer trains with.
        optimizer: The optimizer that the script uses; not kept alive.
    """

    def __init__(self, session: OptimizerSession, optimizer: torch.optim.Optimizer) -> None:
        self._session, self._optimizer = session, weakref.ref(optimizer)

    @property
    def label(self) -> str:
        """Name of the optimizer, the same on all ranks."""
        return self._session.label

    @property
    def size(self) -> int:
        """Number of ranks that share gradients."""
        return self._session.rank_group.size

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that the script uses; None once it was garbage-collected."""
        return self._optimizer()

    @property
    def sends(self) -> bool:
        """Whether other ranks wait for gradients of this optimizer."""
        return self._session.live is not None

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters whose gradients are sent, with their names."""
        return self._session.named()

    def join_with_zeros(self) -> None:
        """Contributes zeros to the steps of other ranks until all ranks have joined. Collective."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._session.check_usable()
        while (controller := self._session.live) is not None:
            controller.drain()
            optimizer.zero_grad()
            if not controller.contribute_zeros():
                break
            optimizer.step()

    def drain(self) -> None:
        """Applies every pending update and waits for gradients in flight."""
        if (controller := self._session.live) is not None:
            controller.drain()
            controller.up_to_date()

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns the progress by label, for messages about faults."""
        executor = self._session.executor
        return {self.label: executor.status() if executor is not None else {}}

    def set_timeline(self, writer: _core.TimelineWriter | None) -> None:
        """Records into `writer` from the next step on; None stops."""
        if (controller := self._session.live) is not None:
            controller.executor.set_timeline(writer)

    def block_reads(self, verdict: str) -> None:
        """After a fault: blocks reads of parameters until `apply_decision`."""
        session = self._session
        if (controller := session.live) is not None:
            session.update_guard.block_reads(
                verdict, session.param_table.params, controller.clean_up
            )

    def fail(self, verdict: str) -> None:
        """After `block_reads`: makes every wait raise FaultError(verdict)."""
        if (executor := self._session.executor) is not None:
            executor.fail(verdict)

    def progress(self) -> RankProgress | None:
        """After `block_reads`: returns this rank's progress; None if no reads were blocked."""
        controller = self._session.controller
        return self._session.update_guard.progress(
            controller.examine if controller is not None else _examine_alone
        )

    def apply_decision(self, verdict: str, decision: RecoveryDecision) -> None:
        """Ends the block: reads of parameters go on, or raise FaultError."""
        self._session.update_guard.apply_decision(verdict, decision)

    def orphan(self) -> list[Any]:
        """In a forked child: returns the objects whose threads do not exist there."""
        controller = self._session.live
        return [self] if controller is None else [self, controller.executor.orphan()]

    def close(self, whole_state: bool) -> None:
        """Applies pending updates, unless communication has failed; then ends the engine."""
        self._session.close(whole_state)


def _examine_alone(is_quiet: bool) -> tuple[bool, bool]:
    """For `UpdateGuard.progress`: a single rank's step is applied completely or not at all."""
    return not is_quiet, False

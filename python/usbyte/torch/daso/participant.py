# SPDX-License-Identifier: Apache-2.0
"""What the world calls on a DasoOptimizer: that of its node's optimizer, and node averagings."""

from __future__ import annotations

from typing import Any

import torch

from usbyte.torch.daso.param_averaging import ParamAveraging
from usbyte.torch.fault.decision import RankProgress
from usbyte.torch.optimizer.session import OptimizerParticipant, OptimizerSession


class DasoParticipant(OptimizerParticipant):
    """Adds node averagings to the participant of the optimizer that trains inside the node.

    Args:
        session: What the node's DistributedOptimizer trains with.
        optimizer: The DasoOptimizer; not kept alive.
        averaging: The node averagings; None if there is one node only.
    """

    def __init__(
        self,
        session: OptimizerSession,
        optimizer: torch.optim.Optimizer,
        averaging: ParamAveraging | None,
    ) -> None:
        super().__init__(session, optimizer)
        self._averaging = averaging

    @property
    def sends(self) -> bool:
        """Whether other ranks wait for data of this optimizer: gradients, or parameters."""
        return super().sends or (self._averaging is not None and not self._session.closed)

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns progress by label, with that of the last node averaging that has begun."""
        states = super().states()
        return states if self._averaging is None else states | self._averaging.status()

    def block_reads(self, verdict: str) -> None:
        """After a fault: blocks reads of parameters until `apply_decision`."""
        super().block_reads(verdict)
        session, guard = self._session, self._session.update_guard
        if self._averaging is not None and guard.recovery is None and not session.closed:
            # A node of one rank, whose updates are never deferred.
            guard.block_reads(verdict, session.param_table.params, lambda _: guard.forget())

    def fail(self, verdict: str) -> None:
        """After `block_reads`: makes every wait raise FaultError(verdict)."""
        super().fail(verdict)
        if self._averaging is not None:
            self._averaging.fail(verdict)

    def progress(self) -> RankProgress | None:
        """After `block_reads`: returns this rank's progress; None if no reads were blocked.

        A step is complete only after the sums of other nodes that were due have been merged.
        """
        progress = super().progress()
        if progress is None or self._averaging is None:
            return progress
        return self._averaging.limit(progress)

    def close(self, whole_state: bool) -> None:
        """Merges a node averaging in flight, unless communication failed; then ends all threads."""
        averaging, controller = self._averaging, self._session.live
        try:
            if averaging is not None and (controller is None or controller.is_healthy):
                averaging.finish()
        finally:
            try:
                super().close(whole_state)
            finally:
                if averaging is not None:
                    averaging.close()

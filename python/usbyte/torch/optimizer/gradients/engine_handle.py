# SPDX-License-Identifier: Apache-2.0
"""Ownership of an engine and its resources, which may outlive the optimizer."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from typing import Any

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.comm.base import EngineCommunicator
from usbyte.torch.comm.sparse_exchange import TorchExchange
from usbyte.torch.world.rank_group import RankGroup


class EngineHandle:
    """An engine, its communicator and exchange, and the memory that the engine reads by address.

    It refers neither to parameters nor to the plan executor. The garbage collector can therefore
    free a model and its optimizer while the engine still works. The rank group then adopts the
    handle and closes it.

    Args:
        rank_group: Ranks that share the gradients.
        label: Name of the optimizer, equal on all ranks.
        communicator: Connects the ranks; owned by this handle and used by this engine only.

    Attributes:
        rank_group: Ranks that share the gradients.
        label: Name of the optimizer, equal on all ranks.
        communicator: Connects the ranks; closed by `close`.
        exchange: Exchange for sparse gradients; None until a plan needs it. Closed by `close`.
        orphaned: True if nothing on this rank waits for the engine any more, so that its faults are
            not reported. Default False.
    """

    def __init__(self, rank_group: RankGroup, label: str, communicator: EngineCommunicator) -> None:
        self.rank_group, self.label, self.communicator = rank_group, label, communicator
        self.exchange: TorchExchange | None = None
        self.orphaned = False
        self._engine: _core.Engine | None = None
        self._memory: tuple[object, ...] = ()

    def attach_engine(self, engine: _core.Engine, *memory: object) -> None:
        """Sets the engine, and `memory` that must live as long as the engine works."""
        self._engine, self._memory = engine, memory

    def on_stall(self, text: str) -> str:
        """Adds the ranks that are behind to the text of a stall warning.

        Called on the engine's thread when an op has not completed for `stall_warning_s`.

        Args:
            text: What this rank knows about the stall.

        Returns:
            The text to log.
        """
        steps = self._engine.steps if self._engine is not None else 0
        if self.orphaned:
            return text
        return self.rank_group.query_stragglers(f"{self.label}.step{steps}", text)

    def on_fault(self, noticed: str) -> str:
        """Asks the other ranks about a fault. Called on the engine's thread.

        Args:
            noticed: What this rank knows about the fault.

        Returns:
            The message that every wait raises.
        """
        return noticed if self.orphaned else self.rank_group.report_fault(noticed)

    def status(self) -> dict[str, Any]:
        """Returns this rank's progress as the engine reports it; empty without an engine."""
        status: dict[str, Any] = json.loads(self._engine.status()) if self._engine else {}
        return status

    def fail(self, message: str) -> None:
        """After a fault: makes every wait on the engine raise FaultError with this message."""
        with suppress(UsageError):  # the engine has ended
            if self._engine is not None:
                self._engine.fail(message)

    def stop_timeline(self) -> None:
        """Writes the complete part of the timeline and stops recording."""
        with suppress(UsageError):  # the engine has ended
            if self._engine is not None:
                self._engine.set_timelines([])

    def close(self) -> None:
        """Ends all threads, after the step whose backward pass has ended."""
        exchange, self.exchange = self.exchange, None
        with ExitStack() as last_first:  # closes all, even if one close raises
            if exchange is not None:
                last_first.callback(exchange.close)
            last_first.callback(self.communicator.close)
            if self._engine is not None:
                last_first.callback(self._engine.close)

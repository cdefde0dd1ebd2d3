# SPDX-License-Identifier: Apache-2.0
"""What moves an optimizer's gradients, and outlives it for a while where nobody has closed it."""

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
    """An engine, what it sends through, and the memory that it reads by address.

    It knows neither parameters nor whoever uses it, so that Python's collector may take a model and
    its optimizer while the engine is still at work; the context closes what they leave.

    Args:
        rank_group: The ranks that take part.
        label: Of the optimizer, the same on all ranks.
        communicator: Nothing else uses it.

    Attributes:
        rank_group: The ranks that take part.
        label: As given.
        communicator: As given.
        exchange: What sparse gradients travel over, once there are any.
        abandoned: Nobody on this rank waits for it any more, so that a fault of it is nobody's.
    """

    def __init__(self, rank_group: RankGroup, label: str, communicator: EngineCommunicator) -> None:
        self.rank_group, self.label, self.communicator = rank_group, label, communicator
        self.exchange: TorchExchange | None = None
        self.orphaned = False
        self._engine: _core.Engine | None = None
        self._memory: tuple[object, ...] = ()

    def attach_engine(self, engine: _core.Engine, *memory: object) -> None:
        """From now on this is the engine, and `memory` what is to live as long as it works."""
        self._engine, self._memory = engine, memory

    def on_stall(self, text: str) -> str:
        """See `EngineOptions.on_stall`."""
        steps = self._engine.steps if self._engine is not None else 0
        if self.orphaned:
            return text
        return self.rank_group.query_stragglers(f"{self.label}.step{steps}", text)

    def on_fault(self, noticed: str) -> str:
        """See `EngineOptions.on_fault`."""
        return noticed if self.orphaned else self.rank_group.report_fault(noticed)

    def status(self) -> dict[str, Any]:
        """How far this rank has come; see `Engine.status`. Empty without an engine."""
        status: dict[str, Any] = json.loads(self._engine.status()) if self._engine else {}
        return status

    def fail(self, message: str) -> None:
        """After a fault: nothing that is on its way is waited for any more."""
        with suppress(UsageError):  # it has ended
            if self._engine is not None:
                self._engine.fail(message)

    def stop_timeline(self) -> None:
        """Writes out what is complete and stops recording."""
        with suppress(UsageError):  # it has ended
            if self._engine is not None:
                self._engine.set_timeline(None)

    def close(self) -> None:
        """Ends all threads, once a step whose backward has ended is over."""
        exchange, self.exchange = self.exchange, None
        with ExitStack() as last_first:  # each of them, whatever others raise
            if exchange is not None:
                last_first.callback(exchange.close)
            last_first.callback(self.communicator.close)
            if self._engine is not None:
                last_first.callback(self._engine.close)

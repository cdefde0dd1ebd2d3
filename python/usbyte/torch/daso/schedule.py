# SPDX-License-Identifier: Apache-2.0
"""The schedule of DASO: its phases, the turns of the local indices, and its rule for plateaus.

Nothing here communicates. Every rank has its own schedule. All schedules make the same decisions,
because they count the same batches and get the same losses.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, NamedTuple

from usbyte.errors import UsageError

log = logging.getLogger("usbyte")

Phase = Literal["warm-up", "cycling", "cool-down"]


class Start(NamedTuple):
    """A node averaging that begins now.

    Attributes:
        number: Number of the node averaging, from 0 on.
        wait: S, batches after which its result is used; 0 if all ranks wait for it at once.
    """

    number: int
    wait: int


class DasoSchedule:
    """The phases of DASO: Coquelin et al., J. Big Data 9 (2022), arXiv 2104.05588.

    An epoch ends with each call of `end_epoch`.

    Args:
        every: B, initial number of batches from one node averaging to the next in the cycling
            phase.
        wait: S, initial number of batches after which a result is used; 1 <= S <= B.
        total_epochs: Epochs of the whole training; the last `cooldown_epochs` are the cool-down.
        warmup_epochs: Initial epochs with a blocking node averaging after each batch.
        cooldown_epochs: Final epochs of the same kind.
        stability: A loss has improved if it is below the best one by more than this fraction of the
            best one; 0 <= stability < 1.
        patience: Consecutive epochs without improvement that make a plateau; at least 1.

    Raises:
        UsageError: An argument is out of range.

    Attributes:
        every: Present B.
        wait: Present S.
        epoch: Number of epochs that have ended.
        exchanges: Number of node averagings that have begun.
    """

    def __init__(
        self,
        *,
        every: int,
        wait: int,
        total_epochs: int,
        warmup_epochs: int,
        cooldown_epochs: int,
        stability: float,
        patience: int,
    ) -> None:
        if not 1 <= wait <= every:
            raise UsageError(
                f"exchange_wait must be from 1 to exchange_every, not {wait} of {every}: one "
                "exchange ends before the next begins"
            )
        if min(warmup_epochs, cooldown_epochs) < 0 or total_epochs < 1:
            raise UsageError(
                "total_epochs must be positive, and warmup_epochs and cooldown_epochs not "
                f"negative, not {total_epochs}, {warmup_epochs} and {cooldown_epochs}"
            )
        if warmup_epochs + cooldown_epochs > total_epochs:
            raise UsageError(
                f"{warmup_epochs} warmup_epochs and {cooldown_epochs} cooldown_epochs do not fit "
                f"into {total_epochs} total_epochs"
            )
        if not 0 <= stability < 1 or patience < 1:
            raise UsageError(
                "stability must be at least 0 and below 1, and patience positive, not "
                f"{stability} and {patience}"
            )
        self._first = every, wait
        self._total, self._warmup, self._cooldown = total_epochs, warmup_epochs, cooldown_epochs
        self._stability, self._patience = stability, patience
        self.reset()

    def reset(self) -> None:
        """Sets the state to that at the start of training."""
        self.every, self.wait = self._first
        self.epoch = self.exchanges = 0
        self._batches = 0  # since the last node averaging began
        self._best: float | None = None
        self._stalled = 0  # epochs without improvement

    @property
    def phase(self) -> Phase:
        """Phase of the next batch."""
        if self.epoch < self._warmup:
            return "warm-up"
        return "cool-down" if self.epoch >= self._total - self._cooldown else "cycling"

    def end_batch(self, busy: bool) -> Start | None:
        """Counts a batch.

        Args:
            busy: A node averaging is in flight; in the cycling phase the next one waits for its
                end.

        Returns:
            The node averaging that begins now; None if none does.
        """
        self._batches += 1
        if self.phase != "cycling":
            return self.start(0)
        if busy or self._batches < self.every:
            return None
        return self.start(self.wait)

    def start(self, wait: int) -> Start:
        """Counts a node averaging that begins now, with S = `wait`, and returns it."""
        self._batches = 0
        self.exchanges += 1
        return Start(self.exchanges - 1, wait)

    def end_epoch(self, loss: float) -> None:
        """Counts an epoch. On a plateau of the loss, halves B and S, or resets them if both are 1.

        Args:
            loss: Loss of the epoch; finite, and the same on all ranks.
        """
        improved = self._best is None or loss < self._best - self._stability * abs(self._best)
        before = self.phase
        self._best = loss if self._best is None else min(loss, self._best)
        self.epoch += 1
        if before == "cycling":
            self._stalled = 0 if improved else self._stalled + 1
            if self._stalled >= self._patience:
                self._stalled = 0
                self._speed_up()
        if self.phase != before:
            log.info("DASO: the %s begins after epoch %d", self.phase, self.epoch)

    def _speed_up(self) -> None:
        if (self.every, self.wait) == (1, 1):
            self.every, self.wait = self._first
        else:
            self.every, self.wait = max(1, self.every // 2), max(1, self.wait // 2)
        log.info(
            "DASO: the loss is stable; nodes average parameters every %d batches and use the "
            "result after %d", self.every, self.wait,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: a dict of numbers and None."""
        return {
            "every": self.every,
            "wait": self.wait,
            "epoch": self.epoch,
            "exchanges": self.exchanges,
            "batches": self._batches,
            "best": self._best,
            "stalled": self._stalled,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores a state that `state` has returned."""
        self.every, self.wait = state["every"], state["wait"]
        self.epoch, self.exchanges = state["epoch"], state["exchanges"]
        self._batches, self._best, self._stalled = state["batches"], state["best"], state["stalled"]

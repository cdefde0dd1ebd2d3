"""When nodes exchange parameters: DASO's phases, its rotation, its rule for plateaus.

Nothing here communicates: every rank has a schedule of its own, and as all count alike and are told
the same losses, all go the same way.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, NamedTuple

from usbyte.errors import UsageError

log = logging.getLogger("usbyte")

Phase = Literal["warm-up", "cycling", "cool-down"]


class Start(NamedTuple):
    """An exchange that begins.

    Attributes:
        number: From 0 on.
        wait: Batches after which its result is used, S; 0 if all wait for it at once.
    """

    number: int
    wait: int


class DasoSchedule:
    """The phases of Coquelin et al., J. Big Data 9 (2022), arXiv 2104.05588.

    An epoch is what lies between two calls of `end_epoch`.

    Args:
        every: Batches from one exchange to the next in the cycling phase, B, at first.
        wait: Batches after which the result of one is used, S, at first; B at most.
        total_epochs: Of the whole training; the last ones are the cool-down.
        warmup_epochs: Epochs with an exchange after each batch that all wait for.
        cooldown_epochs: The same at the end.
        stability: A loss has improved if it is below the best one by more than this part of it.
        patience: Epochs in a row without improvement that make a plateau.

    Raises:
        UsageError: Numbers that make no schedule.

    Attributes:
        every: B at present.
        wait: S at present.
        epoch: Epochs that have ended.
        exchanges: Begun so far.
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
        """As at the start of training."""
        self.every, self.wait = self._first
        self.epoch = self.exchanges = 0
        self._batches = 0  # since an exchange began
        self._best: float | None = None
        self._stalled = 0  # epochs without improvement

    @property
    def phase(self) -> Phase:
        """Of the batches to come."""
        if self.epoch < self._warmup:
            return "warm-up"
        return "cool-down" if self.epoch >= self._total - self._cooldown else "cycling"

    def end_batch(self, busy: bool) -> Start | None:
        """Counts a batch.

        Args:
            busy: An exchange is in flight: the next one waits for its end.

        Returns:
            The exchange that begins, if one does.
        """
        self._batches += 1
        if self.phase != "cycling":
            return self.start(0)
        if busy or self._batches < self.every:
            return None
        return self.start(self.wait)

    def start(self, wait: int) -> Start:
        """Counts an exchange that begins now."""
        self._batches = 0
        self.exchanges += 1
        return Start(self.exchanges - 1, wait)

    def end_epoch(self, loss: float) -> None:
        """Goes on to the next epoch; on a plateau of the loss B and S are halved, or start anew.

        Args:
            loss: Of the epoch, finite, the same on all ranks.
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
            log.info("DASO: after epoch %d the %s begins", self.epoch, self.phase)

    def _speed_up(self) -> None:
        if (self.every, self.wait) == (1, 1):
            self.every, self.wait = self._first
        else:
            self.every, self.wait = max(1, self.every // 2), max(1, self.wait // 2)
        log.info(
            "DASO: the loss is stable; nodes exchange parameters every %d batches and use them "
            "after %d", self.every, self.wait,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """What `load` takes; numbers and None."""
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
        """Goes on where `state` was taken."""
        self.every, self.wait = state["every"], state["wait"]
        self.epoch, self.exchanges = state["epoch"], state["exchanges"]
        self._batches, self._best, self._stalled = state["batches"], state["best"], state["stalled"]

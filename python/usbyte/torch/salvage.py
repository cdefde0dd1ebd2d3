"""Whether what a fault leaves of the parameters is a state to go on from.

It is on a rank whose parameters are all those after the last step that every surviving rank has
completed. Elsewhere they hold a part of an update, or one that other ranks do not have: there they
are dirty, and whoever reads them gets an error, until they are written to, as by loading a
checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from usbyte.errors import FaultError
from usbyte.torch.awaited import hold, release

# A rank needs less to find out what it has left, and as much to hear of the others.
_DECISION_S = 30.0


@dataclass
class Left:
    """What a fault has left of an optimizer's parameters on a rank.

    Attributes:
        completed: The last step whose updates have all been applied, counted from 1.
        partial: Some updates of the next step have been applied too.
    """

    completed: int
    partial: bool


def reason_against(rank: int, lefts: Mapping[int, Left] | None) -> str:
    """Why the parameters of `rank` are no state to go on from; empty if they are.

    Args:
        rank: One of the job.
        lefts: By rank, of those that survive; None if that cannot be found out.
    """
    if lefts is None:
        return "how far the other ranks have come cannot be found out"
    if rank not in lefts:
        return "the others have gone on without this rank"
    mine = lefts[rank]
    if mine.partial:
        return f"step {mine.completed + 1} was applied to some of the parameters, not to all"
    last, least = min((left.completed, other) for other, left in lefts.items())
    if last < mine.completed:
        return f"step {mine.completed} was applied here, but not on rank {least}"
    return ""


class Salvage:
    """Keeps the parameters of a run that has failed from being read, until that is decided.

    Args:
        params: All of an optimizer's.
        is_updating: Whether the calling thread is inside an update, which is to end.
        on_clean: Called before the parameters can be read again, if they can.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        is_updating: Callable[[], bool],
        on_clean: Callable[[], None],
    ) -> None:
        self._params, self._is_updating, self._on_clean = params, is_updating, on_clean
        self._decided = threading.Event()
        self._error = ""
        self.hold()

    def hold(self) -> None:
        """Has readers wait; also again, after an update that was going on has ended."""
        for param in self._params:
            hold(param, self._read, overwritten=release)

    def decide(self, verdict: str, reason: str) -> None:
        """Lets the readers go on, or fails them.

        Args:
            verdict: The fault.
            reason: See `reason_against`.
        """
        if reason:
            self._error = (
                f"these parameters are not to be used or saved, as {reason}: load the last "
                f"checkpoint into them. The run has failed: {verdict}"
            )
        else:
            self._on_clean()
            for param in self._params:
                release(param)
        self._decided.set()

    def check(self) -> None:
        """Raises FaultError unless the parameters are a state to go on from."""
        if not self._decided.wait(_DECISION_S):
            raise FaultError("the run has failed, and it takes too long to find out what is left")
        if self._error:
            raise FaultError(self._error)

    def _read(self, param: torch.Tensor) -> None:
        if self._is_updating():
            release(param)
            return
        self.check()
        release(param)

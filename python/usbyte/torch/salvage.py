"""Whether what a fault leaves of the parameters is a state to go on from.

It is on a rank whose parameters are all those after the last step that every surviving rank has
completed, or still can, as everything that its updates need has arrived. Elsewhere they hold a part
of an update, or one that other ranks do not have: there they are dirty, and whoever reads them gets
an error, until they are written to, as by loading a checkpoint.
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
        completable: The rest of them can be applied.
    """

    completed: int
    partial: bool
    completable: bool

    @property
    def reach(self) -> int:
        """The last step that can be completed."""
        return self.completed + self.completable


@dataclass
class Judgement:
    """What is to be done with the parameters of a rank.

    Attributes:
        reason: Why they are no state to go on from; empty if they are.
        completes: They are once the updates that are pending have been applied.
    """

    reason: str
    completes: bool = False


def judge(rank: int, lefts: Mapping[int, Left] | None) -> Judgement:
    """What is to be done on `rank`.

    Args:
        rank: One of the job.
        lefts: By rank, of those that survive; None if that cannot be found out.
    """
    if lefts is None:
        return Judgement("how far the other ranks have come cannot be found out")
    if rank not in lefts:
        return Judgement("the others have gone on without this rank")
    mine = lefts[rank]
    last, least = min((left.reach, other) for other, left in lefts.items())
    if mine.completable and last == mine.reach:
        return Judgement("", completes=True)
    if mine.partial:
        step = mine.completed + 1
        return Judgement(f"step {step} was applied to some of the parameters, not to all")
    if last < mine.completed:
        return Judgement(f"step {mine.completed} was applied here, but not on rank {least}")
    return Judgement("")


class Salvage:
    """Keeps the parameters of a run that has failed from being read, until that is decided.

    Args:
        params: All of an optimizer's.
        is_updating: Whether the calling thread is inside an update, which is to end.
        on_clean: Called by the first who reads them, if they can be read; with whether updates
            are to be completed.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        is_updating: Callable[[], bool],
        on_clean: Callable[[bool], None],
    ) -> None:
        self._params, self._is_updating, self._on_clean = params, is_updating, on_clean
        self._decided = threading.Event()
        self._error = ""
        self._completes = False
        self._cleaning = threading.RLock()  # guards _clean
        self._clean = False
        self.hold()

    def hold(self) -> None:
        """Has readers wait; also again, after an update that was going on has ended."""
        for param in self._params:
            hold(param, self._read, overwritten=release)

    def decide(self, verdict: str, judgement: Judgement) -> None:
        """Lets the readers go on, or fails them.

        Args:
            verdict: The fault.
            judgement: See `judge`.
        """
        if judgement.reason:
            self._error = (
                f"these parameters are not to be used or saved, as {judgement.reason}: load the "
                f"last checkpoint into them. The run has failed: {verdict}"
            )
        self._completes = judgement.completes
        self._decided.set()

    def check(self) -> None:
        """Raises FaultError unless the parameters are a state to go on from."""
        if not self._decided.wait(_DECISION_S):
            raise FaultError("the run has failed, and it takes too long to find out what is left")
        if self._error:
            raise FaultError(self._error)
        with self._cleaning:
            if not self._clean:
                self._clean = True
                self._on_clean(self._completes)
                for param in self._params:
                    release(param)

    def _read(self, param: torch.Tensor) -> None:
        if self._is_updating():
            release(param)
            return
        self.check()
        release(param)

"""Parameters whose updates are on their way: held until somebody asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from usbyte.errors import Error
from usbyte.torch.awaited import Fetch, hold, release
from usbyte.torch.reducer import Reducer
from usbyte.torch.settings import Trained
from usbyte.torch.shield import shielded


class PendingUpdates:
    """What a step has put off, for a subclass to apply.

    Whoever reads a parameter asks for its update first. What has arrived together is applied
    together: a call of the optimizer costs the host more than most updates cost the device.

    Args:
        trained: The parameters.
        reducer: Has their gradients.
        fetch: By parameter, what whoever reads it is to call first.

    Attributes:
        pending: By parameter, whether its update has not been applied yet.
        count: Of pending updates.
        unasked: Parameters that nobody has asked for yet, be their updates applied or not.
    """

    def __init__(self, trained: Trained, reducer: Reducer, fetch: Sequence[Fetch]) -> None:
        self._params, self._group_of = trained.params, trained.group_of
        self._reducer, self._fetch = reducer, fetch
        self._versions: list[int] = []  # when updates were put off
        self.pending = [False] * len(self._params)
        self.count = 0
        self.unasked: set[int] = set()

    def put_off(self) -> None:
        """From now on the update of every parameter is pending."""
        self._versions = [param._version for param in self._params]
        self.pending = [True] * len(self._params)
        self.count = len(self._params)
        self.unasked = set(range(len(self._params)))
        for param, fetch in zip(self._params, self._fetch, strict=True):
            hold(param, fetch)

    def forget(self) -> None:
        """Drops the updates that are pending."""
        self.pending = [False] * len(self._params)
        self.count = 0
        self.unasked = set()
        for param in self._params:
            release(param)

    def apply(self, indices: Sequence[int]) -> None:
        """Applies pending updates of these parameters, waiting for what they need."""
        due = [i for i in indices if self.pending[i]] if self.count else []
        if due:
            with shielded(self._reducer.device.torch_device.type):
                self._apply(due)
        for i in self.unasked.intersection(indices):
            self.unasked.discard(i)
            release(self._params[i])

    def _apply(self, due: Sequence[int]) -> None:
        """Applies the pending updates of these parameters and of those that arrive with them."""
        raise NotImplementedError

    def _arrived_with(self, due: Sequence[int]) -> list[int]:
        """Others whose updates are pending and have what they need once those of `due` have."""
        others = {j for i in due for j in self._reducer.arrives_with(i)}
        return [j for j in sorted(others.difference(due)) if self.pending[j]]

    def _begin(self, due: Sequence[int]) -> list[int]:
        """Lets an update of these parameters begin, whose gradients are there.

        Returns:
            Those of `due` whose updates are still pending, and count as applied from now on: a
            signal handler may have asked for the same ones while this thread waited.
        """
        due = [i for i in due if self.pending[i]]
        for i in due:
            release(self._params[i])
        for i in due:
            if self._params[i]._version != self._versions[i]:
                raise Error(
                    f"parameter '{self._reducer.names[i]}' was written to between step() and its "
                    "update, which would have been lost or misplaced; call optimizer.synchronize() "
                    "before you change parameters"
                )
        for i in due:
            self.pending[i] = False
        self.count -= len(due)
        return due

    def _end(self, updated: Sequence[int], asked: Sequence[int]) -> None:
        """These parameters have been updated, of which only some were asked for.

        Who uses one of the others is still to be seen: a use that is not may have come before the
        update, and is an error of the next backward pass.
        """
        for i in self.unasked.intersection(updated).difference(asked):
            hold(self._params[i], self._fetch[i])

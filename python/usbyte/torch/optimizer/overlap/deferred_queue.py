# SPDX-License-Identifier: Apache-2.0
"""Parameters whose updates are on their way: held until somebody asks for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from usbyte.errors import Error
from usbyte.torch.lazy_tensor import MaterializeFn, make_all_lazy, make_lazy, unwrap
from usbyte.torch.optimizer.compat.shared_memory import Aliases, sharing_memory
from usbyte.torch.optimizer.overlap.reduced_gradients import ReducedGradients
from usbyte.torch.plan.job import ParamTable
from usbyte.torch.runtime.device import Fence
from usbyte.torch.runtime.torch_modes import disable_user_modes
from usbyte.torch.torch_private import DisableTorchFunction, preserve_version


class DeferredUpdateQueue(ABC):
    """What a step has put off, for a subclass to apply.

    Whoever reads a parameter asks for its update first. What has arrived together is applied
    together: a call of the optimizer costs the host more than most updates cost the device.

    Args:
        trained: The parameters.
        reducer: Has their gradients.
        fetch: By parameter, what whoever reads it is to call first.

    Attributes:
        pending: Parameters whose updates have not been applied yet, nor begun.
        unasked: Those that nobody has asked for yet, be their updates applied or not.
        aliased: Parameters whose memory other tensors show, as of the last `look_at_memory`.
    """

    def __init__(
        self, param_table: ParamTable, reducer: ReducedGradients, fetch: Sequence[MaterializeFn]
    ) -> None:
        self._params, self._reducer, self._fetch = param_table.params, reducer, fetch
        self._versions: list[int] = []  # when updates were put off
        # By parameter, those that are updated together: they share memory or a version counter.
        self._shared_version_groups: dict[int, list[int]] = {}
        self._aliases = Aliases([])
        self.aliased: Sequence[int] = []
        self._update_events: dict[int, Fence] = {}  # by parameter, where updates run on a device
        self.pending: set[int] = set()
        self.unvisited: set[int] = set()

    @property
    def count(self) -> int:
        """Of pending updates."""
        return len(self.pending)

    @property
    def is_done(self) -> bool:
        """`apply` has nothing to do, whatever it is asked for."""
        return not (self.unvisited or self._update_events)

    def defer_all(self) -> None:
        """From now on the update of every parameter is pending."""
        self._versions = [param._version for param in self._params]
        self.look_at_memory()
        self._update_events = {}
        self.pending = set(range(len(self._params)))
        self.unvisited = set(self.pending)
        make_all_lazy(self._params, self._fetch)

    def look_at_memory(self) -> None:
        """Notices other memory of parameters, and other tensors over it; none may be held."""
        self.aliased = self._aliases.find()
        if self._aliases.are_outdated:
            self._shared_version_groups = _sharing(self._params)
            self._aliases = Aliases(self._params)
            self.aliased = self._aliases.find()

    def forget(self) -> None:
        """Drops the updates that are pending."""
        self.pending, self.unvisited = set(), set()
        for param in self._params:
            unwrap(param)

    def apply(self, indices: Sequence[int]) -> None:
        """Applies pending updates of these parameters, waiting for what they need.

        What the calling thread gives to its current stream from now on comes behind them.
        """
        due = [i for i in indices if i in self.pending] if self.pending else []
        if due:
            with disable_user_modes(self._reducer.device.torch_device.type):
                self._apply(due)
        for i in self.unvisited.intersection(indices):
            self.unvisited.discard(i)
            unwrap(self._params[i])
        if self._update_events:
            self._wait_on_stream(indices)

    @abstractmethod
    def _apply(self, due: Sequence[int]) -> None:
        """Applies the pending updates of these parameters and of those that arrive with them."""

    def _wait_on_stream(self, indices: Sequence[int]) -> None:
        """Later work on the current stream comes behind updates on others."""
        if behind := self._update_events:  # another thread may put another in its place
            stream = self._reducer.device.stream()
            for fence in {behind[i] for i in indices if i in behind}:
                fence.wait(stream)

    def _expand_shared_storage(self, due: Sequence[int]) -> list[int]:
        """Adds pending ones that share memory with these.

        Or a version counter: autograd would take a later update for a change of what it has saved.
        """
        if not self._shared_version_groups:
            return list(due)
        wanted = {j for i in due for j in self._shared_version_groups.get(i, (i,))}
        return sorted(self.pending & wanted)

    def _arrived_with(self, due: Sequence[int]) -> list[int]:
        """Others whose updates are pending and have what they need once those of `due` have."""
        if len(due) == len(self.pending):
            return []
        found = self.pending.intersection(self._reducer.co_arriving(due)).difference(due)
        return sorted(found.difference(self._shared_version_groups))

    def _begin(self, due: Sequence[int]) -> list[int]:
        """Lets an update of these parameters begin, whose gradients are there.

        A signal handler may ask for the same ones at any time: each update is one's who takes it.

        Returns:
            Those of `due` whose updates were still pending.
        """
        taken, due = [], [i for i in due if i in self.pending]
        try:
            for i in due:
                if i in self.pending:
                    self.pending.discard(i)
                    taken.append(i)
            if written := self._written(taken):
                self.pending.update(taken)
                raise Error(
                    f"parameter '{self._reducer.names[written[0]]}' was written to between step() "
                    "and its update, which would have been lost or misplaced; call "
                    "optimizer.synchronize() before you change parameters"
                )
            for i in taken:
                unwrap(self._params[i])
        except BaseException:
            # An interrupt may have come before what was taken was noted as such. What somebody else
            # has updated meanwhile is written to.
            left = [i for i in due if i not in self.pending]
            self._put_back(sorted(set(left).difference(self._written(left))))
            raise
        return taken

    def _written(self, indices: Sequence[int]) -> list[int]:
        """Those of these parameters that were written to since their updates were put off."""
        with DisableTorchFunction():  # they may be held
            return [i for i in indices if self._params[i]._version != self._versions[i]]

    def _end(self, updated: Sequence[int], asked: Sequence[int]) -> None:
        """These parameters have been updated, of which only some were asked for.

        Who uses one of the others is still to be seen: a use that is not may have come before the
        update, and is an error of the next backward pass.
        """
        if (fence := self._reducer.device.fence()) is not None:
            self._update_events.update(dict.fromkeys(updated, fence))
        others = list(self.unvisited.intersection(updated).difference(asked))
        make_all_lazy([self._params[i] for i in others], [self._fetch[i] for i in others])

    def _put_back(self, taken: Sequence[int]) -> None:
        """What was to be updated still is to be."""
        self.pending.update(taken)
        self.unvisited.update(taken)
        for i in taken:
            make_lazy(self._params[i], self._fetch[i])


def _sharing(params: Sequence[torch.Tensor]) -> dict[int, list[int]]:
    """By parameter that shares memory or a version counter with others: all of these, ascending."""
    found: dict[int, set[int]] = {}
    for group in [*sharing_memory(params), *_one_version(params)]:
        whole = set(group).union(*(found[i] for i in group if i in found))
        found.update(dict.fromkeys(whole, whole))
    return {i: sorted(whole) for i, whole in found.items()}


def _one_version(params: Sequence[torch.Tensor]) -> list[list[int]]:
    """Which parameters share a version counter, as those made of views of one tensor do."""
    found: list[list[int]] = []
    with DisableTorchFunction(), ExitStack() as stack:  # they may be held
        for param in params:
            stack.enter_context(preserve_version(param))
        before = [param._version for param in params]
        for param in params:
            torch.autograd.graph.increment_version(param)
        left = [i for i, param in enumerate(params) if param._version > before[i] + 1]
        while left:
            before = [param._version for param in params]
            torch.autograd.graph.increment_version(params[left[0]])
            found.append([i for i in left if params[i]._version != before[i]])
            left = [i for i in left if params[i]._version == before[i]]
    return found

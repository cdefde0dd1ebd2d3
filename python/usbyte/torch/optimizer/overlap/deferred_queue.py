# SPDX-License-Identifier: Apache-2.0
"""Queue of parameters whose updates are deferred until their first use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from usbyte.errors import Error
from usbyte.torch.lazy_tensor import MaterializeFn, make_all_lazy, make_lazy, unwrap_all
from usbyte.torch.optimizer.compat.shared_memory import Aliases, sharing_memory
from usbyte.torch.optimizer.overlap.reduced_gradients import ReducedGradients
from usbyte.torch.plan.job import ParamTable
from usbyte.torch.runtime.device import Fence
from usbyte.torch.runtime.torch_modes import disable_user_modes
from usbyte.torch.torch_private import DisableTorchFunction, preserve_version


class DeferredUpdateQueue(ABC):
    """The deferred updates of one step. A subclass says how an update is applied.

    Reading a parameter first applies its pending update. All updates whose gradients have arrived
    are applied in one call of the optimizer, because the host time of a call exceeds the device
    time of most updates.

    Args:
        param_table: Parameters of the optimizer. Indices of parameters are positions in it.
        reducer: Gives the reduced gradients.
        fetch: By parameter, the function that materializes it before it is read.

    Attributes:
        pending: Parameters whose updates have neither been applied nor begun.
        unvisited: Parameters that have not been requested yet, whether or not their updates are
            applied. They are lazy.
        aliased: Parameters whose memory other tensors use, as of the last `look_at_memory`.
    """

    def __init__(
        self, param_table: ParamTable, reducer: ReducedGradients, fetch: Sequence[MaterializeFn]
    ) -> None:
        self._params, self._reducer, self._fetch = param_table.params, reducer, fetch
        self._versions: list[int] = []  # at the call of `defer_all`
        # By parameter, those that share memory or a version counter with it, itself included.
        self._shared_version_groups: dict[int, list[int]] = {}
        self._aliases = Aliases([])
        self.aliased: Sequence[int] = []
        self._update_events: dict[int, Fence] = {}  # by parameter; empty on the CPU
        self.pending: set[int] = set()
        self.unvisited: set[int] = set()

    @property
    def count(self) -> int:
        """Number of pending updates."""
        return len(self.pending)

    def defer_all(self) -> None:
        """Makes every parameter lazy and its update pending."""
        self._versions = [param._version for param in self._params]
        self.look_at_memory()
        self._update_events = {}
        self.pending = set(range(len(self._params)))
        self.unvisited = set(self.pending)
        make_all_lazy(self._params, self._fetch)

    def look_at_memory(self) -> None:
        """Finds parameters with new memory, and other tensors over the memory of parameters.

        No parameter may be lazy.
        """
        self.aliased = self._aliases.find()
        if self._aliases.are_outdated:
            self._shared_version_groups = _sharing(self._params)
            self._aliases = Aliases(self._params)
            self.aliased = self._aliases.find()

    def forget(self) -> None:
        """Drops the pending updates and makes the parameters plain tensors."""
        self.pending, self.unvisited = set(), set()
        unwrap_all(self._params)

    def apply(self, indices: Sequence[int]) -> None:
        """Waits for the gradients of the parameters `indices` and applies their pending updates.

        Work that the calling thread enqueues later on its current stream runs after the updates.
        """
        if due := [i for i in indices if i in self.pending]:
            with disable_user_modes(self._reducer.device.torch_device.type):
                self._apply(due)
        self.visit(indices)

    def visit(self, indices: Sequence[int]) -> None:
        """Does the same as `apply` for parameters whose updates are applied, with less overhead."""
        if visited := self.unvisited.intersection(indices):
            self.unvisited.difference_update(visited)
            unwrap_all(map(self._params.__getitem__, visited))
        if self._update_events:
            self._wait_on_stream(indices)

    @abstractmethod
    def _apply(self, due: Sequence[int]) -> None:
        """Applies the pending updates of `due`, of co-arriving and of memory-sharing parameters."""

    def _wait_on_stream(self, indices: Sequence[int]) -> None:
        """Makes later work on the current stream wait for updates of `indices` on other streams."""
        if behind := self._update_events:  # another thread may replace the attribute
            stream = self._reducer.device.stream()
            for fence in {behind[i] for i in indices if i in behind}:
                fence.wait(stream)

    def _expand_shared_storage(self, due: Sequence[int]) -> list[int]:
        """Returns `due` with the pending parameters that share memory or a version counter with it.

        With a shared version counter, autograd would take a later update for an in-place change of
        a tensor that it has saved.
        """
        if not self._shared_version_groups:
            return list(due)
        wanted = {j for i in due for j in self._shared_version_groups.get(i, (i,))}
        return sorted(self.pending & wanted)

    def _arrived_with(self, due: Sequence[int]) -> list[int]:
        """Returns the other pending parameters that are co-arriving with those of `due`."""
        if len(due) == len(self.pending):
            return []
        found = self.pending.intersection(self._reducer.co_arriving(due)).difference(due)
        return sorted(found.difference(self._shared_version_groups))

    def _begin(self, due: Sequence[int]) -> list[int]:
        """Takes the updates of `due` out of the queue. Their gradients have arrived.

        A signal handler may request the same updates at any time. Each update is applied by the
        caller that takes it.

        Returns:
            The parameters of `due` whose updates were still pending.

        Raises:
            Error: A parameter was written to after `defer_all`; its update stays pending.
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
                    "and its deferred update, so the write would be lost or overwritten; call "
                    "optimizer.synchronize() before you change parameters"
                )
            unwrap_all(map(self._params.__getitem__, taken))
        except BaseException:
            # `taken` may be incomplete after an interrupt, so `pending` decides. Parameters with
            # another version were updated by another caller meanwhile.
            left = [i for i in due if i not in self.pending]
            self._put_back(sorted(set(left).difference(self._written(left))))
            raise
        return taken

    def _written(self, indices: Sequence[int]) -> list[int]:
        """Returns the parameters of `indices` that were written to since `defer_all`."""
        with DisableTorchFunction():  # must not materialize lazy parameters
            return [i for i in indices if self._params[i]._version != self._versions[i]]

    def _end(self, updated: Sequence[int], asked: Sequence[int]) -> None:
        """Marks the updates of `updated` as applied, of which only `asked` were requested.

        The others become lazy again, so that their first use is still observed. If one of them gets
        a gradient without an observed use, the forward pass may have read the old value, so the
        next backward pass raises an error.
        """
        if (fence := self._reducer.device.fence()) is not None:
            self._update_events.update(dict.fromkeys(updated, fence))
        others = list(self.unvisited.intersection(updated).difference(asked))
        make_all_lazy(map(self._params.__getitem__, others), map(self._fetch.__getitem__, others))

    def _put_back(self, taken: Sequence[int]) -> None:
        """Makes the updates of `taken` pending again."""
        self.pending.update(taken)
        self.unvisited.update(taken)
        for i in taken:
            make_lazy(self._params[i], self._fetch[i])


def _sharing(params: Sequence[torch.Tensor]) -> dict[int, list[int]]:
    """Returns, by parameter that shares memory or a version counter, all that do; ascending."""
    found: dict[int, set[int]] = {}
    for group in [*sharing_memory(params), *_one_version(params)]:
        whole = set(group).union(*(found[i] for i in group if i in found))
        found.update(dict.fromkeys(whole, whole))
    return {i: sorted(whole) for i, whole in found.items()}


def _one_version(params: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns groups of parameters that share a version counter, as views of one tensor do."""
    found: list[list[int]] = []
    with DisableTorchFunction(), ExitStack() as stack:  # lazy parameters stay lazy
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

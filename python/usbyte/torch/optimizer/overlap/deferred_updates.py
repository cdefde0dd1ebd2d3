# SPDX-License-Identifier: Apache-2.0
"""Updates that wait for the next forward pass and then run layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from usbyte.errors import UsageError
from usbyte.torch.lazy_tensor import MaterializeFn
from usbyte.torch.optimizer.compat.known_optimizers import is_known, without_step_hooks
from usbyte.torch.optimizer.hyperparam_snapshot import hyper_parameters
from usbyte.torch.optimizer.overlap.deferred_queue import DeferredUpdateQueue
from usbyte.torch.optimizer.overlap.reduced_gradients import ReducedGradients
from usbyte.torch.optimizer.param_groups import ParamGroupIndex
from usbyte.torch.plan.job import ParamTable
from usbyte.torch.torch_private import DisableTorchFunction

# Steps whose updates are checked to change nothing but their own parameters.
_CHECKED_STEPS = 10


class DeferredUpdates(DeferredUpdateQueue):
    """Applies an optimizer's step to the parameters whose gradients have arrived.

    An update is the optimizer's own `step`, with its groups narrowed to those parameters and with
    groups, hyper-parameters and its `step` as they were when `defer` was called, whatever a
    scheduler has done since. Step hooks do not see it: there were none when `defer` was called.

    Args:
        optimizer: The wrapped optimizer.
        step: Takes its step, by calling the function that it is given.
        tear: Called with the error that ends one half-way.
        trained: Its parameters.
        groups: Where they are in it.
        reducer: Has their gradients.
        fetch: By parameter, what whoever reads it is to call first.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[Callable[[], Any]], Any],
        tear: Callable[[BaseException], None],
        param_table: ParamTable,
        groups: ParamGroupIndex,
        reducer: ReducedGradients,
        fetch: Sequence[MaterializeFn],
    ) -> None:
        super().__init__(param_table, reducer, fetch)
        self._optimizer, self._step, self._tear = optimizer, step, tear
        self._groups, self._group_of = groups, groups.refresh()
        self._hyper: list[dict[str, Any]] = []
        self._call: Callable[[], Any] = optimizer.step
        # Gradients that the user has zeroed meanwhile, by parameter.
        self._zero_after: dict[int, torch.Tensor] = {}
        # Steps of an optimizer that is not known whose updates are still to be checked.
        self._to_check = 0 if is_known(optimizer) else _CHECKED_STEPS
        self._checks = False  # those of the present step
        self._expected: dict[int, int] = {}  # versions of parameters while an update is checked
        self._updating: set[int] = set()  # parameters whose updates are going on

    def defer(self, call: Callable[[], Any]) -> None:
        """Puts off the update of every parameter, which calls this function."""
        self._call = call
        self._group_of = self._groups.refresh()
        self._hyper = [hyper_parameters(group) for group in self._optimizer.param_groups]
        self._zero_after.clear()
        self._checks = self._to_check > 0
        self._to_check -= self._checks
        self.defer_all()

    def zero_grad(self, set_to_none: bool) -> None:
        """Resets the gradients that the user sees; pending updates still get theirs."""
        self._wait_on_stream(range(len(self._params)))
        with DisableTorchFunction():  # parameters are held
            for i, param in enumerate(self._params):
                if set_to_none:
                    param.grad = None
                elif param.grad is None:
                    continue
                elif i in self.pending:
                    self._zero_after[i] = param.grad
                else:
                    param.grad.zero_()

    def _apply(self, due: Sequence[int]) -> None:
        reducer = self._reducer
        wanted = self._expand_shared_storage(due)
        sums = {i: reducer.wait(i) for i in wanted}
        sums |= {i: reducer.sum(i) for i in self._arrived_with(wanted)}
        updated = self._begin(list(sums))
        if not updated:
            return
        kept: list[torch.Tensor | None] = []
        begun = False
        try:
            start = reducer.begin_update()
            kept = [self._params[i].grad for i in updated]
            for i in updated:
                self._params[i].grad = sums[i]
            with self._narrowed(updated), without_step_hooks(self._optimizer):
                begun = True
                self._step_on(updated)
        except BaseException as error:
            if begun:
                self._tear(error)
            else:
                self._put_back(updated)
            raise
        finally:
            for i, before in zip(updated, kept, strict=False):  # an interrupt may leave none
                if begun and before is not None and before is self._zero_after.get(i):
                    before.zero_()
                nobody = begun and sums[i] is None and before is reducer.gradient(i)
                self._params[i].grad = None if nobody else before
        self._end(updated, due)
        reducer.record_update(updated, start)

    def _step_on(self, updated: Sequence[int]) -> None:
        """Takes the step, which is to change these parameters only."""
        if not self._checks:
            self._step(self._call)
            return
        if not self._updating:
            self._expected = self._versions_now(range(len(self._params)))
        self._updating.update(updated)
        try:
            self._step(self._call)  # in which others' updates may be asked for
            # All of a step that is going on further out are left out as well.
            left = self._expected.keys() - self._updating
            now = self._versions_now(sorted(left))
            changed = [i for i, version in now.items() if version != self._expected[i]]
            self._expected |= self._versions_now(updated)
        finally:
            self._updating.difference_update(updated)
        if changed:
            raise UsageError(
                f"{type(self._optimizer).__name__}.step() has changed parameter "
                f"'{self._reducer.names[changed[0]]}', which was not in the param_groups that it "
                'was given, so that it cannot be applied layer by layer: use overlap="backward"'
            )

    def _versions_now(self, indices: Sequence[int]) -> dict[int, int]:
        with DisableTorchFunction():  # they may be held
            return {i: self._params[i]._version for i in indices}

    @contextmanager
    def _narrowed(self, due: Sequence[int]) -> Iterator[None]:
        groups: dict[int, list[nn.Parameter]] = {}
        for i in due:
            if (g := self._group_of[i]) is not None:
                groups.setdefault(g, []).append(self._params[i])
        everything = self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**self._hyper[g], "params": params} for g, params in groups.items()
        ]
        try:
            yield
        finally:
            self._optimizer.param_groups = everything

# SPDX-License-Identifier: Apache-2.0
"""Deferred updates that run the wrapped optimizer's step layer by layer in the next forward."""

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

# Number of steps in which an unknown optimizer is checked to change no other parameters.
_CHECKED_STEPS = 10


class DeferredUpdates(DeferredUpdateQueue):
    """Applies an optimizer's step to the parameters whose gradients have arrived.

    An update calls the optimizer's own `step`, with its parameter groups narrowed to these
    parameters. Groups, hyper-parameters and the `step` function are those at the call of `defer`,
    whatever a scheduler has changed since. Step hooks are not called: there were none at the call
    of `defer`.

    Args:
        optimizer: The wrapped optimizer.
        step: Runs one step of the optimizer: calls the function that it is given.
        on_partial_step: Called with the exception of an update that may have changed some of its
            parameters.
        param_table: Parameters of the optimizer.
        groups: Maps parameters to parameter groups of the optimizer.
        reducer: Gives the reduced gradients.
        fetch: By parameter, the function that materializes it before it is read.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[Callable[[], Any]], Any],
        on_partial_step: Callable[[BaseException], None],
        param_table: ParamTable,
        groups: ParamGroupIndex,
        reducer: ReducedGradients,
        fetch: Sequence[MaterializeFn],
    ) -> None:
        super().__init__(param_table, reducer, fetch)
        self._optimizer, self._step, self._on_partial_step = optimizer, step, on_partial_step
        groups.refresh()
        self._groups, self._group_of = groups, groups.group_of
        self._hyper: list[dict[str, Any]] = []
        self._call: Callable[[], Any] = optimizer.step
        # By parameter, a gradient that the user has zeroed before its update: zeroed after it.
        self._zero_after: dict[int, torch.Tensor] = {}
        # Number of steps left whose updates are checked; 0 for optimizers of torch.optim.
        self._to_check = 0 if is_known(optimizer) else _CHECKED_STEPS
        self._checks = False  # whether updates of the current step are checked
        self._expected: dict[int, int] = {}  # versions of parameters while an update is checked
        self._updating: set[int] = set()  # parameters whose checked updates run now

    def defer(self, call: Callable[[], Any]) -> None:
        """Defers the update of every parameter.

        Args:
            call: The optimizer's step, which updates call. The parameter groups must be those of
                the last `ParamGroupIndex.refresh`.
        """
        self._call, self._group_of = call, self._groups.group_of
        self._hyper = [hyper_parameters(group) for group in self._optimizer.param_groups]
        self._zero_after.clear()
        self._checks = self._to_check > 0
        self._to_check -= self._checks
        self.defer_all()

    def zero_grad(self, set_to_none: bool) -> None:
        """Resets `param.grad` of all parameters. Pending updates still use the reduced gradients.

        Args:
            set_to_none: True sets gradients to None; False fills them with zeros, those of pending
                updates after the update.
        """
        self._wait_on_stream(range(len(self._params)))
        with DisableTorchFunction():  # lazy parameters stay lazy
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
        reducer.wait(wanted)
        sums = reducer.sums([*wanted, *self._arrived_with(wanted)])
        updated = self._begin(list(sums))
        if not updated:
            return
        own_grads: list[torch.Tensor | None] = []
        begun = False
        try:
            start = reducer.begin_update()
            own_grads = [self._params[i].grad for i in updated]
            for i in updated:
                self._params[i].grad = sums[i]
            with self._narrowed(updated), without_step_hooks(self._optimizer):
                begun = True
                self._step_on(updated)
        except BaseException as error:
            if begun:
                self._on_partial_step(error)
            else:
                self._put_back(updated)
            raise
        finally:
            for i, before in zip(updated, own_grads, strict=False):  # empty after an interrupt
                if begun and before is not None and before is self._zero_after.get(i):
                    before.zero_()
                nobody = begun and sums[i] is None and before is reducer.gradient(i)
                self._params[i].grad = None if nobody else before
        self._end(updated, due)
        reducer.record_update(updated, start)

    def _step_on(self, updated: Sequence[int]) -> None:
        """Runs the optimizer's step and checks that it changes only the parameters `updated`.

        Raises:
            UsageError: The step changed another parameter.
        """
        if not self._checks:
            self._step(self._call)
            return
        if not self._updating:
            self._expected = self._versions_now(range(len(self._params)))
        self._updating.update(updated)
        try:
            self._step(self._call)  # may request and apply other updates
            # Parameters of updates that run further out on the stack may change too.
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
        with DisableTorchFunction():  # lazy parameters stay lazy
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

# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer with shards, each of which one rank updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from usbyte.errors import MismatchError, UsageError
from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.optimizer.gradients.plan_executor import PlanExecutor
from usbyte.torch.optimizer.gradients.reducer import Reducer
from usbyte.torch.optimizer.hyperparam_sync import HyperparamSync
from usbyte.torch.optimizer.overlap.reduced_gradients import no_whole_gradients
from usbyte.torch.optimizer.param_groups import ParamGroupIndex
from usbyte.torch.optimizer.sharded import ShardedUpdates
from usbyte.torch.optimizer.update_applier import UpdateApplier
from usbyte.torch.plan.job import ParamTable
from usbyte.torch.torch_private import DisableTorchFunction
from usbyte.torch.world.rank_group import RankGroup


class ShardedSteps:
    """Begins and ends the sharding of optimizer state, and resets gradients that a step consumed.

    Args:
        rank_group: Ranks that share the gradients.
        label: Name of the optimizer, equal on all ranks.
        optimizer: The wrapped optimizer.
        param_table: Its parameters.
        groups: Maps parameters to parameter groups of the optimizer.
        reducer: Sends gradients and waits for sums.
        executor: Runs the plan in force.
        max_grad_norm: Upper limit of the gradient norm over all parameters; None for no limit.
        applier: Applies the updates of shards when parameters are used.
        take_step: Runs the step of the wrapped optimizer.
        update_guard: Counts steps and serializes updates.
        joined: Copies hyper-parameters to ranks that have joined.

    Attributes:
        shards: The sharded updates; None in learning steps and without `shard_optimizer`.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        label: str,
        optimizer: torch.optim.Optimizer,
        param_table: ParamTable,
        groups: ParamGroupIndex,
        reducer: Reducer,
        executor: PlanExecutor,
        max_grad_norm: float | None,
        applier: UpdateApplier,
        take_step: Callable[[], Any],
        update_guard: UpdateGuard,
        joined: HyperparamSync,
    ) -> None:
        self._rank_group, self._label, self._optimizer = rank_group, label, optimizer
        self._param_table, self._groups = param_table, groups
        self._reducer, self._executor = reducer, executor
        self._max_grad_norm, self._applier, self._take_step = max_grad_norm, applier, take_step
        self._update_guard, self._joined = update_guard, joined
        self.shards: ShardedUpdates | None = None
        self._set_to_none = True  # how gradients were reset last
        self._consumed: list[bool] = []  # by parameter, in learning steps

    def close(self) -> None:
        """Drops references to what the optimizer owns; `shards` stays readable."""
        del self._reducer, self._executor, self._take_step, self._applier, self._joined

    def begin(self) -> ShardedUpdates:
        """Shards the optimizer's state under the plan in force; returns the sharded updates."""
        self.shards = ShardedUpdates(
            self._rank_group,
            self._label,
            self._optimizer,
            self._param_table,
            self._groups,
            self._reducer,
            self._executor.plan,
            self._max_grad_norm,
            self._applier.fetch_param,
            self._take_step,
        )
        self._applier.use_shards(self.shards)
        return self.shards

    def end(self) -> None:
        """Gives the optimizer its whole state back if it is sharded. Collective then."""
        if self.shards is not None:
            self.shards.unshard_state()
            self.shards = None
            self._applier.use_shards(None)

    def step(self, shards: ShardedUpdates) -> bool:
        """Updates this rank's shards with the gradients in flight.

        Args:
            shards: The sharded updates.

        Returns:
            False if there is nothing to update with: no gradient was sent, or the gradients were
            reset.

        Raises:
            UsageError: The last step has consumed the gradients, or a gradient was set by hand.
        """
        if not self._reducer.in_flight:
            if shards.grads_consumed:
                raise UsageError(
                    "step() was called again without backward(): with shard_optimizer=True a step "
                    "consumes its gradients; call backward() before the next step()"
                )
            if (i := self._reducer.sender.unsent_gradient()) >= 0:
                raise UsageError(
                    f"the gradient of '{self._param_table.names[i]}' was assigned by the script, "
                    "but with shard_optimizer=True step() uses the gradients that backward() has "
                    "sent: do not assign it"
                )
            return False
        if self._reducer.dropped():
            self.drop()
            return False
        self._joined.sync()
        with self._update_guard.applying():
            shards.step()
            self._update_guard.defer_all()
        return True

    def drop(self) -> None:
        """Drops the gradients in flight, which the script has reset. All ranks must do so.

        There must be shards.

        Raises:
            MismatchError: Another rank has used the gradients.
        """
        shards = self.shards
        assert shards is not None
        with self._update_guard.updating():
            if not self._reducer.in_flight:  # another thread has dropped them
                return
            self._joined.sync()  # ranks that have joined wait here for this one
            try:
                shards.drop()
            except MismatchError as error:
                self._executor.check()  # after a fault, device memory may be garbage
                self._update_guard.mark_partial_step(error)
                raise

    def change_plan(self, shards: ShardedUpdates) -> None:
        """Ends the step after which the plan changes. All updates must be applied."""
        self.end()
        self._reducer.finish_step(self._reducer.device.now())
        if self._reducer.learning:
            self._consumed = list(shards.used)
        else:
            self.begin().used = shards.used

    def release_grads(self) -> None:
        """Resets gradients after a step that was not sharded, as a sharded step does."""
        params = self._param_table.params
        self._consumed = [param.grad is not None for param in params] if not self.shards else []
        for param in params:
            param.grad = None

    def zero_grad(self, set_to_none: bool) -> bool:
        """Resets gradients if there are shards.

        Args:
            set_to_none: True sets gradients to None; False replaces them by zeros, also those that
                the last step consumed.

        Returns:
            False if there are no shards, in which case nothing is done.
        """
        self._set_to_none = set_to_none
        if self.shards is None:
            return False
        used = self.shards.used
        if self._reducer.in_flight:
            self.drop()
            used = self.shards.used
        else:
            with DisableTorchFunction():  # parameters are lazy, and stay so
                has = [param.grad is not None for param in self._param_table.params]
            consumed = self.shards.grads_consumed
            used = [h or (u and consumed) for h, u in zip(has, used, strict=True)]
        self._zero(used)
        self.shards.grads_consumed = not set_to_none  # zeros are gradients too
        return True

    def zero_consumed(self, set_to_none: bool) -> None:
        """In learning steps: resets gradients, including those that the last step consumed."""
        if self._consumed and not set_to_none:  # zeros are gradients too
            rows = zip(self._consumed, self._param_table.params, strict=True)
            self._zero([used or param.grad is not None for used, param in rows])
        self._consumed = []

    def check_whole_gradients(self) -> None:
        """Raises UsageError while gradients are in flight of which ranks get only shards."""
        if self.shards is not None and self._reducer.in_flight:
            raise no_whole_gradients(
                "call step() right after backward(), and clip with max_grad_norm="
            )

    def _zero(self, used: Sequence[bool]) -> None:
        with DisableTorchFunction():  # parameters are lazy, and may stay so
            for param, was_used in zip(self._param_table.params, used, strict=True):
                param.grad = None if self._set_to_none or not was_used else torch.zeros_like(param)

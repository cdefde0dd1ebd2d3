# SPDX-License-Identifier: Apache-2.0
"""Controls when reduced gradients become updates: at once, layer by layer, or by shard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from usbyte.errors import Error, UsageError
from usbyte.torch.comm.factory import Connector
from usbyte.torch.compression.state import CodecState
from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.optimizer.backward_driver import BackwardDriver
from usbyte.torch.optimizer.compat.known_optimizers import (
    calls_closure_first,
    has_step_hooks,
    mixes_dtypes,
    step_is_replaced,
)
from usbyte.torch.optimizer.compat.other_reducers import check_module, check_unreduced
from usbyte.torch.optimizer.fused import FusedUpdate
from usbyte.torch.optimizer.gradients.assembly import make_gradient_path
from usbyte.torch.optimizer.hyperparam_sync import HyperparamSync
from usbyte.torch.optimizer.overlap.decision import OverlapDecision
from usbyte.torch.optimizer.overlap.deferred_updates import DeferredUpdates
from usbyte.torch.optimizer.overlap.eligibility import ScriptObserver
from usbyte.torch.optimizer.overlap.forward_hooks import ForwardPreHooks
from usbyte.torch.optimizer.overlap.pass_recorder import PassRecorder
from usbyte.torch.optimizer.param_groups import ParamGroupIndex
from usbyte.torch.optimizer.sharded import ShardedUpdates, check_step_own
from usbyte.torch.optimizer.sharded_steps import ShardedSteps
from usbyte.torch.optimizer.step_runner import StepRunner
from usbyte.torch.optimizer.step_warnings import StepWarnings
from usbyte.torch.optimizer.update_applier import UpdateApplier
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.planner import Planner
from usbyte.torch.runtime.uncaught_exceptions import mark_training_thread
from usbyte.torch.torch_private import backward_id
from usbyte.torch.world.consistency import warn_if_params_diverge
from usbyte.torch.world.rank_group import RankGroup

log = logging.getLogger("usbyte")


class StepController:
    """Takes the steps of an optimizer whose gradients are summed over several ranks.

    In learning steps, and with overlap "backward", a step waits for all sums and updates all
    parameters at once. With overlap "forward", updates are deferred: the forward pre-hook of a
    module, or any other read of a parameter, applies the updates that it needs. With shards, each
    rank updates its shards only. Call `end` to close the controller.

    Args:
        rank_group: Ranks that share the gradients.
        optimizer: The wrapped optimizer.
        updater: Its `step` updates the parameters: `optimizer` itself or its fused update.
        settings: Arguments of the DistributedOptimizer.
        param_table: Parameters of the optimizer. Indices of parameters are positions in it.
        changing: Parameters that the forward pass changes differently on each rank.
        connector: Connects the ranks; it was verified.
        planner: Makes the plans.
        update_guard: Serializes updates, counts steps, and blocks reads of parameters after a
            fault.
        codec_state: Codec state.
        steps_before: Number of steps that were completed before.

    Attributes:
        executor: Runs the plan in force. Deleted by `end`, unless there was a fault.
        reducer: Sends gradients and waits for sums. Deleted by `end`, unless there was a fault.
        overlap: Decides whether updates are deferred to the next forward pass.
        driver: Begins and ends backward passes. Deleted by `end`, unless there was a fault.
        ended: Whether `end` was called.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        optimizer: torch.optim.Optimizer,
        updater: torch.optim.Optimizer | FusedUpdate,
        settings: Settings,
        param_table: ParamTable,
        changing: Collection[nn.Parameter],
        connector: Connector,
        planner: Planner,
        update_guard: UpdateGuard,
        codec_state: CodecState,
        steps_before: int,
    ) -> None:
        self._rank_group, self._optimizer, self._updater = rank_group, optimizer, updater
        self._settings, self._param_table, self._planner = settings, param_table, planner
        self._update_guard, self._codec_state = update_guard, codec_state
        names, params = param_table.names, param_table.params
        self._groups = ParamGroupIndex(optimizer, param_table)
        self.ended = False
        self._warnings = StepWarnings(planner.label, names)
        self._observer = ScriptObserver(optimizer, names, params)
        self._applier = UpdateApplier(len(params), update_guard, self._observer)
        self._forward_hooks = ForwardPreHooks(
            params,
            self._applier.on_use,
            self._applier.on_root,
            connector.device,
            partial(check_module, named=dict(zip(params, names, strict=True))),
        )
        self._passes = PassRecorder(connector.device, self._forward_hooks.root_modules)
        self.overlap = OverlapDecision(
            rank_group, settings, planner, self._observer, self._forward_hooks, self._warnings
        )
        self.reducer, self.executor = make_gradient_path(
            rank_group,
            optimizer,
            settings,
            param_table,
            changing,
            connector,
            planner,
            update_guard,
            codec_state,
            steps_before,
            self._forward_hooks,
            self._passes,
            self._on_learned,
        )
        self._runner = StepRunner(optimizer, updater, self.reducer, update_guard, codec_state)
        self._deferred = DeferredUpdates(
            optimizer,
            self._runner.run,
            update_guard.mark_partial_step,
            param_table,
            self._groups,
            self.reducer,
            self._applier.fetch_param,
        )
        self._joined = HyperparamSync(
            rank_group, planner.label, optimizer, self.reducer, settings.shard_optimizer
        )
        self._sharded = ShardedSteps(
            rank_group,
            planner.label,
            optimizer,
            param_table,
            self._groups,
            self.reducer,
            self.executor,
            settings.max_grad_norm,
            self._applier,
            self._runner.step,
            update_guard,
            self._joined,
        )
        self._applier.connect(self.overlap, self.reducer, self._deferred)
        self.driver = BackwardDriver(
            names,
            settings,
            self.reducer,
            self._applier,
            update_guard,
            self._sharded.drop,
            self._joined,
            self.overlap,
            self._observer,
            self._forward_hooks,
            self._passes,
            self._warnings,
        )
        self._forward_hooks.install(settings.model)

    @property
    def shards(self) -> ShardedUpdates | None:
        """The sharded updates; None if there are no shards."""
        return self._sharded.shards

    @property
    def pending(self) -> bool:
        """Whether an update is pending, or another thread is applying one."""
        return self._applier.pending

    @property
    def is_healthy(self) -> bool:
        """Whether neither communication nor a backward pass has failed."""
        return not (self.executor.failed or self.reducer.sender.is_sending)

    def check(self) -> None:
        """Raises an error unless training can go on.

        Raises:
            FaultError: There was a fault.
            UsageError: The call is inside `backward()`, or a frozen parameter requires a gradient
                now.
            Error: The last `backward()` did not end, or the parameters are not those of any step.
        """
        self.executor.check()
        self._update_guard.check_consistent()
        if self.reducer.sender.is_sending:
            if _is_in_backward():
                raise _called_in_backward()
            raise Error(
                "the last backward() did not end, so the other ranks wait for gradients that will "
                "not come; restart the job from its last checkpoint"
            )
        self._param_table.check_frozen()

    @property
    def evaluates_first(self) -> bool:
        """Whether `step(closure)` equals `evaluate(closure)` followed by `step()`."""
        return calls_closure_first(self._optimizer) and not self._is_watched()

    def evaluate(self, closure: Callable[[], float]) -> float:
        """Runs the closure of a step with gradients enabled and returns its result."""
        self._check_threads()
        with torch.enable_grad():
            loss = closure()
        self._observer.finds_threads()  # threads of the closure itself do not count
        return loss

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes a step, now or deferred. Call `check` first.

        Args:
            closure: As for `torch.optim.Optimizer.step`.

        Returns:
            The result of `closure`; None without one.

        Raises:
            UsageError: The step does not support the closure or other settings.
        """
        mark_training_thread()
        self.driver.passes = 0
        self._check_threads()
        self._groups.refresh()  # raises before anything has changed
        if isinstance(self._updater, FusedUpdate):
            self._updater.check()
        if self._settings.shard_optimizer:
            check_step_own(self._optimizer)
        if closure is not None and self._settings.overlap == "forward":
            raise UsageError(
                f"{type(self._optimizer).__name__} may call its closure several times, and needs "
                'the gradients at once: leave out overlap="forward"'
            )
        if closure is None:
            self.driver.flush_accumulated()
        reducer = self.reducer
        if self._sharded.shards is not None:
            self._step_shards(self._sharded.shards)
            return None
        if closure is None and (reducer.learning or reducer.applied):  # seldom: costs time
            self._warn_of_unsent()
        if (
            not reducer.in_flight
            or reducer.plan_ends
            or self._needs_whole_step()
            or closure is not None
            or not reducer.untouched()
        ):
            return self._step_synchronously(closure)
        self._defer_step()
        return None

    def zero_grad(self, set_to_none: bool) -> None:
        """Resets gradients. Pending updates still use the reduced gradients.

        Args:
            set_to_none: As for `torch.optim.Optimizer.zero_grad`.
        """
        if self._sharded.zero_grad(set_to_none):
            pass
        elif self._applier.pending or self._deferred.unvisited:
            with self._update_guard.lock:  # updates in other threads need their gradients
                reset = self._deferred if self._deferred.unvisited else self._optimizer
                reset.zero_grad(set_to_none)
        else:
            self._applier.drain()
            self._joined.check_step_taken()
            self._optimizer.zero_grad(set_to_none)
            self._sharded.zero_consumed(set_to_none)
        self.reducer.sender.forget_results(set_to_none)

    def check_whole_gradients(self) -> None:
        """Raises UsageError while gradients are in flight of which ranks get only shards."""
        self._sharded.check_whole_gradients()

    def drain(self) -> None:
        """Applies pending updates and makes gradients final; with shards, waits for reductions."""
        self._applier.drain()

    def apply_all(self) -> None:
        """Applies pending updates."""
        self._applier.apply_all()

    def up_to_date(self) -> None:
        """Records that the calling thread has applied all updates."""
        self._observer.up_to_date()

    def end_sharding(self) -> None:
        """Gives the optimizer its whole state back if it is sharded. Collective then."""
        self._sharded.end()

    def end(self, whole_state: bool) -> None:
        """Applies pending updates, unless communication has failed, and ends the engine.

        Args:
            whole_state: Whether to give the optimizer its whole state back if it is sharded.
        """
        reducer = self.reducer
        try:
            if self.is_healthy:
                self.apply_all()
                if reducer.in_flight and self._sharded.shards is None:
                    reducer.finalize_grads()
                if whole_state:
                    self.end_sharding()
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt must not wait again in close()
                self.executor.fail(f"this rank's end was interrupted by {type(error).__name__}")
            raise
        finally:
            if self._update_guard.recovery is None:
                self._give_up()
            self.driver.close()
            self._forward_hooks.close()
            self._passes.set_enabled(False)
            reducer.close()
            self.executor.close()
            self.ended = True
            if self._update_guard.recovery is None:  # after a fault pending updates may be applied
                # Breaks reference cycles: frees memory now, not when the garbage collector runs.
                self.overlap.close()
                self._sharded.close()
                self._applier.close()
                del self._forward_hooks, self._deferred, self._joined, self._runner
                del self.reducer, self.executor, self.driver

    # After a fault.

    def clean_up(self, completes: bool) -> None:
        """Prepares parameters for use after a fault.

        Args:
            completes: Whether to apply the pending updates first. If not, they are dropped.
        """
        if completes:
            self.reducer.stop_waiting()
            with self._update_guard.updating_after_fault():
                self._deferred.apply(range(len(self._param_table.params)))
        else:
            self._codec_state.mark_partial_step()
        self._give_up()

    def examine(self, is_quiet: bool) -> tuple[bool, bool]:
        """Returns whether a step was applied in part, and whether the rest of it can be applied.

        Args:
            is_quiet: Whether no update is running and no step has ended half-way.
        """
        count, reducer = self._applier.updates.count, self.reducer
        # With shards, this rank's shard of every parameter is a step ahead of the rest.
        whole = count in (0, 0 if self._sharded.shards else len(self._param_table.params))
        completable, torn = False, reducer.device.core is not None
        with suppress(UsageError):  # raised if the engine has ended meanwhile
            torn = reducer.may_be_partial()
            alone = count > 0 and is_quiet and self._sharded.shards is None
            completable = alone and reducer.has_all()
        return not whole or not is_quiet or torn, completable

    def _give_up(self) -> None:
        """Drops the pending updates, which are of a run that has failed."""
        self._update_guard.forget()
        self._deferred.forget()

    # Steps.

    def _needs_whole_step(self) -> bool:
        """Returns whether step hooks, a GradScaler or the optimizer need one undivided step."""
        optimizer = self._optimizer
        return self._is_watched() or mixes_dtypes(optimizer) or step_is_replaced(optimizer)

    def _is_watched(self) -> bool:
        found_inf = getattr(self._optimizer, "found_inf", None)
        return found_inf is not None or has_step_hooks(self._optimizer)

    def _step_synchronously(self, closure: Callable[[], float] | None) -> float | None:
        reducer = self.reducer
        self._applier.drain()
        self._joined.sync()
        self._observer.step(closure is not None, self._needs_whole_step(), not self.overlap.learned)
        start = reducer.device.now()
        if self._settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._param_table.params, self._settings.max_grad_norm)
        with self._update_guard.updating():
            result: float | None = self._step_watched(closure)
            self._update_guard.count_step()
        reducer.finish_step(start)
        learning = reducer.learning
        if self.overlap.end_step(learning) and self._settings.shard_optimizer:
            self._sharded.begin()
        if self._settings.shard_optimizer:
            self._sharded.release_grads()
        self._forward_hooks.set_enabled(learning or self.overlap.defers)
        self._observer.step_ends()
        return result

    def _step_watched(self, closure: Callable[[], float] | None) -> Any:
        if self._settings.overlap == "backward":
            return self._runner.step(closure)
        self._observer.in_step = True
        try:
            if self.overlap.learned:
                return self._runner.step(closure)
            with self._observer.groups(self._settings.overlap == "forward"):
                return self._runner.step(closure)
        finally:
            self._observer.in_step = False

    def _defer_step(self) -> None:
        with self._update_guard.lock:
            self._deferred.defer(self._updater.step)
            self._update_guard.defer_all()
            self.reducer.defer()
            self._observer.step_ends()
            aliased = self._deferred.aliased
        if aliased:
            self._warnings.aliases(aliased)
        if needed := [*self.overlap.unhooked_params, *aliased]:
            self._applier.apply(needed)

    def _warn_of_unsent(self) -> None:
        """Warns once of a gradient that came from no backward pass and is not sent."""
        if self._warnings.was_logged("unsent") or (i := self.reducer.sender.unsent_gradient()) < 0:
            return
        if _is_in_backward():  # a hook that runs before usbyte's called this
            raise _called_in_backward()
        self._warnings.set_by_hand(i)

    # With shards.

    def _step_shards(self, shards: ShardedUpdates) -> None:
        if self._needs_whole_step():
            raise UsageError(
                "shard_optimizer=True does not support GradScaler or step hooks; remove it"
            )
        if not self._sharded.step(shards):
            return
        self._observer.step_ends()
        self._applier.apply(self.overlap.unhooked_params)
        if self.reducer.plan_ends:
            self.apply_all()
            self._sharded.change_plan(shards)
            if self.reducer.learning:
                self.overlap.learned = False

    # Learning.

    def _on_learned(self) -> None:
        """Checks that all ranks train alike and chooses the overlap. Collective.

        Called when all ranks have learned, before they plan.
        """
        label = self._planner.label
        check_unreduced(self._optimizer, self._param_table.names, self._param_table.params)
        warn_if_params_diverge(
            self._rank_group, label, self._param_table.names, self._param_table.params
        )
        self.overlap.decide(self._look_for_aliases)

    def _look_for_aliases(self) -> Sequence[int]:
        self._deferred.look_at_memory()
        return self._deferred.aliased

    def _check_threads(self) -> None:
        if self.overlap.check_threads():
            self.reducer.ask_for_plan()


def _is_in_backward() -> bool:
    return backward_id() != -1


def _called_in_backward() -> UsageError:
    return UsageError(
        "step() or zero_grad() was called inside backward(), as by a hook of a parameter: make one "
        "DistributedOptimizer for all parameters and call step() once backward() has returned. "
        'With overlap="forward" each update then runs when its layer needs it, which overlaps as '
        "much as a step in a hook"
    )

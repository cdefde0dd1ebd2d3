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
from usbyte.torch.lazy_tensor import unwrap, weak_method
from usbyte.torch.optimizer.compat.known_optimizers import (
    calls_closure_first,
    has_step_hooks,
    is_known,
    mixes_dtypes,
    step_is_replaced,
)
from usbyte.torch.optimizer.compat.other_reducers import check_module, check_unreduced
from usbyte.torch.optimizer.fused import FusedUpdate
from usbyte.torch.optimizer.gradients.assembly import make_gradient_path
from usbyte.torch.optimizer.gradients.reducer import no_whole_gradients
from usbyte.torch.optimizer.hyperparam_sync import HyperparamSync
from usbyte.torch.optimizer.overlap.decision import OverlapDecision
from usbyte.torch.optimizer.overlap.deferred_updates import DeferredUpdates
from usbyte.torch.optimizer.overlap.eligibility import ScriptObserver
from usbyte.torch.optimizer.overlap.forward_hooks import ForwardPreHooks
from usbyte.torch.optimizer.param_groups import ParamGroupIndex
from usbyte.torch.optimizer.sharded import ShardedUpdates, check_step_own
from usbyte.torch.optimizer.sharded_steps import ShardedSteps
from usbyte.torch.optimizer.step_warnings import StepWarnings
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.planner import Planner
from usbyte.torch.runtime.torch_modes import outside_inference_mode
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
        memory: Codec state.
        steps_before: Number of steps that were completed before.
        on_updated: Called after a step that updated all parameters at once, before parameters can
            be read.

    Attributes:
        executor: Runs the plan in force. Deleted by `end`, unless there was a fault.
        reducer: Sends gradients and waits for sums. Deleted by `end`, unless there was a fault.
        overlap: Decides whether updates are deferred to the next forward pass.
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
        memory: CodecState,
        steps_before: int,
        on_updated: Callable[[], None],
    ) -> None:
        self._rank_group, self._optimizer, self._updater = rank_group, optimizer, updater
        self._settings, self._param_table, self._planner = settings, param_table, planner
        self._update_guard, self._memory, self._on_updated = update_guard, memory, on_updated
        self._groups = ParamGroupIndex(optimizer, param_table)
        self._everything = range(len(param_table.params))
        self.ended = False
        self._in_step = False  # whether the wrapped optimizer's step, with its closure, runs
        self._passes = 0  # backward passes that sent gradients since the last step
        self._warnings = StepWarnings(planner.label, param_table.names)
        self._watch = ScriptObserver(optimizer, param_table.names, param_table.params)
        self._fetch_param = [weak_method(self._on_param_read, i) for i in self._everything]
        self._fetch_gradient = [weak_method(self._on_gradient_read, i) for i in self._everything]
        named = dict(zip(param_table.params, param_table.names, strict=True))
        self._forward_hooks = ForwardPreHooks(
            param_table.params,
            self._on_use,
            self._on_root,
            connector.device,
            partial(check_module, named=named),
        )
        self.overlap = OverlapDecision(
            rank_group, settings, planner, self._watch, self._forward_hooks, self._warnings
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
            memory,
            steps_before,
            self._forward_hooks,
            self._on_learned,
        )
        self._deferred = DeferredUpdates(
            optimizer,
            self._take_deferred,
            update_guard.mark_partial_step,
            param_table,
            self._groups,
            self.reducer,
            self._fetch_param,
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
            self._fetch_param,
            self._take_step,
            update_guard,
            self._joined,
        )
        self._forward_hooks.install(settings.model)

    @property
    def shards(self) -> ShardedUpdates | None:
        """The sharded updates; None if there are no shards."""
        return self._sharded.shards

    @property
    def pending(self) -> bool:
        """Whether an update is pending, or another thread is applying one."""
        waits = (self._sharded.shards or self._deferred).pending
        return bool(waits) or self._update_guard.updating_in_other_thread

    @property
    def is_healthy(self) -> bool:
        """Whether neither communication nor a backward pass has failed."""
        return not (self.executor.failed or self.reducer.in_backward)

    def check(self) -> None:
        """Raises an error unless training can go on.

        Raises:
            FaultError: There was a fault.
            UsageError: The call is inside `backward()`, or a frozen parameter requires a gradient
                now.
            Error: The last `backward()` did not end, or the parameters are not those of any step.
        """
        self.executor.check()
        self._update_guard.check_whole()
        if self.reducer.in_backward:
            if _is_in_backward():
                raise _called_in_backward()
            raise Error(
                "the last backward() did not end, so the other ranks wait for its gradients in "
                "vain; restart the job from its last checkpoint"
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
        self._watch.finds_threads()  # threads of the closure itself do not count
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
        self._passes = 0
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
            self.flush_accumulated()
        reducer = self.reducer
        if self._sharded.shards is not None:
            self._step_shards(self._sharded.shards)
            return None
        if closure is None and (reducer.learning or reducer.applied):  # seldom: costs time
            self._tell_of_unsent()
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
        elif self.pending or self._deferred.unvisited:
            with self._update_guard.lock:  # updates in other threads need their gradients
                reset = self._deferred if self._deferred.unvisited else self._optimizer
                reset.zero_grad(set_to_none)
        else:
            self.drain()
            self._joined.check_step_taken()
            self._optimizer.zero_grad(set_to_none)
            self._sharded.zero_consumed(set_to_none)
        self.reducer.forget_results(set_to_none)

    def check_whole_gradients(self) -> None:
        """Raises UsageError while gradients are in flight of which ranks get only shards."""
        self._sharded.check_whole_gradients()

    def flush_accumulated(self) -> None:
        """Sends the gradients that this rank has accumulated, if there are any."""
        if self.reducer.has_accumulated and not self.reducer.in_flight:
            self.apply_all()
            self.reducer.begin()
            self.reducer.end()
            self.finish_backward()

    def contribute_zeros(self) -> bool:
        """Contributes zeros to a step of the other ranks and waits for their flags.

        Returns:
            Whether any rank has sent gradients. If not, nothing is in flight any more.
        """
        others_send = self.reducer.send_zeros()
        self.finish_backward()
        if not others_send:
            self.reducer.drop_zeros()
        return others_send

    @outside_inference_mode
    def drain(self) -> None:
        """Applies pending updates and makes gradients final; with shards, waits for reductions."""
        self.apply_all()
        if self.reducer.in_flight and self._sharded.shards is not None:
            self.reducer.wait_reduced()
        elif self.reducer.in_flight:
            with self._update_guard.lock:
                if self.reducer.in_flight:
                    self.reducer.settle()
                else:  # another thread has deferred the updates meanwhile
                    self.apply_all()

    def apply_all(self) -> None:
        """Applies pending updates."""
        self._apply(self._everything)

    def up_to_date(self) -> None:
        """Records that the calling thread has applied all updates."""
        self._watch.up_to_date()

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
                    reducer.settle()
                if whole_state:
                    self.end_sharding()
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt must not wait again in close()
                self.executor.fail(f"this rank's end was interrupted by {type(error).__name__}")
            raise
        finally:
            if self._update_guard.recovery is None:
                self._give_up()
            self._forward_hooks.close()
            reducer.close()
            self.executor.close()
            self.ended = True
            if self._update_guard.recovery is None:  # after a fault pending updates may be applied
                # Breaks reference cycles: frees memory now, not when the garbage collector runs.
                self.overlap.close()
                self._sharded.close()
                del self._forward_hooks, self._deferred, self._joined
                del self.reducer, self.executor

    # After a fault.

    def clean_up(self, completes: bool) -> None:
        """Prepares parameters for use after a fault.

        Args:
            completes: Whether to apply the pending updates first. If not, they are dropped.
        """
        if completes:
            self.reducer.stop_waiting()
            with self._update_guard.updating_after_fault():
                self._deferred.apply(self._everything)
        else:
            self._memory.mark_partial_step()
        self._give_up()

    def examine(self, is_quiet: bool) -> tuple[bool, bool]:
        """Returns whether a step was applied in part, and whether the rest of it can be applied.

        Args:
            is_quiet: Whether no update is running and no step has ended half-way.
        """
        count, reducer = self._updates.count, self.reducer
        # With shards, this rank's shard of every parameter is a step ahead of the rest.
        whole = count in (0, 0 if self._sharded.shards else len(self._everything))
        completable, torn = False, reducer.device.core is not None
        with suppress(UsageError):  # raised if the engine has ended meanwhile
            torn = reducer.is_torn()
            alone = count > 0 and is_quiet and self._sharded.shards is None
            completable = alone and reducer.has_all()
        return not whole or not is_quiet or torn, completable

    def _give_up(self) -> None:
        """Drops the pending updates, which are of a run that has failed."""
        self._update_guard.forget()
        self._deferred.forget()

    # Steps.

    @property
    def _updates(self) -> DeferredUpdates | ShardedUpdates:
        return self._sharded.shards or self._deferred

    def _needs_whole_step(self) -> bool:
        """Returns whether step hooks, a GradScaler or the optimizer need one undivided step."""
        optimizer = self._optimizer
        return self._is_watched() or mixes_dtypes(optimizer) or step_is_replaced(optimizer)

    def _is_watched(self) -> bool:
        found_inf = getattr(self._optimizer, "found_inf", None)
        return found_inf is not None or has_step_hooks(self._optimizer)

    def _take_step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._run(self._updater.step, closure)  # not cached: schedulers replace it

    def _take_deferred(self, call: Callable[[], Any]) -> Any:
        return self._run(call, None)

    def _run(self, call: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            self.reducer.mark_applied()
        calls_first = closure is not None and is_known(self._optimizer)
        result = self._update_guard.step(call, closure, calls_first)
        self.reducer.mark_applied()  # also sums of gradients that the closure has sent
        self._memory.uncommitted = False
        return result

    def _step_synchronously(self, closure: Callable[[], float] | None) -> float | None:
        reducer = self.reducer
        self.drain()
        self._joined.sync()
        self._watch.step(closure is not None, self._needs_whole_step(), not self.overlap.learned)
        start = reducer.device.now()
        if self._settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._param_table.params, self._settings.max_grad_norm)
        with self._update_guard.updating():
            result: float | None = self._step_watched(closure)
            self._on_updated()
            self._update_guard.count_step()
        reducer.finish_step(start)
        if self.overlap.end_step(reducer.learning) and self._settings.shard_optimizer:
            self._sharded.begin()
        if self._settings.shard_optimizer:
            self._sharded.release_grads()
        self._forward_hooks.set_enabled(reducer.learning or self.overlap.defers)
        self._watch.step_ends()
        return result

    def _step_watched(self, closure: Callable[[], float] | None) -> Any:
        if self._settings.overlap == "backward":
            return self._take_step(closure)
        self._in_step = True
        try:
            if self.overlap.learned:
                return self._take_step(closure)
            with self._watch.groups(self._settings.overlap == "forward"):
                return self._take_step(closure)
        finally:
            self._in_step = False

    def _defer_step(self) -> None:
        with self._update_guard.lock:
            self._deferred.defer(self._updater.step)
            self._update_guard.defer_all()
            self.reducer.defer()
            self._watch.step_ends()
            aliased = self._deferred.aliased
        if aliased:
            self._warnings.aliases(aliased)
        self._apply([*self.overlap.unhooked_params, *aliased])

    def _apply(self, indices: Sequence[int]) -> None:
        updates, guard = self._sharded.shards or self._deferred, self._update_guard
        if updates.pending or (guard.applier is not None and guard.updating_in_other_thread):
            with guard.applying():
                updates.apply(indices)
                guard.count_applied(updates.count)
        elif not updates.is_done:
            updates.apply(indices)

    def _tell_of_unsent(self) -> None:
        """Warns once of a gradient that came from no backward pass and is not sent."""
        if self._warnings.told("unsent") or (i := self.reducer.unsent_gradient()) < 0:
            return
        if _is_in_backward():  # a hook that runs before usbyte's called this
            raise _called_in_backward()
        self._warnings.set_by_hand(i)

    # With shards.

    def _step_shards(self, shards: ShardedUpdates) -> None:
        if self._needs_whole_step():
            raise UsageError(
                "shard_optimizer=True does not work with GradScaler or step hooks; leave it out"
            )
        if not self._sharded.step(shards):
            return
        self._watch.step_ends()
        self._apply(self.overlap.unhooked_params)
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

    # Uses of parameters and gradients.

    def _on_root(self, trains: bool) -> None:
        # Evaluation may take other paths through the model than those that were learned, and a
        # second forward pass before step() leads to a second backward pass.
        if self._updates.unvisited or not self.overlap.learned:
            self._watch.used(0)
        if trains:
            mark_training_thread()
            self._watch.forward()
        if not trains or (self.reducer.in_flight and self._sharded.shards is None):
            self.drain()

    def _on_param_read(self, i: int, param: torch.Tensor) -> None:
        self._on_use([i])
        unwrap(param)

    def _on_use(self, indices: Sequence[int]) -> None:
        updates = self._sharded.shards or self._deferred
        if updates.unvisited or not self.overlap.learned:
            self._watch.used(indices[0])
            self._apply(indices)
        elif not updates.is_done or self.pending:
            self._apply(indices)

    def _check_threads(self) -> None:
        if self.overlap.check_threads():
            self.reducer.ask_for_plan()

    def _on_gradient_read(self, i: int, grad: torch.Tensor) -> None:
        if self._sharded.shards is not None:
            raise no_whole_gradients("clip with max_grad_norm=, and use them up in step()")
        if self.reducer.in_flight:
            self.drain()
        elif i in self._deferred.unvisited:
            self._apply([i])
        elif not self.overlap.learned and not self._in_step:
            self._watch.gradient_read(i)
        unwrap(grad)

    # Backward passes.

    def prepare_backward(self, i: int) -> set[int]:
        """Prepares a backward pass, before its first gradient, that of parameter `i`, is sent.

        Returns:
            Indices of the parameters with a deferred update that the forward pass did not wait for.
            If one of them gets a gradient, the forward pass has read it without its forward
            pre-hook: raise `missed_use`.
        """
        self._forward_hooks.stop_recording()
        self._update_guard.check_whole()
        if self._sharded.shards is None:
            self._joined.check_step_taken()
        elif self.reducer.in_flight and self.reducer.dropped(renewed=i):
            self._sharded.drop(self._sharded.shards)
        self._watch.backward_begins(not self.overlap.learned)
        if self._passes and self.overlap.defers and self._sharded.shards is None:
            self._stay_with_backward("several backward passes before one step() have come up")
        return set(self._updates.unvisited)

    def finish_updates(self) -> None:
        """Applies the updates of layers that the forward pass has skipped."""
        self.apply_all()
        self._watch.up_to_date()

    def missed_use(self, i: int) -> Error:
        """Returns the error that the forward pass has read parameter `i` before its update."""
        return Error(
            f"parameter '{self._param_table.names[i]}' was used in the forward pass before its "
            "update had been applied, in a way that the first steps did not show; use "
            'overlap="backward", or call optimizer.synchronize() before the forward pass'
        )

    def finish_backward(self) -> None:
        """Ends a backward pass, after all of its gradients were sent.

        It waits for the sums, or makes gradients lazy if updates may be deferred.
        """
        self._passes += 1
        if self.reducer.learning:
            self._warnings.no_step(self._passes)
        defers = self.overlap.defers and not self._in_step and not self.overlap.against
        if self.reducer.shows_parts and self._sharded.shards is None:
            self._stay_with_backward("gradients are parts of memory that the script uses, too")
            defers = False
        elif defers and self._sharded.shards is None and self._watch.expects_another_pass():
            defers = False
        if not defers:
            self.reducer.settle()
            self._watch.backward()
        watches = not (self.overlap.learned or self._in_step)
        if defers or (watches and self._settings.overlap != "backward"):
            self.reducer.hold_gradients(self._fetch_gradient)

    def _stay_with_backward(self, reason: str) -> None:
        if self.overlap.stay_with_backward(reason):
            self.reducer.ask_for_plan()


def _is_in_backward() -> bool:
    return backward_id() != -1


def _called_in_backward() -> UsageError:
    return UsageError(
        "step() or zero_grad() was called inside backward(), as by a hook of a parameter: make one "
        "DistributedOptimizer for all parameters and call step() once backward() has returned. "
        'With overlap="forward" each update then runs when its layer needs it, and frees as much '
        "time as a step in a hook"
    )

# SPDX-License-Identifier: Apache-2.0
"""Drives backward passes: what comes before their first gradient and after their last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from usbyte.errors import Error, UsageError
from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.optimizer.gradients.reducer import Reducer
from usbyte.torch.optimizer.hyperparam_sync import HyperparamSync
from usbyte.torch.optimizer.overlap.decision import OverlapDecision
from usbyte.torch.optimizer.overlap.eligibility import ScriptObserver
from usbyte.torch.optimizer.overlap.forward_hooks import ForwardPreHooks
from usbyte.torch.optimizer.overlap.pass_recorder import PassRecorder
from usbyte.torch.optimizer.step_warnings import StepWarnings
from usbyte.torch.optimizer.update_applier import UpdateApplier
from usbyte.torch.plan.job import Settings
from usbyte.torch.torch_private import backward_id, call_after_backward


class BackwardDriver:
    """Begins and ends the backward passes of a step; the gradient sender's hooks do the rest.

    Args:
        names: Names of the parameters, by parameter index.
        settings: Arguments of the DistributedOptimizer.
        reducer: Sends gradients and waits for sums.
        applier: Applies pending updates.
        update_guard: Tells whether the parameters are those of a step.
        drop_shards: With shards, drops gradients in flight, which the script has reset.
        joined: Copies hyper-parameters to ranks that have joined.
        decision: Says whether updates are deferred.
        observer: Records how the script uses parameters and gradients.
        forward_hooks: Records when parameters are used.
        passes: Records forward and backward passes for the timeline.
        warnings: Logs what the script should change.

    Attributes:
        passes: Number of backward passes that sent gradients since the last step; `begin_step`
            resets it.
    """

    def __init__(
        self,
        names: Sequence[str],
        settings: Settings,
        reducer: Reducer,
        applier: UpdateApplier,
        update_guard: UpdateGuard,
        drop_shards: Callable[[], None],
        joined: HyperparamSync,
        decision: OverlapDecision,
        observer: ScriptObserver,
        forward_hooks: ForwardPreHooks,
        passes: PassRecorder,
        warnings: StepWarnings,
    ) -> None:
        self._names, self._settings = names, settings
        self._reducer, self._sender, self._applier = reducer, reducer.sender, applier
        self._update_guard, self._drop_shards, self._joined = update_guard, drop_shards, joined
        self._decision, self._observer = decision, observer
        self._forward_hooks, self._passes, self._warnings = forward_hooks, passes, warnings
        self._sync = True
        self._in_pass = False  # whether a backward pass with sync runs
        self._backward_id = -1  # number of the last pass that has begun
        self.passes = 0
        self._sender.begin_pass = self._admit
        self._handles = self._sender.register_hooks()

    def close(self) -> None:
        """Removes the hooks and drops references to what the optimizer owns."""
        for handle in self._handles:
            handle.remove()
        self._sender.close()

    def set_sync(self, sync: bool) -> bool:
        """Sets whether backward passes send gradients (default True). Returns the value before."""
        before, self._sync = self._sync, sync
        return before

    @property
    def accumulates(self) -> bool:
        """Whether some, but not all, of the backward passes of a step have run."""
        return self._settings.passes_per_step > 1 and self._reducer.has_accumulated

    def flush_accumulated(self) -> None:
        """Sends the gradients that this rank has accumulated, if there are any."""
        if self._reducer.has_accumulated and not self._reducer.in_flight:
            self._applier.apply_all()
            self._reducer.begin()
            self._reducer.end()
            self._finish()

    def contribute_zeros(self) -> bool:
        """Contributes zeros to a step of the other ranks and waits for their flags.

        Returns:
            Whether any rank has sent gradients. If not, nothing is in flight any more.
        """
        others_send = self._reducer.send_zeros()
        self._finish()
        if not others_send:
            self._reducer.drop_zeros()
        return others_send

    def _admit(self, i: int) -> bool:
        """Begins a backward pass if none runs. Returns whether to send the gradient of `i`."""
        if not self._in_pass:
            self._begin_pass(i)
        if i in self._sender.missed:
            raise self._missed_use(i)
        if not self._sender.is_sending:
            self._reducer.has_accumulated = True
        return self._sender.is_sending

    def _begin_pass(self, i: int) -> None:
        """Begins a backward pass, before its first gradient, that of parameter `i`, is sent."""
        current = backward_id()
        if self._sync or current != self._backward_id:
            self._backward_id = current
            self._check_not_captured()
            self._passes.begin_backward()
            self._sender.missed = self._prepare(i)
            if i in self._sender.missed:
                raise self._missed_use(i)
            self._applier.apply_all()  # the updates of layers that the forward pass has skipped
            self._observer.up_to_date()
        if self._sync:
            if self._reducer.passes + 1 == self._settings.passes_per_step:
                self._reducer.begin()
            self._in_pass = True
            call_after_backward(self._end_pass)

    def _end_pass(self) -> None:
        self._in_pass = False
        self._reducer.passes += 1
        if self._sender.is_sending:
            self._reducer.end()
            self._finish()

    def _prepare(self, i: int) -> set[int]:
        """Prepares a backward pass whose first gradient is that of parameter `i`.

        Returns:
            Indices of the parameters with a deferred update that the forward pass did not wait for.
            If one of them gets a gradient, the forward pass has read it without its forward
            pre-hook.
        """
        has_shards = self._applier.has_shards
        self._forward_hooks.stop_recording()
        self._update_guard.check_consistent()
        if not has_shards:
            self._joined.check_step_taken()
        elif self._reducer.in_flight and self._reducer.dropped(renewed=i):
            self._drop_shards()
        self._observer.backward_begins(not self._decision.learned)
        if self.passes and self._decision.defers and not has_shards:
            self._stay_with_backward("several backward passes sent gradients before one step()")
        return set(self._applier.updates.unvisited)

    def _finish(self) -> None:
        """Ends a backward pass, after all of its gradients were sent.

        It waits for the sums, or makes gradients lazy if updates may be deferred.
        """
        reducer, decision, observer = self._reducer, self._decision, self._observer
        has_shards = self._applier.has_shards
        self.passes += 1
        if reducer.learning:
            self._warnings.no_step(self.passes)
        defers = decision.defers and not observer.in_step and not decision.against
        if self._sender.shows_parts and not has_shards:
            reason = "gradients share memory with other tensors of the script"
            self._stay_with_backward(reason)
            if self._settings.overlap == "forward":
                self._warnings.waits(reason)
            defers = False
        elif defers and not has_shards and observer.expects_another_pass():
            defers = False
        if not defers:
            reducer.finalize_grads()
            observer.backward()
        watches = not (decision.learned or observer.in_step)
        if defers or (watches and self._settings.overlap != "backward"):
            reducer.make_grads_lazy(self._applier.fetch_gradient)

    def _stay_with_backward(self, reason: str) -> None:
        if self._decision.stay_with_backward(reason):
            self._reducer.ask_for_plan()

    def _missed_use(self, i: int) -> Error:
        """Returns the error that the forward pass has read parameter `i` before its update."""
        return Error(
            f"parameter '{self._names[i]}' was used in the forward pass before its update had been "
            "applied, in a way that the first steps did not show; use "
            'overlap="backward", or call optimizer.synchronize() before the forward pass'
        )

    def _check_not_captured(self) -> None:
        # A replay calls no hook, and `param.grad` is by then a tensor over the flat buffer.
        if self._reducer.device.capturing():
            raise UsageError(
                "a backward pass is being captured into a CUDA graph, and what a replay adds to "
                "gradients would be lost: do not capture backward()"
            )

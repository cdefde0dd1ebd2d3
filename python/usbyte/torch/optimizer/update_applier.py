# SPDX-License-Identifier: Apache-2.0
"""Applies pending updates when a parameter or a gradient is used."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.lazy_tensor import MaterializeFn, unwrap, weak_method
from usbyte.torch.optimizer.overlap.decision import OverlapDecision
from usbyte.torch.optimizer.overlap.deferred_queue import DeferredUpdateQueue
from usbyte.torch.optimizer.overlap.eligibility import ScriptObserver
from usbyte.torch.optimizer.overlap.reduced_gradients import no_whole_gradients
from usbyte.torch.runtime.torch_modes import outside_inference_mode
from usbyte.torch.runtime.uncaught_exceptions import mark_training_thread


class GradientWaits(Protocol):
    """The parts of the reducer that wait for all gradients.

    Attributes:
        in_flight: Whether gradients of the last backward pass have not been waited for.
    """

    in_flight: bool

    def wait_reduced(self) -> None:
        """Waits until this rank's shards hold the sums over all ranks."""

    def finalize_grads(self) -> None:
        """Waits for all gradients in flight and makes every `param.grad` final."""


class UpdateApplier:
    """Makes parameters and gradients up to date before they are used, in any thread.

    The forward pre-hooks and the lazy tensors call it. Call `connect` before the first use.

    Args:
        count: Number of parameters.
        update_guard: Serializes updates and counts steps.
        observer: Records how the script uses parameters and gradients.

    Attributes:
        updates: The updates of the current step.
        has_shards: Whether these are updates of shards.
        fetch_param: By parameter, the function that materializes it. It does not keep this object
            alive.
        fetch_gradient: By parameter, the function that materializes its gradient; likewise.
    """

    updates: DeferredUpdateQueue
    _deferred: DeferredUpdateQueue
    _decision: OverlapDecision
    _reducer: GradientWaits

    def __init__(self, count: int, update_guard: UpdateGuard, observer: ScriptObserver) -> None:
        self._everything, self._update_guard, self._observer = range(count), update_guard, observer
        self.has_shards = False
        self.fetch_param: Sequence[MaterializeFn] = [
            weak_method(self._on_param_read, i) for i in self._everything
        ]
        self.fetch_gradient: Sequence[MaterializeFn] = [
            weak_method(self._on_gradient_read, i) for i in self._everything
        ]

    def connect(
        self, decision: OverlapDecision, reducer: GradientWaits, deferred: DeferredUpdateQueue
    ) -> None:
        """Sets what the updates need.

        Args:
            decision: Says whether updates are deferred.
            reducer: Waits for gradients.
            deferred: The updates while there are no shards.
        """
        self._decision, self._reducer = decision, reducer
        self.updates = self._deferred = deferred

    def use_shards(self, shards: DeferredUpdateQueue | None) -> None:
        """Sets the updates of shards; None if there are no shards any more."""
        self.updates, self.has_shards = shards or self._deferred, shards is not None

    def close(self) -> None:
        """Drops references to what the optimizer owns; nothing may be used any more."""
        del self._decision, self._reducer, self._deferred, self.updates

    @property
    def pending(self) -> bool:
        """Whether an update is pending, or another thread is applying one."""
        return bool(self.updates.pending) or self._update_guard.updating_in_other_thread

    def apply(self, indices: Sequence[int]) -> None:
        """Applies the pending updates of the parameters `indices`, which are about to be used."""
        updates, guard = self.updates, self._update_guard
        if updates.pending or (guard.applier is not None and guard.updating_in_other_thread):
            with guard.applying():
                updates.apply(indices)
                guard.count_applied(updates.count)
        else:
            updates.visit(indices)

    def apply_all(self) -> None:
        """Applies all pending updates."""
        self.apply(self._everything)

    @outside_inference_mode
    def drain(self) -> None:
        """Applies pending updates and makes gradients final; with shards, waits for reductions."""
        self.apply(self._everything)
        if not self._reducer.in_flight:
            return
        if self.has_shards:
            self._reducer.wait_reduced()
            return
        with self._update_guard.lock:
            if self._reducer.in_flight:
                self._reducer.finalize_grads()
            else:  # another thread has deferred the updates meanwhile
                self.apply(self._everything)

    def on_use(self, indices: Sequence[int]) -> None:
        """Called before a module uses its parameters `indices`."""
        updates, observer = self.updates, self._observer
        is_new = threading.get_ident() not in observer.users
        if is_new and (updates.unvisited or not self._decision.learned):
            observer.used(indices[0])
        if updates.pending or self._update_guard.applier is not None:
            self.apply(indices)
        else:
            updates.visit(indices)

    def on_root(self, trains: bool) -> None:
        """Called before the forward of an outermost module, with whether it trains."""
        # Evaluation may take other paths through the model than those that were learned, and a
        # second forward pass before step() leads to a second backward pass.
        if self.updates.unvisited or not self._decision.learned:
            self._observer.used(0)
        if trains:
            mark_training_thread()
            self._observer.forward()
        if not trains or (self._reducer.in_flight and not self.has_shards):
            self.drain()

    def _on_param_read(self, i: int, param: torch.Tensor) -> None:
        self.on_use([i])
        unwrap(param)

    def _on_gradient_read(self, i: int, grad: torch.Tensor) -> None:
        if self.has_shards:
            raise no_whole_gradients("clip with max_grad_norm=, and use them in step() only")
        if self._reducer.in_flight:
            self.drain()
        elif i in self.updates.unvisited:
            self.apply([i])
        elif not self._decision.learned and not self._observer.in_step:
            self._observer.gradient_read(i)
        unwrap(grad)

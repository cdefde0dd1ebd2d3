# SPDX-License-Identifier: Apache-2.0
"""Drives backward passes: what comes before their first gradient and after their last one."""

from __future__ import annotations

from typing import Protocol

from usbyte.errors import UsageError
from usbyte.torch.optimizer.gradients.reducer import Reducer
from usbyte.torch.torch_private import backward_id, call_after_backward


class StepTaker(Protocol):
    """The parts of the step controller that concern backward passes.

    Attributes:
        reducer: Sends gradients and waits for sums.
    """

    reducer: Reducer

    def prepare_backward(self, i: int) -> set[int]:
        """Prepares a backward pass, before its first gradient, that of parameter `i`, is sent.

        Returns:
            Indices of the parameters with a deferred update that the forward pass did not wait for.
        """

    def finish_updates(self) -> None:
        """Applies the updates of layers that the forward pass has skipped."""

    def missed_use(self, i: int) -> Exception:
        """Returns the error that parameter `i` was read before its update was applied."""

    def finish_backward(self) -> None:
        """Ends a backward pass, after all of its gradients were sent."""


class BackwardDriver:
    """Begins and ends backward passes; the gradient sender's hooks send what is between.

    Args:
        controller: Takes the steps.
        passes_per_step: Number of backward passes that accumulate before gradients are sent, at
            least 1.
    """

    def __init__(self, controller: StepTaker, passes_per_step: int) -> None:
        self._controller, self._passes_per_step = controller, passes_per_step
        self._reducer, self._sender = controller.reducer, controller.reducer.sender
        self._sync = True
        self._in_pass = False  # whether a backward pass with sync runs
        self._backward_id = -1  # number of the last pass that has begun
        self._sender.begin_pass = self._admit
        self._handles = self._sender.register_hooks()

    def close(self) -> None:
        """Removes the hooks."""
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
        return self._passes_per_step > 1 and self._reducer.has_accumulated

    def _admit(self, i: int) -> bool:
        """Begins a backward pass if none runs. Returns whether to send the gradient of `i`."""
        if not self._in_pass:
            self._begin_pass(i)
        if i in self._sender.missed:
            raise self._controller.missed_use(i)
        if not self._sender.is_sending:
            self._reducer.has_accumulated = True
        return self._sender.is_sending

    def _begin_pass(self, i: int) -> None:
        """Begins a backward pass, before its first gradient, that of parameter `i`, is sent."""
        current = backward_id()
        if self._sync or current != self._backward_id:
            self._backward_id = current
            self._check_not_captured()
            self._sender.missed = self._controller.prepare_backward(i)
            if i in self._sender.missed:
                raise self._controller.missed_use(i)
            self._controller.finish_updates()
        if self._sync:
            if self._reducer.passes + 1 == self._passes_per_step:
                self._reducer.begin()
            self._in_pass = True
            call_after_backward(self._end_pass)

    def _end_pass(self) -> None:
        self._in_pass = False
        self._reducer.passes += 1
        if self._sender.is_sending:
            self._reducer.end()
            self._controller.finish_backward()

    def _check_not_captured(self) -> None:
        # A replay calls no hook, and `param.grad` is by then a tensor over the flat buffer.
        if self._reducer.device.capturing():
            raise UsageError(
                "a backward pass is being captured into a CUDA graph, and what a replay adds to "
                "gradients would be lost: leave backward() out of the capture"
            )

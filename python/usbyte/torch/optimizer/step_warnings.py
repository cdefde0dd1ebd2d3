# SPDX-License-Identifier: Apache-2.0
"""Warnings about a script, each logged once for an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

log = logging.getLogger("usbyte")

_PASSES_WITHOUT_STEP = 30
_STEPS_WITHOUT_GRADIENT = 10


class FirstGradientWatch:
    """Warns if no parameter of an optimizer has a gradient in its first steps.

    Args:
        label: Name of the optimizer.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._steps_left = _STEPS_WITHOUT_GRADIENT  # 0: a gradient was seen, or the warning logged

    def step(self, params: Sequence[nn.Parameter], has_closure: bool) -> None:
        """Looks for a gradient before a step, unless one was seen.

        Args:
            params: The parameters of the optimizer.
            has_closure: Whether the step computes the gradients itself.
        """
        if self._steps_left == 0:
            return
        if has_closure or any(param.grad is not None for param in params):
            self._steps_left = 0
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            log.warning(
                "%s: no parameter of this optimizer had a gradient in %d steps, so nothing trains: "
                "was the model made anew, or copied, after the optimizer was made of it? Make the "
                "optimizer of the parameters of the model that you train",
                self._label,
                _STEPS_WITHOUT_GRADIENT,
            )


class StepWarnings:
    """Logs what a script does that costs speed, or lets parameters of ranks diverge.

    Args:
        label: Name of the optimizer.
        names: Names of the parameters, by parameter index.
    """

    def __init__(self, label: str, names: Sequence[str]) -> None:
        self._label, self._names = label, names
        self._logged: set[str] = set()

    def is_new(self, topic: str) -> bool:
        """Returns True in the first call for this topic, else False."""
        if topic in self._logged:
            return False
        self._logged.add(topic)
        return True

    def was_logged(self, topic: str) -> bool:
        """Returns True if the warning was logged, so that its cause need not be looked for."""
        return topic in self._logged

    def aliases(self, aliased: Sequence[int]) -> None:
        """Warns that updates of `aliased` are not deferred: other tensors use their memory."""
        if self.is_new("aliases"):
            log.warning(
                "%s: the script keeps tensors that share memory with %d of %d parameters, for "
                "example with '%s', as a state_dict() or p.data does, so step() waits for their "
                "gradients: keep copies (copy.deepcopy), or get these tensors again each time",
                self._label,
                len(aliased),
                len(self._names),
                self._names[aliased[0]],
            )

    def waits(self, reason: str) -> None:
        """Warns that backward waits for all gradients although updates should be deferred."""
        if self.is_new("waits"):
            log.warning(
                '%s: %s, so backward() waits for all gradients under overlap="forward": use '
                'overlap="auto", which plans for that, or change the script',
                self._label,
                reason,
            )

    def set_by_hand(self, i: int) -> None:
        """Warns that the gradient of parameter `i` came from no backward pass and is not sent."""
        if self.is_new("unsent"):
            log.warning(
                "%s: the gradient of '%s' was assigned by the script, and only gradients from "
                "backward() are reduced: parameters diverge unless all ranks assign the same "
                "values, for example from usbyte.torch.allreduce",
                self._label,
                self._names[i],
            )

    def thread(self, name: str) -> None:
        """Warns that another thread has used the parameter `name` while updates are deferred."""
        if self.is_new("threads"):
            log.warning(
                "%s: a thread other than the training thread used '%s' while updates were deferred "
                "to the forward pass, so either may see a partly updated parameter: call "
                "optimizer.drain() after step(), before other threads use parameters, and let "
                "these threads finish before the next step()",
                self._label,
                name,
            )

    def no_step(self, passes: int) -> None:
        """Warns that `passes` backward passes have sent gradients without a step, at a limit."""
        if passes == _PASSES_WITHOUT_STEP:
            log.warning(
                "%s: %d backward passes have sent gradients without a call of step(), so "
                "communication is not planned: call step() of the DistributedOptimizer. Where the "
                "wrapped optimizer updates parameters in other methods, as SAM does in "
                "first_step() and second_step(), wrap the optimizer that it is made of instead: "
                "sam.base_optimizer = DistributedOptimizer(sam.base_optimizer, ...)",
                self._label,
                passes,
            )

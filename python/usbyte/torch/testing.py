# SPDX-License-Identifier: Apache-2.0
"""Inspects and steers a DistributedOptimizer in tests. Training code needs none of this.

Examples:
    >>> import torch, usbyte.torch as ub
    >>> from usbyte.torch import testing
    >>> ub.init()
    >>> model = torch.nn.Linear(4, 4)
    >>> opt = ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> testing.deferred_updates(opt)  # with one rank, no update is deferred
    []
    >>> ub.shutdown()
"""

from __future__ import annotations

import torch

from usbyte.errors import UsageError
from usbyte.torch.optimizer.distributed_optimizer import DistributedOptimizer
from usbyte.torch.optimizer.step_controller import StepController
from usbyte.torch.plan.drift import StepTimeMonitor
from usbyte.torch.plan.lifecycle import PlanLifecycle
from usbyte.torch.plan.sparse import DensityMonitor


def request_plan(optimizer: DistributedOptimizer) -> None:
    """Makes this rank vote for a new plan until the ranks have made one. Any rank may call it.

    Args:
        optimizer: The optimizer. `policy="auto"` or `overlap="auto"`: other plans are fixed.

    Raises:
        UsageError: The optimizer sends no gradients: one rank, or closed.
    """
    _controller(optimizer).reducer.ask_for_plan()


def simulate_step_time_change(optimizer: DistributedOptimizer) -> None:
    """Makes this rank see its step time as changed for good, until another plan is in force.

    Has no effect while plans are measured or tried.

    Args:
        optimizer: The optimizer, with `policy="auto"`.

    Raises:
        UsageError: The optimizer sends no gradients, or its plan does not follow the step time.
    """
    _replace_until_reset(_step_time_monitor(optimizer), wanted=True, step=lambda now: None)


def simulate_density_change(optimizer: DistributedOptimizer) -> None:
    """Makes this rank see the numbers of rows of its sparse gradients as changed for good.

    The rank votes for a new plan after three windows of steps, and no more once one is in force.

    Args:
        optimizer: The optimizer, with `policy="auto"` and sparse gradients.

    Raises:
        UsageError: The optimizer sends no gradients, or its plan does not follow them.
    """
    _step_time_monitor(optimizer)  # the plan follows both or none
    monitor = _lifecycle(optimizer)._density_monitor
    _replace_until_reset(monitor, _outdated=lambda counts: True)


def expected_step_s(optimizer: DistributedOptimizer) -> float | None:
    """Returns the step time that later steps are compared with, in seconds; None until measured.

    Args:
        optimizer: The optimizer.

    Raises:
        UsageError: The optimizer sends no gradients.
    """
    monitor = _lifecycle(optimizer)._step_time_monitor
    return None if monitor is None else monitor.baseline_s


def deferred_updates(optimizer: DistributedOptimizer) -> list[str]:
    """Returns the names of the parameters whose update `step()` has deferred to their next use.

    Args:
        optimizer: The optimizer.
    """
    controller = optimizer._session.live
    if controller is None:
        return []
    queue = controller.shards or controller._deferred
    return [optimizer._session.param_table.names[i] for i in sorted(queue.pending)]


def has_accumulated(optimizer: DistributedOptimizer) -> bool:
    """Returns True if this rank has accumulated gradients that it has not sent yet.

    Args:
        optimizer: The optimizer.

    Raises:
        UsageError: The optimizer sends no gradients.
    """
    return _controller(optimizer).reducer.has_accumulated


def codec_state(optimizer: DistributedOptimizer) -> dict[str, torch.Tensor]:
    """Returns what codecs keep from step to step, such as error feedback, by parameter name.

    Args:
        optimizer: The optimizer.

    Returns:
        Tensors of shape [rows, numel], float32. `Codec::remembers` in codec.h names the rows;
        "unsent" is error feedback. They are the optimizer's own: codecs read what a test writes.
    """
    return optimizer._session.codec_state.parts


def _controller(optimizer: DistributedOptimizer) -> StepController:
    controller = optimizer._session.live
    if controller is None:
        raise UsageError("this DistributedOptimizer sends no gradients: one rank, or closed")
    return controller


def _lifecycle(optimizer: DistributedOptimizer) -> PlanLifecycle:
    return _controller(optimizer).reducer._lifecycle


def _step_time_monitor(optimizer: DistributedOptimizer) -> StepTimeMonitor:
    monitor = _lifecycle(optimizer)._step_time_monitor
    if monitor is None:
        raise UsageError('the plan follows step times and densities with policy="auto" only')
    return monitor


def _replace_until_reset(monitor: StepTimeMonitor | DensityMonitor, **replaced: object) -> None:
    """Replaces attributes of a monitor until its `reset` is called."""
    attributes = vars(monitor)
    if "reset" in attributes:  # replaced already
        return
    before = {name: attributes[name] for name in replaced if name in attributes}

    def reset(*args: float | None) -> None:
        for name in ("reset", *replaced):
            attributes.pop(name, None)
        attributes.update(before)
        monitor.reset(*args)

    attributes.update(replaced, reset=reset)

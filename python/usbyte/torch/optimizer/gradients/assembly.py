# SPDX-License-Identifier: Apache-2.0
"""Puts the parts together by which an optimizer's gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import nn

from usbyte.torch.comm.factory import connect
from usbyte.torch.compression.state import CodecState
from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.optimizer.gradients.plan_executor import PlanExecutor
from usbyte.torch.optimizer.gradients.reducer import Reducer
from usbyte.torch.optimizer.gradients.step_checksum import StepChecksum
from usbyte.torch.optimizer.gradients.step_consensus import StepConsensus
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.lifecycle import ParameterUseTracker, PlanLifecycle
from usbyte.torch.plan.planner import Planner
from usbyte.torch.runtime.device import Device
from usbyte.torch.world.rank_group import RankGroup


class GradientPath(NamedTuple):
    """What takes a gradient from autograd to its sum."""

    reducer: Reducer
    executor: PlanExecutor


def make_gradient_path(
    rank_group: RankGroup,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    param_table: ParamTable,
    changing: Collection[nn.Parameter],
    device: Device,
    planner: Planner,
    update_guard: UpdateGuard,
    memory: CodecState,
    steps_before: int,
    uses: ParameterUseTracker,
    on_learned: Callable[[], None],
) -> GradientPath:
    """Connects the ranks, and makes a reducer with all that it needs. Collective.

    Args:
        rank_group: The ranks that take part.
        optimizer: The wrapped optimizer.
        settings: Arguments of the DistributedOptimizer.
        param_table: The parameters.
        changing: Parameters that forward passes change on each rank in another way.
        device: Where parameters are.
        planner: Makes the plans.
        update_guard: Told when parameters of ranks have come to differ.
        memory: State of the codecs.
        steps_before: Steps completed before this was made.
        uses: Knows when the forward pass uses each parameter.
        on_learned: Called when all ranks have learned, before they plan.
    """
    communicator = connect(rank_group, device, settings.topology)
    executor = PlanExecutor(
        rank_group, communicator, settings, param_table, device, planner, memory, steps_before
    )
    lifecycle = PlanLifecycle(
        planner,
        uses,
        device,
        rank_group.env.learning_steps,
        adapt=settings.policy == "auto",
        may_ask=settings.overlap == "auto",
        on_learned=on_learned,
    )
    check = StepChecksum(
        planner.label,
        optimizer,
        param_table,
        changing,
        device,
        rank_group.env.check_steps,
        rank_group.ranks,
        executor.gather_answers,
        update_guard.spoil,
    )
    consensus = StepConsensus(
        planner.label, rank_group.ranks, executor, lifecycle, check, update_guard
    )
    reducer = Reducer(settings, param_table, planner, executor, lifecycle, memory, check, consensus)
    return GradientPath(reducer, executor)

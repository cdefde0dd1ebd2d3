# SPDX-License-Identifier: Apache-2.0
"""Connects the objects that sum an optimizer's gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import nn

from usbyte.torch.comm.factory import Connector
from usbyte.torch.compression.state import CodecState
from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.optimizer.gradients.plan_executor import PlanExecutor
from usbyte.torch.optimizer.gradients.reducer import Reducer
from usbyte.torch.optimizer.gradients.step_checksum import StepChecksum
from usbyte.torch.optimizer.gradients.step_consensus import StepConsensus
from usbyte.torch.optimizer.overlap.pass_recorder import PassRecorder
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.lifecycle import ParameterUseTracker, PlanLifecycle
from usbyte.torch.plan.planner import Planner
from usbyte.torch.world.rank_group import RankGroup


class GradientPath(NamedTuple):
    """The objects that take a gradient from autograd to its sum.

    Attributes:
        reducer: Sends gradients and waits for sums.
        executor: Runs the plan in force.
    """

    reducer: Reducer
    executor: PlanExecutor


def make_gradient_path(
    rank_group: RankGroup,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    param_table: ParamTable,
    changing: Collection[nn.Parameter],
    connector: Connector,
    planner: Planner,
    update_guard: UpdateGuard,
    codec_state: CodecState,
    steps_before: int,
    uses: ParameterUseTracker,
    passes: PassRecorder,
    on_learned: Callable[[], None],
) -> GradientPath:
    """Connects the ranks and makes a reducer with everything that it needs. Collective.

    Args:
        rank_group: Ranks that share the gradients.
        optimizer: The wrapped optimizer.
        settings: Arguments of the DistributedOptimizer.
        param_table: Parameters of the optimizer.
        changing: Parameters that the forward pass changes differently on each rank.
        connector: Connects the ranks; it was verified.
        planner: Makes the plans.
        update_guard: Receives the notice that parameters differ between ranks.
        codec_state: Codec state.
        steps_before: Number of steps that were completed before.
        uses: Records when the forward pass needs each parameter.
        passes: Records forward and backward passes for the timeline.
        on_learned: Called when all ranks have learned, before they plan.
    """
    communicator, device = connector.connect(), connector.device
    executor = PlanExecutor(
        rank_group,
        communicator,
        settings,
        param_table,
        device,
        planner,
        codec_state,
        passes,
        steps_before,
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
        update_guard.mark_diverged,
    )
    consensus = StepConsensus(
        planner.label, rank_group.ranks, executor, lifecycle, check, update_guard
    )
    reducer = Reducer(
        settings, param_table, planner, executor, lifecycle, codec_state, check, consensus
    )
    return GradientPath(reducer, executor)

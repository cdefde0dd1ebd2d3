# SPDX-License-Identifier: Apache-2.0
"""What a DistributedOptimizer owns: all that trains its parameters, and what the world calls."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from usbyte import _core
from usbyte.errors import MismatchError, UsageError
from usbyte.torch.comm.factory import Connector
from usbyte.torch.compression.state import CodecState
from usbyte.torch.fault.decision import RankProgress, RecoveryDecision
from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.optimizer.gradients.plan_executor import PlanExecutor
from usbyte.torch.optimizer.local_steps import LocalSteps
from usbyte.torch.optimizer.param_owner import register_params, retain_owner
from usbyte.torch.optimizer.step_controller import StepController
from usbyte.torch.optimizer.step_warnings import FirstGradientWatch
from usbyte.torch.optimizer.validation import (
    ValidatedOptimizer,
    validate_optimizer,
    verify_same_optimizer,
    warn_of_renormalized,
)
from usbyte.torch.optimizer.wrapper import holds_shards
from usbyte.torch.plan.job import ParamTable, Settings, with_new_names
from usbyte.torch.plan.planner import Planner
from usbyte.torch.runtime.device import Device, device_of
from usbyte.torch.runtime.torch_modes import outside_inference_mode
from usbyte.torch.world.consistency import OtherOrderError
from usbyte.torch.world.rank_group import RankGroup


class OptimizerSession:
    """The objects that train the parameters of one optimizer, from `build` to `close`.

    Args:
        owner: The DistributedOptimizer. Its parameters keep it alive while gradients are sent; the
            session does not.
        optimizer: The wrapped optimizer.
        settings: Arguments of the DistributedOptimizer.
        rank_group: Ranks that share the gradients.
        model: Module that owns the parameters; None if unknown.
        names: Name of each parameter; None to generate names.

    Attributes:
        label: Name of the optimizer, equal on all ranks.
        first_gradient: Warns if nothing trains.
        rank_group: Ranks that share the gradients.
        settings: Arguments of the DistributedOptimizer.
        param_table: Parameters of the optimizer.
        controller: Takes the steps. None with a single rank, and after `close` unless its shards or
            a fault still need it.
        local_steps: Takes the steps with a single rank.
        planner: Makes the plans; None with a single rank.
        codec_state: Codec state.
        update_guard: Serializes updates, counts steps, and blocks reads of parameters after a
            fault.
        closed: Whether the optimizer is closed, and sends nothing any more.
        state_hooks: Hooks on the wrapped optimizer, which `close` removes.
    """

    param_table: ParamTable

    def __init__(
        self,
        owner: object,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        rank_group: RankGroup,
        model: nn.Module | None,
        names: Mapping[nn.Parameter, str] | None,
    ) -> None:
        self._owner, self._optimizer, self._model = weakref.ref(owner), optimizer, model
        self._names = names
        self.settings, self.rank_group = settings, rank_group
        self.label = rank_group.next_label()
        self.first_gradient = FirstGradientWatch(self.label)
        self.codec_state = CodecState(settings.scale(rank_group.size))
        self.update_guard = UpdateGuard()
        self.controller: StepController | None = None
        self.local_steps: LocalSteps | None = None
        self.planner: Planner | None = None
        self.closed = False
        self.state_hooks: list[RemovableHandle] = []

    @property
    def live(self) -> StepController | None:
        """The step controller while gradients are sent; None afterwards and with a single rank."""
        controller = self.controller
        return None if controller is None or controller.ended else controller

    @property
    def executor(self) -> PlanExecutor | None:
        """The plan executor. Other threads may read this while the training thread ends it."""
        return getattr(self.live, "executor", None)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters whose gradients are sent, with their names."""
        return list(zip(self.param_table.names, self.param_table.params, strict=True))

    def names_of_groups(self) -> list[list[str]] | None:
        """Returns the given parameter names by parameter group; None if a parameter has none."""
        names = self._names or {}
        groups = [group["params"] for group in self._optimizer.param_groups]
        if any(param not in names for params in groups for param in params):
            return None
        return [[names[param] for param in params] for params in groups]

    def check_usable(self) -> None:
        """Raises an error unless training can go on.

        Raises:
            UsageError: The optimizer is closed, or `StepController.check` raises it.
            Error: `StepController.check` raises it.
        """
        if self.rank_group.size == 1:
            return
        if self.closed:
            raise UsageError("this DistributedOptimizer is closed; wrap the optimizer again")
        controller = self.controller
        if controller is not None and not controller.ended:
            controller.check()

    def drain(self) -> None:
        """Applies pending updates and waits for gradients in flight. Sends nothing."""
        if (controller := self.live) is not None:
            controller.drain()

    def bring_up_to_date(self) -> None:
        """Does `drain`, and checks that parameters and state are those of one step.

        Raises:
            FaultError: The run has failed, and left no consistent state.
            Error: A step was applied partially.
        """
        guard = self.update_guard
        if guard.recovery is not None:
            guard.recovery.check()
            return
        if self.rank_group.size > 1:
            guard.check_consistent()
        self.drain()

    @outside_inference_mode
    def close(self, whole_state: bool) -> None:
        """Applies pending updates, unless communication has failed; then ends the engine.

        Collective.

        Args:
            whole_state: With shard_optimizer, give the wrapped optimizer its whole state back.
        """
        self.closed = True
        for handle in self.state_hooks:
            handle.remove()
        self.state_hooks = []
        self._end(whole_state)

    def _end(self, whole_state: bool) -> None:
        if (controller := self.live) is None:
            return
        try:
            controller.end(whole_state)
        finally:
            retain_owner(None, self.param_table.params)
        if controller.shards is None and self.update_guard.recovery is None:
            self.controller = None  # frees its buffers

    @outside_inference_mode
    def build(self, steps_before: int) -> None:
        """Makes everything that depends on the set of parameters. Collective.

        Args:
            steps_before: Number of steps that were completed before.
        """
        settings, rank_group = self.settings, self.rank_group
        orphans = rank_group.find_orphans()
        param_table = ParamTable.of(self._optimizer, self._names)
        validated = self._validate(param_table)
        self.closed = True
        self._end(whole_state=True)
        self.controller = None
        self.param_table = param_table
        if holds_shards(self._optimizer):
            raise UsageError(
                "this optimizer holds shards of its state from before a shutdown: make a new one "
                "and load a checkpoint, or call close() on its DistributedOptimizer before "
                "shutdown()"
            )
        if rank_group.size == 1:  # a single rank sends nothing
            before = self.local_steps
            self.local_steps = LocalSteps(
                self._optimizer, validated.updater, settings, param_table, self.update_guard
            )
            if before is not None:
                self.local_steps.consumed = before.consumed
            self.closed = False
            return
        changing = warn_of_renormalized(self.label, param_table, self._model)
        device = device_of(param_table.names, param_table.params)
        connector = Connector(rank_group, device, settings.topology)
        is_named = self._names is not None
        planner = self._make_planner(param_table, device, validated, steps_before)
        try:
            verify_same_optimizer(rank_group, planner, connector, param_table, is_named, orphans)
        except OtherOrderError as error:  # raised on all ranks; they take the first rank's order
            param_table = param_table.in_order(error.names)
            validated = self._validate(param_table)
            planner = self._make_planner(param_table, device, validated, steps_before)
            verify_same_optimizer(rank_group, planner, connector, param_table, is_named, orphans)
        self.param_table, self.planner = param_table, planner
        self.controller = StepController(
            rank_group,
            self._optimizer,
            validated.updater,
            settings,
            param_table,
            changing,
            connector,
            planner,
            self.update_guard,
            self.codec_state,
            steps_before,
        )
        retain_owner(self._owner(), param_table.params)
        self.closed = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the wrapped optimizer and builds anew. Collective.

        Raises:
            UsageError: The group is not supported; it is not added.
            MismatchError: The ranks pass different groups; no rank adds one.
        """
        controller = self.live
        if controller is not None:
            controller.check_whole_gradients()
        self.drain()
        self._optimizer.add_param_group(param_group)
        names = self._names
        try:
            self._names = with_new_names(names, self._optimizer, self._model)
            self._validate(ParamTable.of(self._optimizer, self._names))
        except UsageError:
            self._optimizer.param_groups.pop()
            self._names = names
            raise
        if controller is None:
            self.build(steps_before=0)
            return
        controller.end_sharding()
        unsent, steps = controller.reducer.has_accumulated, controller.executor.steps
        try:
            self.build(steps)
        except MismatchError:  # raised on all ranks, so all of them rebuild
            self._optimizer.param_groups.pop()
            self._names = names
            self.build(steps)
            raise
        finally:
            if self.controller is not None:
                before, overlap = controller.overlap, self.controller.overlap
                overlap.shared, overlap.against = before.shared, before.against
                self.controller.reducer.has_accumulated = unsent

    def _make_planner(
        self,
        param_table: ParamTable,
        device: Device,
        validated: ValidatedOptimizer,
        steps_before: int,
    ) -> Planner:
        return Planner(
            self.rank_group, self.label, self.settings, param_table, device, validated.codecs,
            validated.sparse, steps_before,
        )  # fmt: skip

    def _validate(self, param_table: ParamTable) -> ValidatedOptimizer:
        """Validates the parameters and registers the DistributedOptimizer as their owner.

        Raises:
            UsageError: Some of them are not supported; nothing has changed.
        """
        settings, size = self.settings, self.rank_group.size
        validated = validate_optimizer(self._optimizer, param_table, settings, size, self._model)
        register_params(self._owner(), self, param_table.params, param_table.names)
        return validated


class OptimizerParticipant:
    """Implements the world's `Participant` for a DistributedOptimizer.

    The optimizer owns its participant, and the world refers to it weakly.

    Args:
        session: What the optimizer trains with.
        optimizer: The optimizer that the script uses; not kept alive.
    """

    def __init__(self, session: OptimizerSession, optimizer: torch.optim.Optimizer) -> None:
        self._session, self._optimizer = session, weakref.ref(optimizer)

    @property
    def label(self) -> str:
        """Name of the optimizer, the same on all ranks."""
        return self._session.label

    @property
    def size(self) -> int:
        """Number of ranks that share gradients."""
        return self._session.rank_group.size

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that the script uses; None once it was garbage-collected."""
        return self._optimizer()

    @property
    def sends(self) -> bool:
        """Whether other ranks wait for gradients of this optimizer."""
        return self._session.live is not None

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters whose gradients are sent, with their names."""
        return self._session.named()

    def names_of_groups(self) -> list[list[str]] | None:
        """Returns the given parameter names by parameter group; None if a parameter has none."""
        return self._session.names_of_groups()

    def join_with_zeros(self) -> None:
        """Contributes zeros to the steps of other ranks until all ranks have joined. Collective."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._session.check_usable()
        while (controller := self._session.live) is not None:
            controller.drain()
            optimizer.zero_grad()
            if not controller.driver.contribute_zeros():
                break
            optimizer.step()

    def drain(self) -> None:
        """Applies every pending update and waits for gradients in flight."""
        if (controller := self._session.live) is not None:
            controller.drain()
            controller.up_to_date()

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns the progress by label, for messages about faults."""
        executor = self._session.executor
        return {self.label: executor.status() if executor is not None else {}}

    def set_timeline(self, writer: _core.TimelineWriter | None) -> None:
        """Records into `writer` from the next step on; None stops."""
        if (controller := self._session.live) is not None:
            controller.executor.timelines.set_script(writer)

    def block_reads(self, verdict: str) -> None:
        """After a fault: blocks reads of parameters until `apply_decision`."""
        session = self._session
        if (controller := session.live) is not None:
            session.update_guard.block_reads(
                verdict, session.param_table.params, controller.clean_up
            )

    def fail(self, verdict: str) -> None:
        """After `block_reads`: makes every wait raise FaultError(verdict)."""
        if (executor := self._session.executor) is not None:
            executor.fail(verdict)

    def progress(self) -> RankProgress | None:
        """After `block_reads`: returns this rank's progress; None if no reads were blocked."""
        controller = self._session.controller
        return self._session.update_guard.progress(
            controller.examine if controller is not None else _examine_alone
        )

    def apply_decision(self, verdict: str, decision: RecoveryDecision) -> None:
        """Ends the block: reads of parameters go on, or raise FaultError."""
        self._session.update_guard.apply_decision(verdict, decision)

    def orphan(self) -> list[Any]:
        """In a forked child: returns the objects whose threads do not exist there."""
        controller = self._session.live
        return [self] if controller is None else [self, controller.executor.orphan()]

    def close(self, whole_state: bool) -> None:
        """Applies pending updates, unless communication has failed; then ends the engine."""
        self._session.close(whole_state)


def _examine_alone(is_quiet: bool) -> tuple[bool, bool]:
    """For `UpdateGuard.progress`: a single rank's step is applied completely or not at all."""
    return not is_quiet, False

# SPDX-License-Identifier: Apache-2.0
"""Sends the gradients of backward passes and waits for their sums."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from usbyte import _core
from usbyte._util.transitions import advance
from usbyte.errors import UsageError
from usbyte.planning.cost_fit import Measured
from usbyte.torch.compression.state import CodecState
from usbyte.torch.fault.recovery import has_partial_step
from usbyte.torch.lazy_tensor import MaterializeFn, unwrap_all
from usbyte.torch.optimizer.gradients.grad_sender import GradientSender
from usbyte.torch.optimizer.gradients.in_flight_grads import InFlightGrads
from usbyte.torch.optimizer.gradients.plan_executor import PlanExecutor
from usbyte.torch.optimizer.gradients.step_checksum import StepChecksum
from usbyte.torch.optimizer.gradients.step_consensus import StepConsensus, StepVote
from usbyte.torch.optimizer.gradients.step_phase import TRANSITIONS, StepPhase
from usbyte.torch.optimizer.overlap.reduced_gradients import no_whole_gradients
from usbyte.torch.plan.decision import Decision
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.lifecycle import PlanLifecycle, PlanPhase
from usbyte.torch.plan.measurement import JobTimes
from usbyte.torch.plan.sparse import Counts, sparse_tensor
from usbyte.torch.runtime.device import Mark
from usbyte.torch.torch_private import DisableTorchFunction


class PlanDecider(Protocol):
    """The parts of the planner that the reducer uses.

    Attributes:
        sparse: Names of the parameters whose gradients are sent as rows.
    """

    sparse: Collection[str]

    def decide(
        self,
        times: JobTimes,
        measured: Sequence[Measured],
        topology: _core.Topology | None,
        rows: Mapping[str, Counts],
    ) -> Decision:
        """Makes one plan for all ranks. Collective."""


class Reducer:
    """Sums the gradients of parameters over all ranks, step after step.

    A backward pass calls `begin`, then `sender` sends its gradients, then it calls `end`. The first
    steps run the learning plan: DDP's buckets in order of registration. The plans that
    `PlanLifecycle` chooses on all ranks follow.

    Args:
        settings: Arguments of the DistributedOptimizer.
        param_table: Parameters of the optimizer. Indices of parameters are positions in it.
        planner: Makes the plans.
        executor: Runs the plan in force.
        lifecycle: Decides how long plans stay in force.
        codec_state: Codec state.
        check: Step check, which compares hyper-parameters and parameters across ranks.
        consensus: Step consensus with the other ranks.

    Attributes:
        names: Names of the parameters, by parameter index.
        device: Device of the parameters.
        sender: Sends the gradients of a backward pass, between `begin` and `end`.
        phase: Phase of the step whose gradients were sent last.
        in_flight: Whether gradients of the last backward pass have not been waited for; follows
            from `phase`.
        has_accumulated: Whether this rank has accumulated gradients since it last sent any.
        passes: Number of backward passes outside `no_sync` since gradients were last sent.
    """

    def __init__(
        self,
        settings: Settings,
        param_table: ParamTable,
        planner: PlanDecider,
        executor: PlanExecutor,
        lifecycle: PlanLifecycle,
        codec_state: CodecState,
        check: StepChecksum,
        consensus: StepConsensus,
    ) -> None:
        self.names, self.device = param_table.names, executor.device
        self._params = param_table.params
        self._planner, self._executor, self._lifecycle = planner, executor, lifecycle
        self._codec_state, self._check, self._consensus = codec_state, check, consensus
        self._sharded = settings.shard_optimizer
        self.phase, self.in_flight = StepPhase.NOTHING_SENT, False
        self.has_accumulated = False
        self.passes = 0
        self._used: list[bool] | None = None  # by tensor of the plan; None: not fetched yet
        self._waits_no_more = False  # set after a fault
        sparse = [name in planner.sparse for name in param_table.names]
        self._in_flight = InFlightGrads(self.names, self._params, sparse)
        self._in_flight.rebind(executor.flat_buffer.buffer, executor.grad_views())
        self.sender = GradientSender(settings, param_table, executor, self._in_flight, codec_state)

    @property
    def applied(self) -> bool:
        """Whether updates may have used sums of the last step."""
        applying = (StepPhase.APPLYING_SHARDS, StepPhase.APPLIED, StepPhase.COMPLETED)
        return self.phase in applying

    @property
    def is_joined(self) -> bool:
        """Whether this rank contributed zeros to the gradients that were sent last."""
        return self._consensus.is_joined

    def _advance(self, phase: StepPhase) -> None:
        self.phase = advance("a step", TRANSITIONS, self.phase, phase)
        self.in_flight = phase in (StepPhase.IN_FLIGHT, StepPhase.APPLYING_SHARDS)
        self.sender.is_sending = phase is StepPhase.IN_BACKWARD

    def defer(self) -> None:
        """Enters the phase in which each update waits for its own gradient."""
        self._advance(StepPhase.DEFERRED)

    def mark_applied(self) -> None:
        """Records that an update is about to use sums, or has used them."""
        if self.phase is StepPhase.IN_FLIGHT:
            self._advance(StepPhase.APPLYING_SHARDS)
        elif self.phase in (StepPhase.REDUCED, StepPhase.DEFERRED):
            self._advance(StepPhase.APPLIED)

    @property
    def learning(self) -> bool:
        """Whether the plan in force is the learning plan."""
        return self._lifecycle.learning

    @property
    def plan_ends(self) -> bool:
        """Whether the plan in force ends with the step about to be taken. Equal on all ranks."""
        ends = self._lifecycle.plan_ends(self._executor.steps)
        return ends and not self._consensus.any_joined()

    def ask_for_plan(self) -> None:
        """Votes for a new plan from the next step on, until there is one."""
        self._lifecycle.ask_for_plan()

    def close(self) -> None:
        """Makes gradients plain tensors again."""
        self._in_flight.unwrap()

    # Sums.

    def wait(self, indices: Iterable[int]) -> None:
        """Waits for the ops of the parameters `indices`.

        Their gradients are reduced then; with shards, `gathered` holds their new values.
        """
        if not self._waits_no_more:
            engine, tensor_of_param = self._executor.engine, self._executor.tensor_of_param
            stream = self.device.stream()
            for i in indices:
                engine.wait(tensor_of_param[i], stream)

    def co_arriving(self, indices: Sequence[int]) -> set[int]:
        """Returns parameters with a gradient on this rank that are co-arriving with `indices`."""
        co_arriving, own = self._executor.co_arriving, self._in_flight.own
        found: set[int] = set()
        for i in indices:
            if i not in found:  # else its co-arriving parameters are a subset of those found
                found.update(co_arriving[i])
        return found if all(own) else {j for j in found if own[j]}

    def sums(self, indices: Sequence[int]) -> dict[int, torch.Tensor | None]:
        """Returns the gradients of the parameters `indices`, which have arrived.

        Returns:
            By parameter index, in the order of `indices`; None if no rank had one.

        Raises:
            Error: A gradient was written to while it was in flight.
        """
        sent, rows = self._in_flight, self._executor.rows
        shown, versions = sent.shown, sent.versions
        simple = not (sent.shows_others or sent.has_private)
        found: dict[int, torch.Tensor | None] = {}
        unwrap_all(map(shown.__getitem__, indices))
        for i in indices:
            if shown[i]._version != versions[i]:
                raise sent.modified(i)
            if i in rows:
                self._take_rows(i)
            if not sent.own[i] and not self._is_used(i):
                found[i] = None
            else:
                found[i] = shown[i] if simple else sent.result(i)
        return found

    def _is_used(self, i: int) -> bool:
        """Returns whether any rank had a gradient of parameter `i`, of which this rank had none."""
        if not self._waits_no_more:
            self._executor.wait_for_control()
        is_used = self._used_by_tensor()[self._executor.tensor_of_param[i]]
        if not is_used:
            self._codec_state.rollback(self.names[i])
        return is_used

    def _take_rows(self, i: int) -> None:
        found = self._executor.engine.take_rows(self._executor.tensor_of_param[i])
        # In place, so that references to the sent gradient show the sum, as with dense gradients.
        self._in_flight.tensors[i].data = sparse_tensor(found, self._params[i], self.device)
        self._lifecycle.count_rows(self.names[i], found[2].own_rows, len(found[0]))
        self._in_flight.record_version(i)
        del self._executor.rows[i]

    def finalize_grads(self) -> None:
        """Waits for all gradients in flight and makes every `param.grad` final.

        Raises:
            Error: A gradient was written to while it was in flight.
        """
        stream, sent = self.device.stream(), self._in_flight
        if not self.learning:
            self._executor.engine.drain(stream)
        else:
            start = self.device.now()
            self._executor.engine.drain(stream)
            self._lifecycle.waited(start, self.device.now())
        sent.unwrap()
        sent.check_all()
        for i, param in enumerate(self._params):
            if not sent.own[i]:
                gone = sent.was_reset_by_user(i)
                if param.grad is None and not gone and not sent.sparse[i]:
                    sent.show_sum(i)
                self.wait([i])
                is_none = self.sums([i])[i] is None
                param.grad = None if gone or is_none else sent.shown[i]
            elif sent.sparse[i]:
                self.wait([i])
                self.sums([i])
            elif sent.shows_others:
                sent.copy_sum(i)
        self._advance(StepPhase.REDUCED)

    def gradient(self, i: int) -> torch.Tensor:
        """Returns the tensor that `param.grad` of parameter `i` was when its gradient was sent."""
        return self._in_flight.shown[i]

    def make_grads_lazy(self, fetch: Sequence[MaterializeFn]) -> None:
        """Makes every gradient lazy: its first read waits for its all-reduce.

        It stays lazy until it has been waited for.

        Args:
            fetch: By parameter, the function that materializes its gradient.
        """
        self._in_flight.make_lazy(fetch, expose_remote=self.in_flight)

    def untouched(self) -> bool:
        """Returns whether no `param.grad` in flight was replaced or reset.

        Raises:
            Error: A gradient was written to while it was in flight.
        """
        return self._in_flight.untouched()

    def dropped(self, renewed: int = -1) -> bool:
        """Returns whether the script has reset all gradients since they were sent.

        Args:
            renewed: Index of a parameter that has a new gradient already, in another tensor; -1
                (default) for none.
        """
        return self._in_flight.dropped(renewed)

    def begin_update(self) -> Mark:
        """Returns the start time of an update for `record_update`; 0.0 without a timeline."""
        return self.device.now() if self._executor.timelines.writers else 0.0

    def record_update(self, indices: Sequence[int], start: Mark) -> None:
        """Adds an update of `indices`, begun at `start` and completed now, to the timeline."""
        self._executor.record_update(indices, start)

    # Shards.

    def gathered(self, i: int) -> torch.Tensor:
        """Returns a view of the flat buffer: the gradient of parameter `i`, later its new value.

        The new value is there after `wait`.
        """
        with DisableTorchFunction():  # must not materialize the lazy gradient
            return self._in_flight.tensors[i].detach()

    def check_untouched(self) -> None:
        """Raises an error if a gradient in flight was changed, replaced or removed."""
        if not self._in_flight.untouched():
            raise no_whole_gradients("do not replace or remove any between backward() and step()")

    def wait_reduced(self) -> None:
        """Waits until this rank's shards hold the sums over all ranks."""
        self._executor.engine.wait_reduced(self.device.stream())

    def used_anywhere(self) -> list[bool]:
        """Returns, by parameter, whether any rank had a gradient; call it after `wait_reduced`."""
        if all(self._in_flight.own):
            return list(self._in_flight.own)  # saves the wait for the device
        by_tensor = self._used_by_tensor()
        used = [by_tensor[tensor] for tensor in self._executor.tensor_of_param]
        for name, was_used in zip(self.names, used, strict=True):
            if not was_used:
                self._codec_state.rollback(name)
        return used

    def _used_by_tensor(self) -> list[bool]:
        """Returns, by tensor of the plan, whether any rank had a gradient.

        The flags are fetched once in a step, because this waits for the device.
        """
        if self._used is None:
            self._used = [True, *map(bool, self._executor.flat_buffer.used.tolist())]
        return self._used

    def joined_in_part(self) -> bool:
        """Returns whether some ranks have joined while others have sent gradients.

        This waits for the reductions, also on a device.
        """
        self.wait_reduced()
        return all(self._executor.flat_buffer.votes[1:3].tolist())

    def release_gathers(self) -> None:
        """Allows the all_gathers to launch, because the shards hold the new values."""
        self._executor.engine.release_gathers(self.device.stream())
        applied = self.phase is StepPhase.APPLYING_SHARDS
        self._advance(StepPhase.APPLIED if applied else StepPhase.REDUCED)

    # After a fault.

    def has_all(self) -> bool:
        """Returns whether all sums of the last step have arrived in host memory."""
        if self.device.core is not None or self._executor.rows:
            return False
        return bool(self._executor.status()["phase"] == "idle")

    def may_be_partial(self) -> bool:
        """Returns whether updates may have used incomplete sums on the device."""
        return self.device.core is not None and has_partial_step(
            self._executor.status(), self.applied
        )

    def stop_waiting(self) -> None:
        """Takes gradients as they are from now on; call it only if `has_all` returned True."""
        self._waits_no_more = True
        self._executor.timelines.stop()

    # Plans.

    def finish_step(self, began: Mark) -> None:
        """Counts a completed step. After the last one of a plan, all ranks switch to the next.

        Nothing may be in flight and no update may be pending. Collective at the end of a plan.

        Args:
            began: Time at which the optimizer's step began. A closure may have run backward in it.
        """
        executor, consensus = self._executor, self._consensus
        if self.phase in (StepPhase.NOTHING_SENT, StepPhase.COMPLETED):
            return  # the step used the same sums again
        self._advance(StepPhase.COMPLETED)
        if self._lifecycle.affects_plan(executor.steps):
            if consensus.any_joined():
                return self._lifecycle.skip_step(self._in_flight.own)
            due = self._lifecycle.plan_boundary_next(executor.steps)
            consensus.process_votes(0)  # on earlier steps, before a new flat buffer
            if due and not consensus.all_ranks_step(StepVote.STEPPED):
                return self._lifecycle.skip_step(self._in_flight.own)
        plan = self._lifecycle.end_step(
            executor.steps,
            executor.plan,
            began,
            self._in_flight.own,
            executor.ready_s,
            self._decide,
        )
        if plan is not None:
            executor.switch_plan(plan, self.learning)
            self._in_flight.rebind(executor.flat_buffer.buffer, executor.grad_views())

    def _decide(self, times: JobTimes, rows: Mapping[str, Counts]) -> Decision:
        """Chooses a plan with the other ranks, from measured times and a probe of the network."""
        measured, topology = self._executor.probe()
        decision = self._planner.decide(times, measured, topology, rows)
        self._executor.set_speeds(decision.network.topology)
        return decision

    # Backward passes.

    def send_zeros(self) -> bool:
        """Contributes zeros to a step of the other ranks and waits for their flags.

        All gradients of this rank must be reset.

        Returns:
            Whether any rank has sent gradients. If not, call `drop_zeros`.
        """
        self._consensus.has_data = False
        try:
            self.begin()
            self.end()
        finally:
            self._consensus.has_data = True
        self._executor.wait_for_control()
        return bool(self._executor.flat_buffer.votes[1].item())

    def drop_zeros(self) -> None:
        """Ends a step to which every rank contributed zeros: nothing is in flight any more."""
        if self._sharded and not self.learning:
            self.wait_reduced()
            self.release_gathers()  # no rank uses what is gathered
        self.finalize_grads()

    def begin(self) -> None:
        """Begins a backward pass that sends gradients.

        Raises:
            UsageError: Gradients of the last backward pass are still in flight.
            MismatchError: Some ranks have skipped a step that others have taken; raised on all
                ranks.
        """
        if self.in_flight:
            other = "remove shard_optimizer" if self._sharded else 'use overlap="backward"'
            raise UsageError(
                "backward() ran again before step() while gradients were in flight. Accumulate "
                f"under optimizer.no_sync(), or {other}."
            )
        self._executor.engine.drain(self.device.stream())
        self._executor.between_steps(self._lifecycle.phase is PlanPhase.FINAL)
        self._consensus.begin_step(self.phase, self._sharded and not self.learning)
        self._check.begin(self._executor.steps)
        self._in_flight.begin()
        self._move_retained_grads()
        self._codec_state.begin_step()
        self.has_accumulated = self.sender.shows_parts = False
        self._consensus.record_participation()
        self._executor.grad_writer.begin()
        self._used = None
        self._advance(StepPhase.IN_BACKWARD)

    def _move_retained_grads(self) -> None:
        """Saves gradients in the flat buffer that the script keeps, before they are overwritten."""
        if self._sharded and not self.learning:
            return  # scripts see no gradients, and views of shards must stay in the flat buffer
        if self._in_flight.move_retained():
            self._executor.renew(self.learning)
            self._in_flight.rebind(self._executor.flat_buffer.buffer, self._executor.grad_views())

    def end(self) -> None:
        """Ends a backward pass: sends zeros for the parameters without a gradient, and flags."""
        self.sender.send_rest()
        used = [self._in_flight.own[i] for i in self._executor.param_of_tensor]
        votes = self._consensus.flags(wants_plan=self._lifecycle.end_backward())
        self._executor.grad_writer.send_flags([*map(float, used), *votes])
        self._executor.engine.end_backward()
        self._executor.timelines.record_passes()
        self._in_flight.check_unreplaced()
        self.passes = 0
        self._advance(StepPhase.IN_FLIGHT)

# SPDX-License-Identifier: Apache-2.0
"""Sends the gradients of backward passes and waits for their sums."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch

from usbyte.errors import UsageError
from usbyte.torch.compression.state import CodecState
from usbyte.torch.fault.recovery import has_partial_step
from usbyte.torch.lazy_tensor import MaterializeFn, unwrap
from usbyte.torch.optimizer.compat.shared_memory import shares_memory
from usbyte.torch.optimizer.gradients.in_flight_grads import InFlightGrads
from usbyte.torch.optimizer.gradients.plan_executor import PlanExecutor
from usbyte.torch.optimizer.gradients.step_checksum import StepChecksum
from usbyte.torch.optimizer.gradients.step_consensus import StepConsensus, StepVote
from usbyte.torch.optimizer.gradients.step_phase import StepPhase, advance
from usbyte.torch.plan.decision import Decision
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.lifecycle import PlanLifecycle
from usbyte.torch.plan.measurement import JobTimes
from usbyte.torch.plan.planner import Planner
from usbyte.torch.plan.sparse import Counts, Rows, empty_like, sparse_tensor
from usbyte.torch.reduce_op import Sum
from usbyte.torch.runtime.device import Mark
from usbyte.torch.runtime.tensor_checks import check_sendable
from usbyte.torch.torch_private import DisableTorchFunction, not_compiled


def _one_reference() -> int:
    """Returns `sys.getrefcount` for a tensor that only one local variable refers to."""
    tensor = torch.empty(0, dtype=torch.float32, device="cpu")
    return sys.getrefcount(tensor)


_ONE_REFERENCE = _one_reference()


def no_whole_gradients(remedy: str) -> UsageError:
    """Returns the error that a script needs gradients of which a rank has only a shard."""
    return UsageError(f"with shard_optimizer=True no rank has whole gradients: {remedy}")


class Reducer:
    """Sums the gradients of parameters over all ranks, step after step.

    A backward pass calls `begin`, then `send` for each gradient, then `end`. The first steps run
    the learning plan: DDP's buckets in order of registration. The plans that `PlanLifecycle`
    chooses on all ranks follow.

    Args:
        settings: Arguments of the DistributedOptimizer.
        param_table: Parameters of the optimizer. Indices of parameters are positions in it.
        planner: Makes the plans.
        executor: Runs the plan in force.
        lifecycle: Decides how long plans stay in force.
        memory: Codec state.
        check: Step check, which compares hyper-parameters and parameters across ranks.
        consensus: Step consensus with the other ranks.

    Attributes:
        names: Names of the parameters, by parameter index.
        device: Device of the parameters.
        phase: Phase of the step whose gradients were sent last.
        in_flight: Whether gradients of the last backward pass have not been waited for; follows
            from `phase`.
        has_accumulated: Whether this rank has accumulated gradients since it last sent any.
        passes: Number of backward passes outside `no_sync` since gradients were last sent.
        shows_parts: Whether gradients of the last backward pass are in memory that the script uses
            in other ways, such as its own flat buffer.
    """

    def __init__(
        self,
        settings: Settings,
        param_table: ParamTable,
        planner: Planner,
        executor: PlanExecutor,
        lifecycle: PlanLifecycle,
        memory: CodecState,
        check: StepChecksum,
        consensus: StepConsensus,
    ) -> None:
        self.names, self.device = param_table.names, executor.device
        self._params = param_table.params
        self._sparse = [name in planner.sparse for name in param_table.names]
        self._planner, self._executor, self._lifecycle = planner, executor, lifecycle
        self._memory, self._check, self._consensus = memory, check, consensus
        self._sharded, self._densifies = settings.shard_optimizer, settings.sparse_as_dense
        self._sums = settings.op == Sum
        self.phase, self.in_flight = StepPhase.NOTHING_SENT, False
        self.has_accumulated = self.shows_parts = False
        self.passes = 0
        self._used: list[bool] | None = None  # by tensor of the plan; None: not fetched yet
        # By parameter, a gradient, or zeros in its place, was sent since the last reset.
        self._holds_result = [False] * len(self._params)
        self._at_reset = self._gradients_now()  # their identities and versions at the last reset
        self._waits_no_more = False  # set after a fault
        self._in_flight = InFlightGrads(self.names, self._params, self._sparse)
        self._in_flight.rebind(executor.flat_buffer.buffer, executor.grad_views())

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass that sends gradients has begun and not ended."""
        return self.phase is StepPhase.IN_BACKWARD

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
        self.phase = advance(self.phase, phase)
        self.in_flight = phase in (StepPhase.IN_FLIGHT, StepPhase.APPLYING_SHARDS)

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

    def wait(self, i: int) -> torch.Tensor | None:
        """Waits for the reduced gradient of parameter `i`; returns None if no rank had one."""
        if not self._waits_no_more:
            executor = self._executor
            executor.engine.wait(executor.tensor_of_param[i], self.device.stream())
        return self.sum(i)

    def co_arriving(self, indices: Sequence[int]) -> set[int]:
        """Returns parameters with a gradient on this rank that are co-arriving with `indices`."""
        together = self._executor.co_arriving
        lists = {id(alike): alike for alike in (together[i] for i in indices)}
        return {j for alike in lists.values() for j in alike if self._in_flight.own[j]}

    def sum(self, i: int) -> torch.Tensor | None:
        """Returns the gradient of parameter `i`, which has arrived; None if no rank had one.

        Raises:
            Error: The gradient was written to while it was in flight.
        """
        sent = self._in_flight
        unwrap(sent.shown[i])
        if sent.shown[i]._version != sent.versions[i]:
            raise sent.modified(i)
        if i in self._executor.rows:
            self._take_rows(i)
        if not sent.own[i]:
            if not self._waits_no_more:
                self._executor.wait_for_control()
            if not self._used_by_slot()[self._executor.tensor_of_param[i]]:
                self._memory.rollback(self.names[i])
                return None
        return sent.result(i) if sent.shows_others or sent.has_private else sent.shown[i]

    def _take_rows(self, i: int) -> None:
        found = self._executor.engine.take_rows(self._executor.tensor_of_param[i])
        # In place, so that references to the sent gradient show the sum, as with dense gradients.
        self._in_flight.tensors[i].data = sparse_tensor(found, self._params[i], self.device)
        self._lifecycle.count_rows(self.names[i], found[2].own_rows, len(found[0]))
        self._in_flight.record_version(i)
        del self._executor.rows[i]

    def settle(self) -> None:
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
                if param.grad is None and not gone and not self._sparse[i]:
                    sent.show_sum(i)
                total = self.wait(i)
                param.grad = None if gone or total is None else sent.shown[i]
            elif self._sparse[i]:
                self.wait(i)
            elif sent.shows_others:
                sent.bring(i)
        self._advance(StepPhase.REDUCED)

    def gradient(self, i: int) -> torch.Tensor:
        """Returns the tensor that `param.grad` of parameter `i` was when its gradient was sent."""
        return self._in_flight.shown[i]

    def hold_gradients(self, fetch: Sequence[MaterializeFn]) -> None:
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

    def unsent_gradient(self) -> int:
        """Returns a parameter whose gradient was set since the last reset but not sent; else -1.

        Zeros do not count: torch.distributed.checkpoint sets them to make optimizers allocate
        state.
        """
        with DisableTorchFunction():  # lazy parameters stay lazy
            for i, param in enumerate(self._params):
                own = param.grad
                if own is None or self._is_result(i, own) or _state_of(own) == self._at_reset[i]:
                    continue
                if own.is_sparse or own.any():
                    return i
        return -1

    def _is_result(self, i: int, grad: torch.Tensor) -> bool:
        # Another tensor than the one shown for other ranks' gradients was set by hand.
        sent = self._in_flight
        return self._holds_result[i] and (sent.own[i] or grad is sent.shown[i])

    def forget_results(self, set_to_none: bool) -> None:
        """Records that the script has reset the gradients, to None (`set_to_none`) or to zeros."""
        self._holds_result = [False] * len(self._params)
        self._at_reset = [None] * len(self._params) if set_to_none else self._gradients_now()

    def _gradients_now(self) -> list[tuple[int, int] | None]:
        with DisableTorchFunction():  # lazy parameters stay lazy
            return [None if p.grad is None else _state_of(p.grad) for p in self._params]

    def begin_update(self) -> Mark:
        """Returns the start time of an update for `record_update`; 0.0 without a timeline."""
        return self.device.now() if self._executor.writer is not None else 0.0

    def record_update(self, indices: Sequence[int], start: Mark) -> None:
        """Adds an update of `indices`, begun at `start` and completed now, to the timeline."""
        self._executor.record_update(indices, start)

    # Shards.

    def gathered(self, i: int) -> torch.Tensor:
        """Returns a view of the flat buffer: the gradient of parameter `i`, later its new value.

        The new value is there after `wait_gathered`.
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
        by_slot = self._used_by_slot()
        used = [by_slot[slot] for slot in self._executor.tensor_of_param]
        for name, was_used in zip(self.names, used, strict=True):
            if not was_used:
                self._memory.rollback(name)
        return used

    def _used_by_slot(self) -> list[bool]:
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

    def wait_gathered(self, i: int) -> None:
        """Waits until `gathered(i)` holds the new value of parameter `i`."""
        self._executor.engine.wait(self._executor.tensor_of_param[i], self.device.stream())

    # After a fault.

    def has_all(self) -> bool:
        """Returns whether all sums of the last step have arrived in host memory."""
        if self.device.core is not None or self._executor.rows:
            return False
        return bool(self._executor.status()["phase"] == "idle")

    def is_torn(self) -> bool:
        """Returns whether updates may have used incomplete sums on the device."""
        return self.device.core is not None and has_partial_step(
            self._executor.status(), self.applied
        )

    def stop_waiting(self) -> None:
        """Takes gradients as they are from now on; call it only if `has_all` returned True."""
        self._waits_no_more, self._executor.writer = True, None

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
        self.settle()

    def begin(self) -> None:
        """Begins a backward pass that sends gradients.

        Raises:
            UsageError: Gradients of the last backward pass are still in flight.
            MismatchError: Some ranks have skipped a step that others have taken; raised on all
                ranks.
        """
        if self.in_flight:
            other = "leave out shard_optimizer" if self._sharded else 'use overlap="backward"'
            raise UsageError(
                "backward() ran again before step() while gradients were on their way. Accumulate "
                f"under optimizer.no_sync(), or {other}."
            )
        self._executor.engine.drain(self.device.stream())
        self._consensus.begin_step(self.phase, self._sharded and not self.learning)
        self._check.begin(self._executor.steps)
        self._in_flight.begin()
        self._leave_kept_gradients()
        self._memory.begin_step()
        self.has_accumulated = self.shows_parts = False
        self._consensus.record_participation()
        self._executor.sender.begin()
        self._used = None
        self._advance(StepPhase.IN_BACKWARD)

    def _leave_kept_gradients(self) -> None:
        """Saves gradients in the flat buffer that the script keeps, before they are overwritten."""
        if self._sharded and not self.learning:
            return  # scripts see no gradients, and views of shards must stay in the flat buffer
        if self._in_flight.leave_kept():
            self._executor.renew(self.learning)
            self._in_flight.rebind(self._executor.flat_buffer.buffer, self._executor.grad_views())

    def send(self, i: int) -> None:
        """Sends the gradient of parameter `i`.

        The caller must hold no reference to it: references are counted to find those of the script.
        """
        param, sent = self._params[i], self._in_flight
        if sent.own[i]:
            raise self._second_gradient(i)
        grad = param.grad
        if grad is None:
            raise UsageError(
                f"the gradient of '{self.names[i]}' was reset by a hook of its parameter before it "
                "was sent: leave gradients to the optimizer until step()"
            )
        if grad is sent.shown[i]:
            self._check_not_summed(i)
        sent.own[i] = self._holds_result[i] = True
        if type(grad) is not torch.Tensor:
            check_sendable(f"the gradient of '{self.names[i]}'", grad, or_sparse=True)
        if self._sparse[i]:
            return self._send_rows(i, grad)
        is_shared = False
        # torch makes a new gradient, or adds to an older one. Only an older one can be used by the
        # script in other ways: as a part of its own flat buffer, or in a list.
        # A hook in compiled code cannot read a version directly.
        is_older = _is_older(grad) if torch.compiler.is_compiling() else grad._version > 0
        if is_older and grad is not sent.tensors[i]:
            is_shared = is_part = shares_memory(grad)
            is_shared = is_shared or sys.getrefcount(grad) > _ONE_REFERENCE
            self.shows_parts = self.shows_parts or is_part
        if grad.layout is not torch.strided:
            if not self._densifies:
                raise UsageError(
                    f"the gradient of '{self.names[i]}' is sparse, which was not to be seen when "
                    "the optimizer was wrapped: give DistributedOptimizer model= or "
                    "sparse_as_dense=True"
                )
            param.grad = grad = grad.to_dense()
        if grad.dtype != sent.tensors[i].dtype:
            raise UsageError(
                f"the gradient of '{self.names[i]}' is of {grad.dtype}, and was of "
                f"{sent.tensors[i].dtype} when the optimizer was wrapped: wrap it anew after "
                "the model's dtype is changed"
            )
        if is_shared or sent.has_private:
            shown = sent.show(i, grad, is_shared)
        else:
            sent.shown[i] = shown = sent.tensors[i]
        self._executor.sender.send(i, grad, shown)
        sent.versions[i] = sent.shown[i]._version

    def _second_gradient(self, i: int) -> UsageError:
        return UsageError(
            f"backward() has given a second gradient of '{self.names[i]}' after the first was "
            "sent, as where checkpoint() runs a module twice: pass use_reentrant=False there, or "
            "run backward() under optimizer.no_sync(), so that step() sends the sum. If an earlier "
            "backward() has failed, restart the job from its last checkpoint"
        )

    def _send_rows(self, i: int, grad: torch.Tensor) -> None:
        self._executor.rows[i] = Rows(self.names[i], grad, self._params[i], self.device)
        self._executor.rows[i].give(self._executor.engine, self._executor.tensor_of_param[i])
        self._in_flight.tensors[i] = self._in_flight.shown[i] = grad
        self._in_flight.record_version(i)

    def _check_not_summed(self, i: int) -> None:
        # Averaging an average changes nothing; summing a sum multiplies it.
        if self._sums and self._holds_result[i]:
            raise UsageError(
                f"the gradient of '{self.names[i]}' is a sum over ranks and would be summed again: "
                "with op=Sum, call optimizer.zero_grad() after each step and accumulate "
                "under optimizer.no_sync()"
            )

    def end(self) -> None:
        """Ends the sends of a backward pass: sends zeros for the parameters without a gradient."""
        for i, param in enumerate(self._params):
            if self._in_flight.own[i]:
                continue
            if param.grad is not None:  # of an earlier micro-batch or step: counts, as in DDP
                self.send(i)
                continue
            self._holds_result[i] = True
            if self._sparse[i]:
                self._send_rows(i, empty_like(param))
            else:
                self._memory.snapshot(self.names[i])
                self._executor.sender.send_zeros(i)
                self._in_flight.shown[i] = self._in_flight.tensors[i]
                self._in_flight.record_version(i)
        used = [self._in_flight.own[i] for i in self._executor.param_of_tensor]
        votes = self._consensus.flags(wants_plan=self._lifecycle.end_backward())
        self._executor.sender.send_flags([*map(float, used), *votes])
        self._executor.engine.end_backward()
        self._in_flight.check_kept()
        self.passes = 0
        self._advance(StepPhase.IN_FLIGHT)


@not_compiled
def _is_older(grad: torch.Tensor) -> bool:
    """Returns whether the gradient existed before: torch has not just made it."""
    return grad._version > 0


def _state_of(grad: torch.Tensor) -> tuple[int, int]:
    """Returns a value that changes when the gradient is replaced or written to; no reference."""
    return id(grad), grad._version

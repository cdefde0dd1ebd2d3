# SPDX-License-Identifier: Apache-2.0
"""From backward passes to sums: hooks that send gradients, and what waits for them."""

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
    """What `sys.getrefcount` counts for a tensor that a local variable alone refers to."""
    tensor = torch.empty(0, dtype=torch.float32, device="cpu")
    return sys.getrefcount(tensor)


_ONE_REFERENCE = _one_reference()


def no_whole_gradients(remedy: str) -> UsageError:
    """Somebody wants what a rank has a shard of only."""
    return UsageError(f"with shard_optimizer=True no rank has whole gradients: {remedy}")


class Reducer:
    """Sums the gradients of parameters over all ranks, step after step.

    A backward pass calls `begin`, `send` for each gradient, and `end`. The first steps follow DDP's
    plan over the order of registration, later ones the plans that `PlanLifecycle` has all ranks
    agree on.

    Args:
        settings: Arguments of the DistributedOptimizer.
        param_table: The parameters.
        planner: Makes the plans.
        executor: Runs the plan in force.
        lifecycle: Decides how long plans stay in force.
        memory: State of the codecs.
        check: Compares what ranks are about to apply.
        consensus: Agrees with the other ranks about steps.

    Attributes:
        names: By parameter, its name.
        device: Where parameters are.
        phase: Of the step whose gradients were sent last.
        in_flight: Gradients of the last backward pass have not been waited for; follows `phase`.
        has_accumulated: This rank has accumulated gradients since it last sent any.
        passes: Backward passes since gradients were last sent, of those that count.
        shows_parts: Gradients of the last backward pass lie in memory that the script uses in other
            ways, such as a flat buffer.
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
        self._used: list[bool] | None = None  # by any rank, by tensor of the plan, once it is known
        # By parameter, a gradient was sent since gradients were last reset.
        self._holds_result = [False] * len(self._params)
        self._at_reset = self._gradients_now()  # those that were there then
        self._waits_no_more = False  # after a fault
        self._in_flight = InFlightGrads(self.names, self._params, self._sparse)
        self._in_flight.rebind(executor.flat_buffer.buffer, executor.grad_views())

    @property
    def in_backward(self) -> bool:
        """A backward pass that sends has begun and not ended."""
        return self.phase is StepPhase.IN_BACKWARD

    @property
    def applied(self) -> bool:
        """Updates may have used sums of the last step."""
        applying = (StepPhase.APPLYING_SHARDS, StepPhase.APPLIED, StepPhase.COMPLETED)
        return self.phase in applying

    @property
    def is_joined(self) -> bool:
        """This rank contributed zeros to what was sent last."""
        return self._consensus.is_joined

    def _advance(self, phase: StepPhase) -> None:
        self.phase = advance(self.phase, phase)
        self.in_flight = phase in (StepPhase.IN_FLIGHT, StepPhase.APPLYING_SHARDS)

    def defer(self) -> None:
        """Each update waits for its own gradient from now on."""
        self._advance(StepPhase.DEFERRED)

    def mark_applied(self) -> None:
        """An update is about to use sums, or has."""
        if self.phase is StepPhase.IN_FLIGHT:
            self._advance(StepPhase.APPLYING_SHARDS)
        elif self.phase in (StepPhase.REDUCED, StepPhase.DEFERRED):
            self._advance(StepPhase.APPLIED)

    @property
    def learning(self) -> bool:
        """True until the plan is made from measurements."""
        return self._lifecycle.learning

    @property
    def plan_ends(self) -> bool:
        """On all ranks, the plan in force ends with the step that is about to be taken."""
        ends = self._lifecycle.plan_ends(self._executor.steps)
        return ends and not self._consensus.any_joined()

    def ask_for_plan(self) -> None:
        """This rank votes for a new plan; see `PlanLifecycle`."""
        self._lifecycle.ask_for_plan()

    def close(self) -> None:
        """Makes gradients plain tensors again."""
        self._in_flight.unwrap()

    # Sums.

    def wait(self, i: int) -> torch.Tensor | None:
        """Waits for the reduced gradient of parameter i; None if no rank had one."""
        if not self._waits_no_more:
            executor = self._executor
            executor.engine.wait(executor.tensor_of_param[i], self.device.stream())
        return self.sum(i)

    def co_arriving(self, indices: Sequence[int]) -> set[int]:
        """Parameters that this rank had gradients for, whose sums are there when those of these."""
        together = self._executor.co_arriving
        lists = {id(alike): alike for alike in (together[i] for i in indices)}
        return {j for alike in lists.values() for j in alike if self._in_flight.own[j]}

    def sum(self, i: int) -> torch.Tensor | None:
        """The reduced gradient of parameter i, which has arrived; None if no rank used it.

        Raises:
            Error: Somebody wrote to it while it was in flight.
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
        # Whoever has the gradient that was sent has the sum from now on, as with dense ones.
        self._in_flight.tensors[i].data = sparse_tensor(found, self._params[i], self.device)
        self._lifecycle.count_rows(self.names[i], found[2].own_rows, len(found[0]))
        self._in_flight.record_version(i)
        del self._executor.rows[i]

    def settle(self) -> None:
        """Waits for everything in flight and makes every `param.grad` final.

        Raises:
            Error: Somebody wrote to a gradient while it was in flight.
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
        """What `param.grad` of parameter i was set to when its gradient was sent."""
        return self._in_flight.shown[i]

    def hold_gradients(self, fetch: Sequence[MaterializeFn]) -> None:
        """Who reads a gradient has it fetched first, until it was waited for or released."""
        self._in_flight.make_lazy(fetch, expose_remote=self.in_flight)

    def untouched(self) -> bool:
        """See `InFlightGrads`."""
        return self._in_flight.untouched()

    def dropped(self, renewed: int = -1) -> bool:
        """See `InFlightGrads`."""
        return self._in_flight.dropped(renewed)

    def unsent_gradient(self) -> int:
        """A parameter whose gradient nobody has sent since gradients were last reset, or -1.

        Zeros do not count, with which torch.distributed.checkpoint has optimizers make their state.
        """
        with DisableTorchFunction():  # parameters may be held
            for i, param in enumerate(self._params):
                own = param.grad
                if own is None or self._holds_result[i] or _state_of(own) == self._at_reset[i]:
                    continue
                if own.is_sparse or own.any():
                    return i
        return -1

    def forget_results(self, set_to_none: bool) -> None:
        """The user has reset the gradients, to None or to zeros."""
        self._holds_result = [False] * len(self._params)
        self._at_reset = [None] * len(self._params) if set_to_none else self._gradients_now()

    def _gradients_now(self) -> list[tuple[int, int] | None]:
        with DisableTorchFunction():  # parameters may be held
            return [None if p.grad is None else _state_of(p.grad) for p in self._params]

    def begin_update(self) -> Mark:
        """For `PlanExecutor.record_update`."""
        return self.device.now() if self._executor.writer is not None else 0.0

    def record_update(self, indices: Sequence[int], start: Mark) -> None:
        """See `PlanExecutor`."""
        self._executor.record_update(indices, start)

    # Shards.

    def gathered(self, i: int) -> torch.Tensor:
        """Where the arena holds parameter i's gradient and then, once gathered, its new value."""
        with DisableTorchFunction():  # the gradient is held
            return self._in_flight.tensors[i].detach()

    def check_untouched(self) -> None:
        """Raises an error if the user has changed, replaced or removed a gradient in flight."""
        if not self._in_flight.untouched():
            raise no_whole_gradients("do not replace or remove any between backward() and step()")

    def wait_reduced(self) -> None:
        """Waits until this rank's shards hold sums over all ranks."""
        self._executor.engine.wait_reduced(self.device.stream())

    def used_anywhere(self) -> list[bool]:
        """By parameter, whether any rank has a gradient for it; valid once reduced."""
        if all(self._in_flight.own):
            return list(self._in_flight.own)  # a device need not be waited for
        by_slot = self._used_by_slot()
        used = [by_slot[slot] for slot in self._executor.tensor_of_param]
        for name, was_used in zip(self.names, used, strict=True):
            if not was_used:
                self._memory.rollback(name)
        return used

    def _used_by_slot(self) -> list[bool]:
        """Looked at once in a step, as a device has to be waited for."""
        if self._used is None:
            self._used = [True, *map(bool, self._executor.flat_buffer.used.tolist())]
        return self._used

    def joined_in_part(self) -> bool:
        """Some ranks have joined, others have sent gradients; waits, on a device too."""
        self.wait_reduced()
        return all(self._executor.flat_buffer.votes[1:3].tolist())

    def release_gathers(self) -> None:
        """The shards hold new values: lets the all_gathers go."""
        self._executor.engine.release_gathers(self.device.stream())
        applied = self.phase is StepPhase.APPLYING_SHARDS
        self._advance(StepPhase.APPLIED if applied else StepPhase.REDUCED)

    def wait_gathered(self, i: int) -> None:
        """Waits until `gathered(i)` holds parameter i's new value."""
        self._executor.engine.wait(self._executor.tensor_of_param[i], self.device.stream())

    # After a fault.

    def has_all(self) -> bool:
        """Whether the sums of the last step are all in the host's memory."""
        if self.device.core is not None or self._executor.rows:
            return False
        return bool(self._executor.status()["phase"] == "idle")

    def is_torn(self) -> bool:
        """Whether updates may have used sums on the device that were not whole."""
        return self.device.core is not None and has_partial_step(
            self._executor.status(), self.applied
        )

    def stop_waiting(self) -> None:
        """Gradients are taken as they are, which `has_all` has found to be in order."""
        self._waits_no_more, self._executor.writer = True, None

    # Plans.

    def finish_step(self, began: Mark) -> None:
        """Counts a completed step; after the last one under a plan, all ranks adopt the next plan.

        To be called when everything is drained and no update is pending.

        Args:
            began: When the optimizer's step began; a closure may have run backward in it.
        """
        executor, consensus = self._executor, self._consensus
        if self.phase in (StepPhase.NOTHING_SENT, StepPhase.COMPLETED):
            return  # a step with the same sums once more
        self._advance(StepPhase.COMPLETED)
        if self._lifecycle.affects_plan(executor.steps):
            if consensus.any_joined():
                return self._lifecycle.skip_step(self._in_flight.own)
            due = self._lifecycle.plan_boundary_next(executor.steps)
            consensus.process_votes(0)  # of earlier steps first; and the flat buffer may go
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
        """Plans with the other ranks, from what they have learned and a probe of the network."""
        measured, topology = self._executor.probe()
        decision = self._planner.decide(times, measured, topology, rows)
        self._executor.set_speeds(decision.network.topology)
        return decision

    # Backward passes.

    def send_zeros(self) -> bool:
        """Takes part in a step of the other ranks with nothing; waits for them.

        All gradients of this rank must be reset.

        Returns:
            Whether any rank has sent something; if not, `drop_zeros` is to follow.
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
        """No rank has sent anything: nothing is in flight any more."""
        if self._sharded and not self.learning:
            self.wait_reduced()
            self.release_gathers()  # of nothing, which nobody is going to take
        self.settle()

    def begin(self) -> None:
        """A backward pass is about to send gradients.

        Raises:
            UsageError: Those of the last one are on their way.
            MismatchError: On all ranks: some have skipped a step that others have taken.
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
        """Lets a script keep gradients in the arena that the next ones would overwrite."""
        if self._sharded and not self.learning:
            return  # scripts see no gradients, and the shards' views share the arena's memory
        if self._in_flight.leave_kept():
            self._executor.renew(self.learning)
            self._in_flight.rebind(self._executor.flat_buffer.buffer, self._executor.grad_views())

    def send(self, i: int) -> None:
        """Sends the gradient that parameter i has. Callers must hold no reference to it."""
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
        # torch makes a gradient, or adds to one that is there, which alone a script may use in
        # other ways: as a part of a flat buffer, or in a list.
        # Compiled code that runs hooks cannot look at a version.
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
        """All gradients of the backward pass are there: sends zeros for those that it has not."""
        for i, param in enumerate(self._params):
            if self._in_flight.own[i]:
                continue
            if param.grad is None and self._sparse[i]:
                self._send_rows(i, empty_like(param))
            elif param.grad is None:
                self._memory.snapshot(self.names[i])
                self._executor.sender.send_zeros(i)
                self._in_flight.shown[i] = self._in_flight.tensors[i]
                self._in_flight.record_version(i)
            else:  # from an earlier micro-batch, or kept from the last step: counts, as in DDP
                self.send(i)
        used = [self._in_flight.own[i] for i in self._executor.param_of_tensor]
        votes = self._consensus.flags(wants_plan=self._lifecycle.end_backward())
        self._executor.sender.send_flags([*map(float, used), *votes])
        self._executor.engine.end_backward()
        self._in_flight.check_kept()
        self.passes = 0
        self._advance(StepPhase.IN_FLIGHT)


@not_compiled
def _is_older(grad: torch.Tensor) -> bool:
    """Whether torch has not just made it."""
    return grad._version > 0


def _state_of(grad: torch.Tensor) -> tuple[int, int]:
    """Changes when the gradient is replaced or written to. Keeps no reference to it."""
    return id(grad), grad._version

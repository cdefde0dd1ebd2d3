"""Gradients on their way: hooks that fill the arena, the engine that sends it, the plan."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Variable

from usbyte import _core
from usbyte.errors import Error, FaultError, UsageError
from usbyte.torch.arena import Arena
from usbyte.torch.awaited import Fetch, hold, release
from usbyte.torch.compression import Memory, remembers
from usbyte.torch.context import Context
from usbyte.torch.decision import Decision
from usbyte.torch.device import Device, Mark
from usbyte.torch.exchange import TorchExchange
from usbyte.torch.gates import Gates
from usbyte.torch.learning import Times
from usbyte.torch.link import Link
from usbyte.torch.mesh import Given
from usbyte.torch.ops import Average
from usbyte.torch.plan_cycle import PlanCycle
from usbyte.torch.planning import Planner
from usbyte.torch.probe import LARGEST_BYTES, measure, measure_dimensions
from usbyte.torch.salvage import torn
from usbyte.torch.sending import sender
from usbyte.torch.sparse import Counts, Rows, empty_like, sparse_tensor
from usbyte.torch.staged import mesh_of

# How long the network is probed goes by what there is to gain: jobs of fewer bytes than this get a
# share of the time, down to the least.
_CAREFUL_BYTES = 8 << 20
_LEAST_CARE = 1 / 8


class _Orphan:
    """Stands for an engine in a process that was forked, which has none of its threads."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            "this process was forked from a rank and cannot train or wait for gradients: start it "
            "with the method 'spawn', or fork it between optimizer.step() and the next backward()"
        )


class Reducer:
    """Sums the scaled gradients of `params` over all ranks, step after step.

    The first steps follow DDP's plan over the order of registration, later ones the plans that
    `PlanCycle` has all ranks agree on; with each the arena is laid out anew.

    Args:
        context: The ranks.
        names: Of the parameters, unique.
        params: With gradients, on `device`, of floating dtypes.
        device: Where they are.
        planner: Makes the plans.
        gates: Knows when the forward pass needs each parameter.
        scale: Applied to every gradient before the sum over ranks; 1 / size for the average.
        densifies: Sparse gradients of parameters not known to have such are sent as dense ones.
        adapt: Learn and plan anew when steps change; see `PlanCycle`.
        may_ask: Likewise, when `ask_for_plan` is called on a rank.
        sharded: Once learned, all_gathers wait for `release_gathers`.
        passes_per_step: Backward passes that accumulate until the last of them sends.
        topology: Dimensions that all_reduces may be routed through; None for none.
        on_first_gradient: Called inside `backward()` before the first gradient of a step is taken.
        on_gradient: Called inside `backward()` with the index of each parameter whose gradient is
            there.
        on_backward_end: Called inside `backward()` when the last gradient is on its way.
        on_learned: Called when all ranks have learned enough, before they plan.

    Attributes:
        in_flight: Gradients of the last backward have not been waited for.
        in_backward: A backward pass that sends has begun and not ended.
        applied: Updates may have used sums of the last step; for the optimizer to set.
        unsent: This rank has accumulated gradients since it last sent any.
        device: Where the parameters are.
    """

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        device: Device,
        planner: Planner,
        gates: Gates,
        scale: float,
        densifies: bool,
        adapt: bool,
        may_ask: bool,
        sharded: bool,
        passes_per_step: int,
        topology: Given | None,
        memory: Memory,
        steps_before: int,
        on_first_gradient: Callable[[int], None],
        on_gradient: Callable[[int], None],
        on_backward_end: Callable[[], None],
        on_learned: Callable[[], None],
    ) -> None:
        self._context, self.names, self.params = context, names, params
        self.device = device
        self._planner, self._gates = planner, gates
        self._on_first_gradient, self._on_gradient = on_first_gradient, on_gradient
        self._on_backward_end = on_backward_end
        self._scale, self._sharded, self._densifies = scale, sharded, densifies
        self.in_backward = self.unsent = False
        self._sync = self._has_data = True
        self._passes_per_step, self._passes = passes_per_step, 0  # of backward, with sync
        self._in_pass = False  # one of those
        steps_to_learn = context.env.learning_steps
        self._cycle = PlanCycle(planner, gates, device, steps_to_learn, adapt, may_ask, on_learned)
        self._local_used = [False] * len(params)
        self._used: list[bool] | None = None  # by any rank, once it is known
        self._versions = [0] * len(params)
        self._holds_result = [False] * len(params)  # param.grad is what the ranks agreed on
        self._sums = scale == 1.0
        self._sparse = [name in planner.sparse for name in names]
        self._rows: dict[int, Rows] = {}  # on their way, of sparse parameters
        self._grads = [torch.empty(0)] * len(params)  # in the arena; of sparse ones as last seen
        self.in_flight = self.applied = False
        self._lent = False  # all parameters have gradients, while they are in flight
        self._waits_no_more = False  # after a fault
        self._writer: _core.TimelineWriter | None = None
        self._memory = memory
        self._communicator = context.new_communicator(device, topology)
        self._link = Link(context, planner.label, self._communicator)
        self._let_go = weakref.finalize(self, context.abandon, self._link)
        self._let_go.atexit = False  # `shutdown` closes what there is
        plan = planner.learning_plan()
        self._provide_exchange(plan)
        self._lay_out(plan)
        # Held while an engine takes another's place: what other threads ask or tell waits for it.
        self._exchanging = threading.RLock()
        self._failure = ""  # what `fail` was told
        self._engine = self._start_engine(plan, steps_before)
        this = weakref.ref(self)  # see `ownership`
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(_hook, this, i))
            for i, p in enumerate(params)
        ]

    @property
    def steps(self) -> int:
        """Begun so far."""
        return self._engine.steps

    @property
    def learning(self) -> bool:
        """True until the plan is made from measurements."""
        return self._cycle.learning

    @property
    def plan_ends(self) -> bool:
        """On all ranks, the plan in force ends with the step that is about to be taken."""
        return self._cycle.plan_ends(self._engine.steps)

    @property
    def plan(self) -> _core.Plan:
        """The plan in force."""
        return self._engine.plan

    @property
    def failed(self) -> bool:
        """True after a fault."""
        return bool(self._failure or self._engine.fault)

    def status(self) -> dict[str, Any]:
        """How far this rank has come; see `Engine.status`."""
        with self._exchanging:
            status: dict[str, Any] = json.loads(self._engine.status())
        return status

    def ask_for_plan(self) -> None:
        """This rank votes for a new plan; needs `may_ask`."""
        self._cycle.ask_for_plan()

    def check(self) -> None:
        """Raises FaultError after a fault."""
        if fault := self._failure or self._engine.fault:
            raise FaultError(fault)

    def fail(self, message: str) -> None:
        """Every wait from now on raises FaultError with this message."""
        with self._exchanging:
            self._failure = message
            with suppress(UsageError):  # it has ended
                self._engine.fail(message)

    def orphan(self) -> Any:
        """In a forked process: every use is an error from now on; returns what has threads."""
        engine, self._engine = self._engine, cast("_core.Engine", _Orphan())
        return engine

    def set_timeline(self, writer: _core.TimelineWriter | None) -> None:
        """Records from the next step on; None stops."""
        self._writer = writer
        self.device.anchor()
        self._engine.set_timeline(writer)

    def set_sync(self, sync: bool) -> bool:
        """With False, backward only accumulates gradients locally. Returns what it was before."""
        before, self._sync = self._sync, sync
        return before

    @property
    def accumulates(self) -> bool:
        """Some of several backward passes until the next sum have been seen."""
        return self._passes_per_step > 1 and self.unsent

    def close(self) -> None:
        """Removes the hooks and ends the engine."""
        for handle in self._handles:
            handle.remove()
        self._link.close()
        self._let_go.detach()

    def wait(self, i: int) -> torch.Tensor | None:
        """The reduced gradient of parameter i, once it has arrived; None if no rank used it.

        Raises:
            Error: Somebody wrote to it while it was in flight.
        """
        self._wait_for(self._slot[i])
        release(self._grads[i])
        if self._grads[i]._version != self._versions[i]:
            raise self._touched(i, "was modified")
        if i in self._rows:
            self._take_rows(i)
        if not self._local_used[i]:
            self._wait_for(0)
            if not self._used_by_slot()[self._slot[i]]:
                return None
        return self._grads[i]

    def _wait_for(self, slot: int) -> None:
        if not self._waits_no_more:
            self._engine.wait(slot, self.device.stream())

    def has_all(self) -> bool:
        """After a fault, whether the sums of the last step are all in the host's memory."""
        return self.device.core is None and not self._rows and self.status()["phase"] == "idle"

    def is_torn(self) -> bool:
        """After a fault, whether updates may have used sums on the device that were not whole."""
        return self.device.core is not None and torn(self.status(), self.applied)

    def stop_waiting(self) -> None:
        """Gradients are taken as they are, which `has_all` has found to be in order."""
        self._waits_no_more, self._writer = True, None

    def _take_rows(self, i: int) -> None:
        found = self._engine.take_rows(self._slot[i])
        # Whoever has the gradient that was sent has the sum from now on, as with dense ones.
        self._grads[i].data = sparse_tensor(found, self.params[i], self.device)
        self._cycle.count_rows(self.names[i], found[2].own_rows, len(found[0]))
        self._versions[i] = self._grads[i]._version
        del self._rows[i]

    def hold_gradients(self, fetch: Sequence[Fetch]) -> None:
        """Who reads a gradient has it fetched first, until it was waited for or released.

        Parameters that have none show the other ranks', which may turn out to be none.
        """
        self._lent = self.in_flight
        for i, (grad, each) in enumerate(zip(self._grads, fetch, strict=True)):
            hold(grad, each)
            if self._lent and not self._local_used[i] and not self._sparse[i]:
                self.params[i].grad = grad

    def release_gradients(self) -> None:
        """Who reads a gradient gets it as it is."""
        for grad in self._grads:
            release(grad)

    def gradient(self, i: int) -> torch.Tensor:
        """Where the arena holds parameter i: its gradient, or its new value once gathered."""
        return self._grads[i]

    def wait_reduced(self) -> None:
        """Waits until this rank's shards hold sums over all ranks.

        Raises:
            Error: Somebody wrote to a gradient while it was in flight.
        """
        self._engine.wait_reduced(self.device.stream())
        self.release_gradients()
        if not self.untouched():
            raise UsageError(
                "with shard_optimizer=True no rank has whole gradients: do not replace or remove "
                "any between backward() and step()"
            )
        self.in_flight = False

    def used_anywhere(self) -> list[bool]:
        """By parameter, whether any rank has a gradient for it; valid once reduced."""
        if all(self._local_used):
            return list(self._local_used)  # a device need not be waited for
        used = self._used_by_slot()
        return [used[slot] for slot in self._slot]

    def _used_by_slot(self) -> list[bool]:
        """Looked at once in a step, as a device has to be waited for."""
        if self._used is None:
            self._used = [True, *map(bool, self._arena.used.tolist())]
        return self._used

    def release_gathers(self) -> None:
        """The shards hold new values: lets the all_gathers go."""
        self._engine.release_gathers(self.device.stream())

    def wait_gathered(self, i: int) -> None:
        """Waits until `gradient(i)` holds parameter i's new value."""
        self._engine.wait(self._slot[i], self.device.stream())

    def settle(self) -> None:
        """Waits for everything in flight and makes every `param.grad` final.

        Raises:
            Error: Somebody wrote to a gradient while it was in flight.
        """
        stream = self.device.stream()
        if not self.learning:
            self._engine.drain(stream)
        else:
            start = self.device.now()
            self._engine.drain(stream)
            self._cycle.waited(start, self.device.now())
        self.release_gradients()
        for i, param in enumerate(self.params):
            if self._grads[i]._version != self._versions[i]:
                raise self._touched(i, "was modified")
            gone = param.grad is None and self._lent and not self._sparse[i]  # reset by the user
            if not (self._local_used[i] or gone):
                param.grad = self.wait(i)
            elif self._sparse[i]:
                self.wait(i)
        self.in_flight = False

    def forget_results(self) -> None:
        """The user has reset the gradients."""
        self._holds_result = [False] * len(self.params)

    def begin_update(self) -> Mark:
        """For `record_update`."""
        return self.device.now() if self._writer is not None else 0.0

    def record_update(self, indices: Sequence[int], start: Mark) -> None:
        """Adds an update that began at `start` and is over to the timeline."""
        if self._writer is not None:
            slots = [self._slot[i] for i in indices]
            self.device.record_update(self._engine, slots, start, self.device.now())

    def untouched(self) -> bool:
        """Whether parameters still have the gradients in flight, not others or none.

        Raises:
            Error: One of those was changed since backward.
        """
        same = True
        with torch._C.DisableTorchFunctionSubclass():  # gradients are held
            for i, param in enumerate(self.params):
                if param.grad is not self._grads[i]:
                    same = same and not self._local_used[i] and param.grad is None
                elif param.grad._version != self._versions[i]:
                    raise self._touched(i, "was modified")
        return same

    def _touched(self, i: int, what: str) -> Error:
        return Error(
            f"the gradient of '{self.names[i]}' {what} after backward() while it was on its way to "
            'the other ranks. Use overlap="backward", or call optimizer.synchronize() before you '
            "touch gradients."
        )

    def finish_step(self, began: Mark) -> None:
        """Counts a completed step; after the last one under a plan, all ranks adopt the next plan.

        To be called when everything is drained and no update is pending.

        Args:
            began: When the optimizer's step began; a closure may have run backward in it.
        """
        plan = self._cycle.end_step(
            self._engine.steps, self.plan, began, self._local_used, self._ready_s, self._decide
        )
        if plan is not None:
            self._adopt(plan)

    def _ready_s(self) -> list[float]:
        ready = self._engine.ready_times()
        return [ready[slot] for slot in self._slot]

    def _decide(self, times: Times, rows: Mapping[str, Counts]) -> Decision:
        """Plans with the other ranks, from what they have learned and a probe of the network."""
        total = sum(p.numel() * p.element_size() for p in self.params)
        largest = min(max(total, 1 << 20), LARGEST_BYTES)
        try:
            care = min(max(total / _CAREFUL_BYTES, _LEAST_CARE), 1.0)
            measured = measure(self._context, self._communicator, largest, care=care)
            topology = measure_dimensions(self._context, self._communicator, largest)
        finally:  # should no plan come of it, the old one goes on
            self._communicator.register(self._arena.buffer)
        decision = self._planner.decide(times, measured, topology, rows)
        if (mesh := mesh_of(self._communicator)) and decision.network.topology:
            mesh.set_speeds(decision.network.topology)
        return decision

    def _adopt(self, plan: _core.Plan) -> None:
        """Goes on with another plan; everything is drained. Gradients keep their values."""
        old = self._grads
        self._provide_exchange(plan)
        moves = _coded_shards(plan) != _coded_shards(self.plan)
        if moves:  # others send elements than those that remember what of these was not sent
            told = self._context.eager.allgather_bytes(
                "usbyte.memory.kinds", self._memory.told().encode()
            )
            self._memory.spread(plan.tensors, [text.decode() for text in told], self._average)
        self.check()
        steps = self._engine.steps
        self._engine.close()  # outside the lock: its thread may be about to tell of a fault
        with self._exchanging:
            if self._failure:
                raise FaultError(self._failure)
            self.device.keep([self._arena.buffer])
            self._lay_out(plan)
            mesh = mesh_of(self._communicator)
            if moves and codes_shards(plan) and mesh is not None:
                self._memory.concentrate(plan, mesh.topology, self._context.rank)
            self._engine = self._start_engine(plan, steps)
        for i, param in enumerate(self.params):
            if param.grad is old[i] and not self._sparse[i]:
                self._grads[i].copy_(old[i])
                param.grad = self._grads[i]
            self._versions[i] = self._grads[i]._version
        if self._writer is not None:
            self._engine.set_timeline(self._writer)

    def _average(self, tensor: torch.Tensor) -> None:
        self._context.eager.allreduce("usbyte.memory", tensor, Average)

    def _lay_out(self, plan: _core.Plan) -> None:
        position = {t.name: k for k, t in enumerate(plan.tensors)}
        self._slot = [position[name] for name in self.names]  # tensor index in the plan
        self._at_slot = sorted(range(len(self.params)), key=self._slot.__getitem__)
        buffer = self._communicator.allocate(plan.arena_bytes)
        self._arena = Arena(plan, [self.params[i] for i in self._at_slot], buffer)
        self._memory.lay_out(plan, self.device.torch_device)
        self._grads = [
            grad if sparse else self._arena.grads[slot - 1]
            for grad, slot, sparse in zip(self._grads, self._slot, self._sparse, strict=True)
        ]
        self._communicator.register(self._arena.buffer)

    def _provide_exchange(self, plan: _core.Plan) -> None:
        """For a plan that adds up rows, to which all ranks go over together."""
        if self._link.exchange is None and any(op.sparse or op.scheme for op in plan.ops):
            self._link.exchange = TorchExchange(self._context.new_group())

    def _start_engine(self, plan: _core.Plan, steps_before: int) -> _core.Engine:
        env, exchange = self._context.env, self._link.exchange
        engine = _core.Engine(
            plan,
            self._arena.buffer.data_ptr(),
            self._communicator.core,
            stall_warning_s=env.stall_warning_s,
            stall_limit_s=env.stall_limit_s,
            steps_before=steps_before,
            hold_gathers=self._sharded and not self.learning,
            device=self.device.core,
            exchange=exchange.core if exchange is not None else None,
            scale=self._scale,
            memory=self._memory.address,
            seed=self._planner.seed,
            timed=self.learning,
            on_warning=self._context.warn,
            on_stall=self._link.on_stall,
            on_fault=self._link.on_fault,
        )
        self._link.drive(engine, self._arena.buffer, self._memory, self._rows)
        self._sender = sender(
            self.device, self.params, self._at_slot, self._arena, engine, self._scale
        )
        return engine

    def send_kept(self) -> None:
        """Sends what was accumulated without sync, as if a backward pass had ended now."""
        self._begin()
        self._end()

    def send_none(self) -> bool:
        """Takes part in a step of the other ranks with nothing; waits for them.

        All gradients of this rank must be reset.

        Returns:
            Whether any rank has sent something; if not, nothing is in flight any more.
        """
        self._has_data = False
        try:
            self.send_kept()
        finally:
            self._has_data = True
        self._engine.wait(0, self.device.stream())
        if self._arena.votes[1].item():
            return True
        if self._sharded and not self.learning:
            self.wait_reduced()
            self.release_gathers()  # of nothing, which nobody is going to take
        self.settle()
        return False

    def take(self, i: int) -> None:
        """Inside `backward()`: the gradient of parameter i is there."""
        if not self._in_pass:
            self._on_first_gradient(i)
            if self._sync:
                self._begin_pass()
        self._on_gradient(i)
        if self.in_backward:
            self._collect(i)
        else:
            self.unsent = True

    def _begin_pass(self) -> None:
        if self._passes + 1 == self._passes_per_step:
            self._begin()
        self._in_pass = True
        Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        self._in_pass = False
        self._passes += 1
        if self.in_backward:
            self._end()

    def _begin(self) -> None:
        if self.in_flight:
            other = "leave out shard_optimizer" if self._sharded else 'use overlap="backward"'
            raise UsageError(
                "backward() ran again before step() while gradients were on their way. Accumulate "
                f"under optimizer.no_sync(), or {other}."
            )
        stream = self.device.stream()
        self._engine.drain(stream)
        self._cycle.begin_backward(self._arena.votes[:1])
        self.release_gradients()
        self._lent = self.unsent = self.applied = False
        self._sender.begin()
        self._local_used = [False] * len(self.params)
        self._used = None
        self.in_backward = True

    def _collect(self, i: int) -> None:
        grad = self.params[i].grad
        if grad is None:
            raise UsageError(
                f"the gradient of '{self.names[i]}' was reset by a hook of its parameter before it "
                "was sent: leave gradients to the optimizer until step()"
            )
        if grad is self._grads[i]:
            self._check_not_summed(i)
        self._send(i, grad)

    def _send(self, i: int, grad: torch.Tensor) -> None:
        self._local_used[i] = self._holds_result[i] = True
        if self._sparse[i]:
            return self._send_rows(i, grad)
        if grad.layout != torch.strided:
            if not self._densifies:
                raise UsageError(
                    f"the gradient of '{self.names[i]}' is sparse, which was not to be seen when "
                    "the optimizer was wrapped: give DistributedOptimizer model= or "
                    "sparse_as_dense=True"
                )
            grad = grad.to_dense()
        self._sender.send(i, grad)
        self._versions[i] = self._grads[i]._version

    def _send_rows(self, i: int, grad: torch.Tensor) -> None:
        self._rows[i] = Rows(self.names[i], grad, self.params[i], self.device)
        self._rows[i].give(self._engine, self._slot[i])
        self._grads[i], self._versions[i] = grad, grad._version

    def _check_not_summed(self, i: int) -> None:
        # Averaging an average changes nothing; summing a sum multiplies it.
        if self._sums and self._holds_result[i]:
            raise UsageError(
                f"the gradient of '{self.names[i]}' is a sum over ranks and would be summed again: "
                "with op=Sum, call optimizer.zero_grad() after each step and accumulate "
                "under optimizer.no_sync()"
            )

    def _end(self) -> None:
        for i, param in enumerate(self.params):
            if self._local_used[i]:
                continue
            if param.grad is None and self._sparse[i]:
                self._send_rows(i, empty_like(param))
            elif param.grad is None:
                self._sender.send_zeros(i)
                self._versions[i] = self._grads[i]._version
            else:  # from an earlier micro-batch, or kept from the last step: counts, as in DDP
                if param.grad is self._grads[i]:
                    self._check_not_summed(i)
                self._send(i, param.grad)
        used = [self._local_used[i] for i in self._at_slot]
        votes = [float(self._cycle.end_backward()), float(self._has_data)]
        self._sender.send_flags([*map(float, used), *votes])
        self._engine.end_backward()
        self._passes = 0
        self.in_backward = False
        self.in_flight = True
        self._on_backward_end()


def _hook(of: weakref.ref[Reducer], i: int, _param: object) -> None:
    # What torch passes is what a hook before this one has returned, if it has returned something.
    reducer = of()
    if reducer is None:
        raise UsageError(
            "a parameter has a gradient that its DistributedOptimizer does not see, as that is "
            "gone: make one for the parameters that are trained"
        )
    reducer.take(i)


def _coded_shards(plan: _core.Plan) -> set[tuple[int, int, int, bool, str]]:
    """Of whose shards codecs remember: blocks, their lines, whether they are coded before that too.

    And tensors, as places tell no more.
    """
    coded = {block for op in plan.ops if op.line >= 0 and remembers(op) for block in op.blocks}
    order = " ".join(t.name for t in plan.tensors)
    return {
        (*block, op.line, remembers(op), order)
        for op in plan.ops
        if op.kind == "reduce_scatter"
        for block in op.blocks
        if block in coded
    }


def codes_shards(plan: _core.Plan) -> bool:
    """Codecs remember shards of gradients, each on the rank that sends them."""
    return bool(_coded_shards(plan))

# SPDX-License-Identifier: Apache-2.0
"""What moves gradients under the plan in force: memory for them, and an engine that sends it."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import torch

from usbyte import _core
from usbyte.errors import FaultError, UsageError
from usbyte.planning.cost_fit import Measured
from usbyte.torch.comm.base import EngineCommunicator
from usbyte.torch.comm.probe import LARGEST_BYTES, measure, measure_dimensions
from usbyte.torch.comm.sparse_exchange import TorchExchange
from usbyte.torch.compression.state import CodecState, coded_shards, codes_shards
from usbyte.torch.optimizer.gradients.engine_handle import EngineHandle
from usbyte.torch.optimizer.gradients.flat_buffer import FlatBuffer
from usbyte.torch.optimizer.gradients.grad_writer import HostGradWriter, sender
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.sparse import Rows
from usbyte.torch.reduce_op import Average
from usbyte.torch.runtime.device import Device, Mark
from usbyte.torch.world.rank_group import RankGroup

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


class PlanSource(Protocol):
    """The planner, as far as plans are run.

    Attributes:
        label: Name of the optimizer.
        sparse: Names of parameters whose gradients travel as rows.
    """

    label: str
    sparse: Collection[str]

    @property
    def seed(self) -> int:
        """Of codecs that draw random numbers."""

    def learning_plan(self) -> _core.Plan:
        """Returns the plan of steps that are learned from."""


class PlanExecutor:
    """An arena and the engine that sums it over all ranks, as the plan in force says.

    With another plan both are made anew; the communicator and what codecs remember stay.

    Args:
        rank_group: The ranks that take part.
        communicator: Connects the ranks; nothing else uses it.
        settings: What was asked for.
        trained: The parameters.
        device: Where they are.
        planner: Makes the plans.
        memory: Of codecs.
        steps_before: Completed before this was made.

    Attributes:
        device: As given.
        engine: Runs the plan in force.
        arena: What it sends.
        sender: Takes gradients into the arena.
        tensor_of_param: By parameter, which tensor of the plan it is.
        at_slot: Parameters in the plan's order.
        co_arriving: By parameter, those whose gradients are complete as soon as its own is, since
            they need no other ops.
        rows: On their way, by parameter, of sparse gradients.
        writer: Of a timeline; None if none is recorded.
    """

    engine: _core.Engine
    flat_buffer: FlatBuffer
    sender: HostGradWriter

    def __init__(
        self,
        rank_group: RankGroup,
        communicator: EngineCommunicator,
        settings: Settings,
        param_table: ParamTable,
        device: Device,
        planner: PlanSource,
        memory: CodecState,
        steps_before: int,
    ) -> None:
        self._rank_group, self.device, self._planner, self._memory = (
            rank_group,
            device,
            planner,
            memory,
        )
        self._names, self._params = param_table.names, param_table.params
        self._scale, self._sharded = settings.scale(rank_group.size), settings.shard_optimizer
        self.rows: dict[int, Rows] = {}
        self.writer: _core.TimelineWriter | None = None
        self._communicator = communicator
        self._engine_handle = EngineHandle(rank_group, planner.label, self._communicator)
        self._let_go = weakref.finalize(self, rank_group.adopt_orphan, self._engine_handle)
        self._let_go.atexit = False  # `shutdown` closes what there is
        # Held while an engine takes another's place: what other threads ask or tell waits for it.
        self._exchanging = threading.RLock()
        self._failure = ""  # what `fail` was told
        self._retired: list[torch.Tensor] = []  # arenas before, until memory is allocated anew
        plan = planner.learning_plan()
        self._provide_exchange(plan)
        self._lay_out(plan)
        self._start(plan, steps_before, learning=True)

    def gather_answers(self, name: str, answer: bytes) -> list[bytes]:
        """What the ranks answer, by rank. Collective."""
        return self._rank_group.eager.allgather_bytes(f"{self._planner.label}.{name}", answer)

    def wait_for_control(self) -> None:
        """Waits for the sum of the control tensor."""
        self.engine.wait(0, self.device.stream())

    @property
    def plan(self) -> _core.Plan:
        """The plan in force."""
        return self.engine.plan

    @property
    def steps(self) -> int:
        """Begun so far."""
        return self.engine.steps

    @property
    def failed(self) -> bool:
        """True after a fault."""
        return bool(self._failure or self.engine.fault)

    def grad_views(self) -> list[torch.Tensor | None]:
        """By parameter, of its gradient in the arena; None if it is sparse."""
        return [
            None if name in self._planner.sparse else self.flat_buffer.grads[slot - 1]
            for name, slot in zip(self._names, self.tensor_of_param, strict=True)
        ]

    def ready_s(self) -> list[float]:
        """By parameter, when its gradient was ready in the last step, steady clock seconds."""
        ready = self.engine.ready_times()
        return [ready[slot] for slot in self.tensor_of_param]

    def record_update(self, indices: Sequence[int], start: Mark) -> None:
        """Adds an update of parameters that began at `start` and is over to the timeline."""
        if self.writer is not None:
            slots = [self.tensor_of_param[i] for i in indices]
            self.device.record_update(self.engine, slots, start, self.device.now())

    def set_timeline(self, writer: _core.TimelineWriter | None) -> None:
        """Records from the next step on; None stops."""
        self.writer = writer
        self.device.anchor()
        self.engine.set_timeline(writer)

    def status(self) -> dict[str, Any]:
        """How far this rank has come; see `Engine.status`."""
        with self._exchanging:
            status: dict[str, Any] = json.loads(self.engine.status())
        return status

    def check(self) -> None:
        """Raises FaultError after a fault."""
        if fault := self._failure or self.engine.fault:
            raise FaultError(fault)

    def fail(self, message: str) -> None:
        """Every wait from now on raises FaultError with this message."""
        with self._exchanging:
            self._failure = message
            with suppress(UsageError):  # it has ended
                self.engine.fail(message)

    def orphan(self) -> Any:
        """In a forked process: every use is an error from now on; returns what has threads."""
        engine = self.engine
        self.engine = cast("_core.Engine", _Orphan())
        return engine

    def close(self) -> None:
        """Ends the engine and the communicator."""
        self._engine_handle.close()
        self._let_go.detach()

    def probe(self) -> tuple[list[Measured], _core.Topology | None]:
        """What the network costs, and its dimensions if there are some. Collective."""
        total = sum(p.numel() * p.element_size() for p in self._params)
        largest = min(max(total, 1 << 20), LARGEST_BYTES)
        care = min(max(total / _CAREFUL_BYTES, _LEAST_CARE), 1.0)
        try:
            return (
                measure(self._rank_group, self._communicator, largest, care=care),
                measure_dimensions(self._rank_group, self._communicator, largest),
            )
        finally:  # should no plan come of it, the old one goes on
            self._communicator.register(self.flat_buffer.buffer)

    def set_speeds(self, topology: _core.Topology | None) -> None:
        """Operations on routes go by these from now on."""
        if (mesh := self._communicator.mesh) and topology:
            mesh.set_speeds(topology)

    def switch_plan(self, plan: _core.Plan, learning: bool) -> None:
        """Goes over to another plan; everything is drained. Collective.

        Args:
            plan: Alike on all ranks.
            learning: Times are wanted of its steps.
        """
        self._provide_exchange(plan)
        moves = coded_shards(plan) != coded_shards(self.plan)
        if moves:  # others send elements than those that remember what of these was not sent
            told = self._rank_group.eager.allgather_bytes(
                "usbyte.memory.kinds", self._memory.told().encode()
            )
            self._memory.replicate(plan.tensors, [text.decode() for text in told], self._average)
        self._restart(plan, learning, concentrates=moves and codes_shards(plan))

    def renew(self, learning: bool) -> None:
        """Gives the arena other memory under the plan in force; everything is drained.

        For this rank alone to call, so that the memory is not registered with NCCL, for which all
        ranks would have to come.

        Args:
            learning: As for `switch_plan`.
        """
        self._retired.append(self.flat_buffer.buffer)  # which may be registered
        memory = torch.zeros(
            self.plan.arena_bytes, dtype=torch.uint8, device=self.device.torch_device
        )
        self._restart(self.plan, learning, concentrates=False, memory=memory)

    def _restart(
        self,
        plan: _core.Plan,
        learning: bool,
        concentrates: bool,
        memory: torch.Tensor | None = None,
    ) -> None:
        """Makes arena and engine anew.

        Args:
            plan: To go over to.
            learning: As for `switch_plan`.
            concentrates: Each rank keeps codecs' memory of its own shards alone.
            memory: For the arena; None lets the communicator allocate it, which is collective.
        """
        self.check()
        steps = self.engine.steps
        self.engine.close()  # outside the lock: its thread may be about to tell of a fault
        with self._exchanging:
            if self._failure:
                raise FaultError(self._failure)
            self.device.record_stream([self.flat_buffer.buffer])
            self._lay_out(plan, memory)
            mesh = self._communicator.mesh
            if concentrates and mesh is not None:
                self._memory.shard(plan, mesh.topology, self._rank_group.rank)
            self._start(plan, steps, learning)
        if self.writer is not None:
            self.engine.set_timeline(self.writer)

    def _average(self, tensor: torch.Tensor) -> None:
        self._rank_group.eager.allreduce("usbyte.memory", tensor, Average)

    def _provide_exchange(self, plan: _core.Plan) -> None:
        """For a plan that adds up rows, to which all ranks go over together."""
        if self._engine_handle.exchange is None and any(op.sparse or op.scheme for op in plan.ops):
            self._engine_handle.exchange = TorchExchange(self._rank_group.new_group())

    def _lay_out(self, plan: _core.Plan, memory: torch.Tensor | None = None) -> None:
        position = {t.name: k for k, t in enumerate(plan.tensors)}
        self.tensor_of_param = [position[name] for name in self._names]
        tensors = self.tensor_of_param
        self.param_of_tensor = sorted(range(len(tensors)), key=tensors.__getitem__)
        self.co_arriving = co_arriving(plan, self.tensor_of_param)
        if memory is None:
            memory = self._communicator.allocate(plan.arena_bytes)
            self._retired.clear()
        self.flat_buffer = FlatBuffer(plan, [self._params[i] for i in self.param_of_tensor], memory)
        params = dict(zip(self._names, self._params, strict=True))
        self._memory.lay_out(plan, self.device.torch_device, params)
        self._communicator.register(self.flat_buffer.buffer)

    def _start(self, plan: _core.Plan, steps_before: int, learning: bool) -> None:
        env, exchange = self._rank_group.env, self._engine_handle.exchange
        self.engine = _core.Engine(
            plan,
            self.flat_buffer.buffer.data_ptr(),
            self._communicator.core,
            stall_warning_s=env.stall_warning_s,
            stall_limit_s=env.stall_limit_s,
            steps_before=steps_before,
            hold_gathers=self._sharded and not learning,
            device=self.device.core,
            exchange=exchange.core if exchange is not None else None,
            scale=self._scale,
            memory=self._memory.address,
            seed=self._planner.seed,
            timed=learning,
            on_warning=self._rank_group.warn,
            on_stall=self._engine_handle.on_stall,
            on_fault=self._engine_handle.on_fault,
        )
        self._engine_handle.attach_engine(
            self.engine, self.flat_buffer.buffer, self._memory, self.rows
        )
        self.sender = sender(
            self.device,
            self._params,
            self.param_of_tensor,
            self.flat_buffer,
            self.engine,
            self._scale,
        )


def co_arriving(plan: _core.Plan, tensor_of_param: Sequence[int]) -> list[list[int]]:
    """By parameter, those for whose sums it takes no operations but those for its own.

    Args:
        plan: Which operations bring a sum.
        tensor_of_param: By parameter, which tensor of the plan it is.
    """
    bringing: list[set[int]] = [set() for _ in plan.tensors]
    for k, op in enumerate(plan.ops):
        for tensor in plan.tensors_of(op):
            bringing[tensor].add(k)
    ops_of = [frozenset(bringing[tensor]) for tensor in tensor_of_param]
    brought: dict[frozenset[int], list[int]] = {}
    for i, ops in enumerate(ops_of):
        brought.setdefault(ops, []).append(i)
    touching: dict[int, set[frozenset[int]]] = {}
    for ops in brought:
        for k in ops:
            touching.setdefault(k, set()).add(ops)
    together: dict[frozenset[int], list[int]] = {}
    for ops in brought:
        near = set().union(*(touching[k] for k in ops))
        within = [part for part in near if part <= ops]
        together[ops] = sorted(i for part in within for i in brought[part])
    return [together[ops] for ops in ops_of]

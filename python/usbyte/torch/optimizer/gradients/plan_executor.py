# SPDX-License-Identifier: Apache-2.0
"""Runs the plan in force: owns the flat buffer, the communicator and the engine."""

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
from usbyte.torch.optimizer.gradients.grad_writer import GradWriter, make_grad_writer
from usbyte.torch.optimizer.gradients.timelines import PassSource, Timelines
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.sparse import Rows
from usbyte.torch.reduce_op import Average
from usbyte.torch.runtime.device import Device, Mark
from usbyte.torch.world.rank_group import RankGroup

# Small models gain little from an exact network model. If all gradients are smaller than this, the
# probe of the network takes a proportional share of its time, but at least `_LEAST_CARE` of it.
_CAREFUL_BYTES = 8 << 20
_LEAST_CARE = 1 / 8


class _Orphan:
    """Replaces the engine in a forked child process, which has none of the engine's threads."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            "this process was forked from a rank and cannot train or wait for gradients: start it "
            "with the method 'spawn', or fork it between optimizer.step() and the next backward()"
        )


class PlanSource(Protocol):
    """The parts of the planner that the plan executor uses.

    Attributes:
        label: Name of the optimizer, equal on all ranks.
        sparse: Names of the parameters whose gradients are sent as rows.
    """

    label: str
    sparse: Collection[str]

    @property
    def seed(self) -> int:
        """Seed of codecs that draw random numbers, equal on all ranks."""

    def describe(self, plan: _core.Plan) -> str:
        """Returns a plan and what it was made from, as JSON; empty before there is one."""

    def learning_plan(self) -> _core.Plan:
        """Returns the plan of the learning steps."""


class PlanExecutor:
    """A flat buffer, and the engine that sums it over all ranks as the plan in force says.

    Another plan needs a new flat buffer and a new engine. The communicator and the codec state
    stay.

    Args:
        rank_group: Ranks that share the gradients.
        communicator: Connects the ranks; owned by this object and used by nothing else.
        settings: Arguments of the DistributedOptimizer.
        param_table: Parameters of the optimizer.
        device: Device of the parameters.
        planner: Gives the learning plan, which is the first plan in force.
        codec_state: Codec state.
        passes: Records forward and backward passes for the timeline.
        steps_before: Number of steps that were completed before.

    Attributes:
        device: Device of the parameters.
        engine: Engine that runs the plan in force.
        flat_buffer: Flat buffer of the plan in force.
        grad_writer: Writes gradients to the flat buffer.
        tensor_of_param: By parameter, the index of its tensor in the plan.
        param_of_tensor: Parameter indices in the plan's order of tensors, without the control
            tensor.
        co_arriving: By parameter, the parameters whose gradients are complete as soon as its own
            is, because the ops that bring them are a subset of those that bring it.
        rows: By parameter, the rows of its sparse gradient in flight.
        timelines: Timelines that the steps are recorded in.
    """

    engine: _core.Engine
    flat_buffer: FlatBuffer
    grad_writer: GradWriter

    def __init__(
        self,
        rank_group: RankGroup,
        communicator: EngineCommunicator,
        settings: Settings,
        param_table: ParamTable,
        device: Device,
        planner: PlanSource,
        codec_state: CodecState,
        passes: PassSource,
        steps_before: int,
    ) -> None:
        self._rank_group, self.device, self._planner = rank_group, device, planner
        self._codec_state = codec_state
        self._names, self._params = param_table.names, param_table.params
        self._scale, self._sharded = settings.scale(rank_group.size), settings.shard_optimizer
        self.rows: dict[int, Rows] = {}
        self.timelines = Timelines(device, passes, planner.describe, rank_group.warn)
        self._communicator = communicator
        self._engine_handle = EngineHandle(rank_group, planner.label, self._communicator)
        self._let_go = weakref.finalize(self, rank_group.adopt_orphan, self._engine_handle)
        self._let_go.atexit = False  # at exit `shutdown` closes the engine
        # Guards the switch of engines against `status` and `fail` from other threads.
        self._exchanging = threading.RLock()
        self._failure = ""  # message of `fail`
        self._retired: list[torch.Tensor] = []  # maybe still registered, until the next `allocate`
        plan = planner.learning_plan()
        self._provide_exchange(plan)
        self._lay_out(plan)
        self._start(plan, steps_before, learning=True)
        self.timelines.attach(self.engine, learning=True)

    def gather_answers(self, name: str, answer: bytes) -> list[bytes]:
        """Returns the answers of all ranks, by rank. Collective."""
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
        """Number of steps begun so far."""
        return self.engine.steps

    @property
    def failed(self) -> bool:
        """Whether there was a fault."""
        return bool(self._failure or self.engine.fault)

    def grad_views(self) -> list[torch.Tensor | None]:
        """Returns, by parameter, its gradient in the flat buffer; None if it is sparse."""
        return [
            None if name in self._planner.sparse else self.flat_buffer.grads[tensor - 1]
            for name, tensor in zip(self._names, self.tensor_of_param, strict=True)
        ]

    def ready_s(self) -> list[float]:
        """Returns, by parameter, when its gradient was ready in the last step.

        Times are seconds of the steady clock.
        """
        ready = self.engine.ready_times()
        return [ready[tensor] for tensor in self.tensor_of_param]

    def record_update(self, indices: Sequence[int], start: Mark) -> None:
        """Adds an update of `indices`, begun at `start` and completed now, to the timelines."""
        if self.timelines.writers:
            self.timelines.record_update([self.tensor_of_param[i] for i in indices], start)

    def between_steps(self, is_final: bool) -> None:
        """Tells the report of the run, if it makes one, that no step is in flight.

        Args:
            is_final: Whether the plan in force is final.
        """
        if (report := self._rank_group.report) is not None:
            record = self.timelines.set_report
            report.between_steps(self._planner.label, self.steps, is_final, record)

    def status(self) -> dict[str, Any]:
        """Returns this rank's progress, as `Engine.status` gives it."""
        with self._exchanging:
            status: dict[str, Any] = json.loads(self.engine.status())
        return status

    def check(self) -> None:
        """Raises FaultError after a fault."""
        if fault := self._failure or self.engine.fault:
            raise FaultError(fault)

    def fail(self, message: str) -> None:
        """Makes every later wait raise FaultError with this message."""
        with self._exchanging:
            self._failure = message
            with suppress(UsageError):  # the engine has ended
                self.engine.fail(message)

    def orphan(self) -> Any:
        """In a forked child process: makes every later use an error.

        Returns:
            The engine, which must never be destroyed there, because its threads do not exist.
        """
        engine = self.engine
        self.engine = cast("_core.Engine", _Orphan())
        return engine

    def close(self) -> None:
        """Ends the engine and the communicator."""
        self._engine_handle.close()
        self._let_go.detach()

    def probe(self) -> tuple[list[Measured], _core.Topology | None]:
        """Returns the measured costs of the network, and its dimensions or None. Collective."""
        total = sum(p.numel() * p.element_size() for p in self._params)
        largest = min(max(total, 1 << 20), LARGEST_BYTES)
        care = min(max(total / _CAREFUL_BYTES, _LEAST_CARE), 1.0)
        try:
            return (
                measure(self._rank_group, self._communicator, largest, care=care),
                measure_dimensions(self._rank_group, self._communicator, largest),
            )
        finally:  # without a new plan, the flat buffer stays in use
            self._communicator.register(self.flat_buffer.buffer)

    def set_speeds(self, topology: _core.Topology | None) -> None:
        """Sets the speeds of the dimensions that ops with routes use; no-op without a topology."""
        if (mesh := self._communicator.mesh) and topology:
            mesh.set_speeds(topology)

    def switch_plan(self, plan: _core.Plan, learning: bool) -> None:
        """Switches to another plan. Collective; nothing may be in flight.

        Args:
            plan: The new plan, equal on all ranks.
            learning: Whether it is the learning plan, so that times of its steps are measured.
        """
        self._provide_exchange(plan)
        moves = coded_shards(plan) != coded_shards(self.plan)
        if moves:  # the ranks that send an element will not be those with its error feedback
            kinds = self._rank_group.eager.allgather_bytes(
                "usbyte.memory.kinds", self._codec_state.kinds_json().encode()
            )
            self._codec_state.replicate(
                plan.tensors, [text.decode() for text in kinds], self._average
            )
        self._restart(plan, learning, concentrates=moves and codes_shards(plan))

    def renew(self, learning: bool) -> None:
        """Moves the flat buffer to new memory under the plan in force. Nothing may be in flight.

        One rank may call this alone. The new memory is therefore not registered with NCCL, because
        registration is collective.

        Args:
            learning: Whether the learning plan is in force.
        """
        self._retired.append(self.flat_buffer.buffer)  # it may be registered with NCCL
        memory = torch.zeros(
            self.plan.flat_buffer_bytes, dtype=torch.uint8, device=self.device.torch_device
        )
        self._restart(self.plan, learning, concentrates=False, memory=memory)

    def _restart(
        self,
        plan: _core.Plan,
        learning: bool,
        concentrates: bool,
        memory: torch.Tensor | None = None,
    ) -> None:
        """Makes a new flat buffer and a new engine.

        Args:
            plan: The plan to run.
            learning: Whether it is the learning plan, so that times of its steps are measured.
            concentrates: Whether each rank keeps codec state for its own shards only.
            memory: Memory of the flat buffer, 1-d uint8. None (default) lets the communicator
                allocate it, which is collective.
        """
        self.check()
        steps = self.engine.steps
        self.engine.close()  # outside the lock, because the engine's thread may report a fault
        with self._exchanging:
            if self._failure:
                raise FaultError(self._failure)
            self.device.record_stream([self.flat_buffer.buffer])
            self._lay_out(plan, memory)
            mesh = self._communicator.mesh
            if concentrates and mesh is not None:
                self._codec_state.shard(plan, mesh.topology, self._rank_group.rank)
            self._start(plan, steps, learning)
        self.timelines.attach(self.engine, learning)

    def _average(self, tensor: torch.Tensor) -> None:
        self._rank_group.eager.allreduce("usbyte.memory", tensor, Average)

    def _provide_exchange(self, plan: _core.Plan) -> None:
        """Makes the exchange if the plan needs one. Collective then."""
        if self._engine_handle.exchange is None and any(op.sparse or op.scheme for op in plan.ops):
            self._engine_handle.exchange = TorchExchange(self._rank_group.new_group())

    def _lay_out(self, plan: _core.Plan, memory: torch.Tensor | None = None) -> None:
        position = {t.name: k for k, t in enumerate(plan.tensors)}
        self.tensor_of_param = [position[name] for name in self._names]
        tensors = self.tensor_of_param
        self.param_of_tensor = sorted(range(len(tensors)), key=tensors.__getitem__)
        self.co_arriving = co_arriving(plan, self.tensor_of_param)
        if memory is None:
            memory = self._communicator.allocate(plan.flat_buffer_bytes)
            self._retired.clear()
        self.flat_buffer = FlatBuffer(plan, [self._params[i] for i in self.param_of_tensor], memory)
        params = dict(zip(self._names, self._params, strict=True))
        self._codec_state.lay_out(plan, self.device.torch_device, params)
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
            codec_state=self._codec_state.address,
            seed=self._planner.seed,
            timed=learning,
            on_warning=self._rank_group.warn,
            on_stall=self._engine_handle.on_stall,
            on_fault=self._engine_handle.on_fault,
        )
        self._engine_handle.attach_engine(
            self.engine, self.flat_buffer.buffer, self._codec_state, self.rows
        )
        self.grad_writer = make_grad_writer(
            self.device,
            self._params,
            self.param_of_tensor,
            self.flat_buffer,
            self.engine,
            self._scale,
        )


def co_arriving(plan: _core.Plan, tensor_of_param: Sequence[int]) -> list[list[int]]:
    """Returns, by parameter, the parameters whose gradients are complete as soon as its own is.

    The ops that bring them are a subset of those that bring that parameter's. Parameters that the
    same ops bring share a list.

    Args:
        plan: Plan whose ops transfer the gradients.
        tensor_of_param: By parameter, the index of its tensor in the plan.
    """
    group_of, tensors = plan.co_arriving()
    param_of = {tensor: i for i, tensor in enumerate(tensor_of_param)}
    params = [sorted(param_of[t] for t in its if t in param_of) for its in tensors]
    return [params[group_of[tensor]] for tensor in tensor_of_param]

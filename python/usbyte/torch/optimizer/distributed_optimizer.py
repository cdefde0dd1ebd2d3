"""DistributedOptimizer: any torch optimizer, on gradients summed over all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from usbyte import _core
from usbyte.errors import MismatchError, UsageError
from usbyte.torch.comm.topology import TopologyLike, parse
from usbyte.torch.compression.codecs import Rules
from usbyte.torch.compression.state import CODEC_STATE_KEY, CodecState, codes_shards
from usbyte.torch.fault.recovery import RankProgress, RecoveryDecision
from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.optimizer import grad_scaler
from usbyte.torch.optimizer.backward_driver import BackwardDriver
from usbyte.torch.optimizer.compat.known_optimizers import is_known
from usbyte.torch.optimizer.config import (
    check_combination,
    check_policy,
    integer,
    names_of,
    positive,
)
from usbyte.torch.optimizer.fused import FusedUpdate
from usbyte.torch.optimizer.gradients.plan_executor import PlanExecutor
from usbyte.torch.optimizer.param_owner import register_params, retain_owner
from usbyte.torch.optimizer.step_controller import StepController
from usbyte.torch.optimizer.validation import (
    ValidatedOptimizer,
    validate_optimizer,
    warn_of_renormalized,
)
from usbyte.torch.optimizer.wrapper import OptimizerWrapper, holds_shards
from usbyte.torch.plan.decision import Decision
from usbyte.torch.plan.job import Overlap, ParamTable, Policy, Settings, with_new_names
from usbyte.torch.plan.planner import Planner
from usbyte.torch.plan.sparse import model_of
from usbyte.torch.reduce_op import Average, ReduceOp
from usbyte.torch.runtime.device import Device, device_of
from usbyte.torch.runtime.torch_modes import outside_inference_mode
from usbyte.torch.torch_private import not_compiled
from usbyte.torch.world.consistency import OtherOrderError, check_order
from usbyte.torch.world.process_sets import ProcessSetLike as SomeRanks
from usbyte.torch.world.process_sets import ranks_of
from usbyte.torch.world.rank_group import RankGroup
from usbyte.torch.world.subgroup import subgroup_of
from usbyte.torch.world.world import current

__all__ = [
    "DistributedOptimizer",
]

log = logging.getLogger("usbyte")

_F = TypeVar("_F", bound=Callable[..., Any])


def _not_compiled(method: _F) -> _F:
    """Runs as it is inside of what is compiled, as the methods of torch's optimizers do."""
    return not_compiled(method)


class DistributedOptimizer(OptimizerWrapper):
    """Wraps `optimizer` so that `step()` applies gradients averaged over all ranks.

    Nothing of the wrapped optimizer is re-implemented: state, param_groups and state_dict are its
    own, and every update is its own `step`. Constructing it is collective.

    Args:
        optimizer: The optimizer to wrap. Do not call it directly afterwards.
        named_parameters: `model.named_parameters()`, for names in messages and timelines, and by
            which ranks match parameters that they have in different orders. Names must be unique
            and cover every parameter of `optimizer`. Without names, ranks match parameters by
            their places in the optimizer.
        overlap: "backward": gradients are final when `backward()` returns, as with DDP. "forward":
            `step()` returns at once, and each layer of the next forward pass waits only for its own
            parameters; who reads a gradient or a parameter before has it fetched first, so that
            results are the same bit for bit. "auto" (the default): backward in the first steps,
            then forward, if nothing seen in them speaks against it and it is predicted to pay; the
            log tells what was decided and why.
        policy: How communication is planned: "auto" (the default) plans from what the first steps
            and a probe of the network have shown, tries (without shards) a few plans that are as
            good on paper, keeps the fastest, and does so anew when steps come to take another time;
            others of `usbyte._core.policies()` are published systems; "tune:bytescheduler" and
            "tune:dear" tune theirs as published; or a callable Profile x NetworkModel -> Plan.
        op: `Average` or `Sum` over ranks.
        model: The module that owns the parameters; found at the first forward pass if left out.
        compression: What gradients are made smaller with on their way, with a loss: a codec of
            `Compression`, for matrices and larger tensors (casts: for all parameters), or codecs by
            patterns of parameters' names. Of a sequence of those, the least lossy first, the plan
            has what pays, or none; "auto" is bf16 or int8. What codecs with feedback did not send
            is added to the next gradients. On a GPU `topk`, `randk`, `dct`, `dgc` and `powersgd`
            are coded on the host, others by kernels. A single rank sends nothing.
        shard_optimizer: Each rank updates a shard of every parameter, with 1 / size of the state
            and the work, and parameters are gathered in the next forward pass, so that overlap is
            "forward". Needs an optimizer that treats every element by itself. `step()` uses
            gradients up, as if `zero_grad()` followed it; a second one without backward is an
            error. Gradients that are reset to None before it are dropped, on all ranks.
            `state_dict` and `load_state_dict` deal in the whole state and are collective.
        fused_update: Updates of torch.optim.SGD, Adam and AdamW on a CUDA device run as one kernel
            launch for all parameters that are due, to the same results but for the rounding of the
            last bit. Step hooks are refused.
        sparse_as_dense: Send sparse gradients, as of `nn.Embedding(sparse=True)`, as dense ones.
            Otherwise only the rows that they have travel, from a GPU by way of the host, and the
            wrapped optimizer gets sparse sums, where the parameters are; layers that have them are
            found through `model` or `model.named_parameters()`.
        max_grad_norm: With shard_optimizer: gradients are scaled so that their norm over all
            parameters is no larger.
        topology: Dimensions of the network that all_reduces may go through in chunks, first down
            and then up, in orders of their own: "hosts" (the ranks of each host, and the hosts),
            sizes such as "2x4" or [2, 4] with the innermost first (speeds are then measured), a
            `Topology`, or the path of a JSON file of one. With compression, codecs work in one or
            both of two dimensions where that is faster. The default is USBYTE_TOPOLOGY's; with
            policy "themis", "hosts"; else none.
        partition_bytes: bytescheduler: larger tensors are split.
        credit_bytes: bytescheduler: bytes in flight.
        bucket_bytes: ddp: bucket size.
        tune_steps: Steps of each trial of a plan, 2 at least; else 7 (auto), or as published 100
            (tune:bytescheduler) and 5 (tune:dear). With auto, 0 means that none is tried.
        ranks: What `process_set` means, for optimizers made of this one.
        backward_passes_per_step: Accumulate gradients over so many backward passes, and send their
            sum in the last one, or in `step()` if that comes earlier.
        gradient_predivide_factor: Horovod's. Gradients are divided by the number of ranks before
            they are summed, so that it changes nothing; with `Sum` it must be 1.
        num_groups: Horovod's; of no effect, as what travels together is planned.
        groups: Likewise.
        process_set: Ranks that share gradients among themselves: a `ProcessSet`, their numbers, a
            group of torch.distributed's, or a dimension of a `DeviceMesh`. They alone make the
            optimizer. All ranks if left out.

    Raises:
        UsageError: Bad arguments, names missing or used twice.
        MismatchError: Ranks have parameters of other names, shapes or dtypes; raised on every rank.
    """

    _param_table: ParamTable
    _updater: torch.optim.Optimizer | FusedUpdate

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        *,
        overlap: Overlap = "auto",
        policy: str | Policy | None = None,
        op: ReduceOp = Average,
        model: nn.Module | None = None,
        compression: Rules | Sequence[Rules] | None = None,
        shard_optimizer: bool = False,
        fused_update: bool = False,
        max_grad_norm: float | None = None,
        sparse_as_dense: bool = False,
        topology: TopologyLike | None = None,
        partition_bytes: int | None = None,
        credit_bytes: int | None = None,
        bucket_bytes: int | None = None,
        tune_steps: int | None = None,
        ranks: RankGroup | None = None,
        backward_passes_per_step: int = 1,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: object = None,
        process_set: SomeRanks | None = None,
    ) -> None:
        check_combination(
            optimizer,
            overlap,
            op,
            shard_optimizer,
            fused_update,
            max_grad_norm,
            backward_passes_per_step,
            gradient_predivide_factor,
        )
        whole = current() if ranks is None else ranks
        env = whole.env
        policy = policy or env.policy or "auto"
        check_policy(policy, shard_optimizer, tune_steps)
        rank_group = whole
        if process_set is not None:
            rank_group = subgroup_of(current(), ranks_of(process_set, current().size))
        rank_group.close_orphans()
        if num_groups or groups is not None:
            log.warning("num_groups and groups have no effect: what travels together is planned")
        if topology is None and rank_group is current():
            topology = env.topology or ("hosts" if policy == "themis" else None)
        self._settings = Settings(
            overlap="forward" if shard_optimizer else overlap,
            policy=policy,
            op=op,
            model=model,
            compression="none" if compression is None else compression,
            shard_optimizer=shard_optimizer,
            fused_update=fused_update,
            max_grad_norm=None if max_grad_norm is None else float(max_grad_norm),
            sparse_as_dense=sparse_as_dense,
            topology=topology,
            options={
                "partition_bytes": positive(
                    "partition_bytes", partition_bytes, env.partition_bytes
                ),
                "credit_bytes": positive("credit_bytes", credit_bytes, env.credit_bytes),
                "bucket_bytes": positive("bucket_bytes", bucket_bytes, env.bucket_bytes),
            },
            tune_steps=None if tune_steps is None else integer("tune_steps", tune_steps),
            passes_per_step=integer("backward_passes_per_step", backward_passes_per_step),
        )
        self._rank_group = rank_group
        self._owner = model or model_of(named_parameters)
        self._given_names = names_of(named_parameters)
        self._memory = CodecState(self._settings.scale(rank_group.size))
        self._update_guard = UpdateGuard()
        self._planner: Planner | None = None
        # May have ended, where something of it is wanted.
        self._controller: StepController | None = None
        self._driver: BackwardDriver | None = None
        self._used_up: list[nn.Parameter] = []  # by a step of one rank, as sharded ones do
        self._closed = False
        self._state_hooks: list[RemovableHandle] = []
        self.label = rank_group.next_label()
        self._inner = optimizer  # from now on, what is not declared here is its own
        self._build(steps_before=0)
        grad_scaler.install()
        current().on_close(grad_scaler.uninstall)
        rank_group.add(self)

    # What torch.optim.Optimizer promises, by delegation.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's. Read between `backward()` and `step()`, gradients are final.

        GradScaler and others take them from here to change them, in ways that leave no trace.
        """
        controller = self._live
        if controller is not None and controller.reducer.in_flight:
            controller.drain()
        if controller is not None and controller.pending:
            with self._update_guard.lock:  # whoever applies updates narrows them meanwhile
                return self._inner.param_groups
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._drain()
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's, up to date; with shard_optimizer, only this rank's shards."""
        self._bring_up_to_date()
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._drain()
        self._inner.state = state
        self._on_new_state()

    @outside_inference_mode
    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, up to date. Collective if it is sharded.

        With compression it also holds this rank's codec state, as `CODEC_STATE_KEY`. The wrapped
        optimizer ignores it: to lose nothing of it, save and load on every rank. After a
        fault it is left out, with a warning, where they have sent a part of it in a step that is
        not in the parameters.

        Raises:
            FaultError: The run has failed, and what it has left is no state to go on from.
        """
        self._bring_up_to_date()
        memory = self._memory.state()
        extra = {CODEC_STATE_KEY: memory} if memory else {}
        if self._controller is None or self._controller.shards is None:
            return self._inner.state_dict() | extra
        sharded = self._inner.state
        self._inner.state = self._controller.shards.whole_state()  # type: ignore[assignment]
        try:
            return self._inner.state_dict() | extra
        finally:
            self._inner.state = sharded

    @outside_inference_mode
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer; what codecs remember is as it says, or nothing.

        Raises:
            UsageError: What codecs remember is of other parameters.
        """
        self._drain()
        memory = state_dict.get(CODEC_STATE_KEY, {})
        self._memory.check(memory, dict(self.named()), self._rank_group.size)
        coded = memory and self.plan is not None and codes_shards(self.plan)
        if coded and not self._memory.is_as(memory):
            raise UsageError(
                "load_state_dict: each rank compresses shards of its own by now, which need not be "
                "those of the state; load it right after the optimizer is made"
            )
        self._inner.load_state_dict({k: v for k, v in state_dict.items() if k != CODEC_STATE_KEY})
        self._memory.load(memory, self._rank_group.rank)

    @outside_inference_mode
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds to the wrapped optimizer and plans anew. Collective.

        Raises:
            UsageError: The group cannot be served; it is not added.
            MismatchError: Ranks have different groups, which none of them adds.
        """
        controller = self._live
        if controller is not None:
            controller.check_whole_gradients()
        self._drain()
        self._inner.add_param_group(param_group)
        names = self._given_names
        try:
            self._given_names = with_new_names(names, self._inner, self._owner)
            self._serve(ParamTable.of(self._inner, self._given_names))
        except UsageError:
            self._inner.param_groups.pop()
            self._given_names = names
            raise
        if controller is None:
            self._build(steps_before=0)
            return
        controller.end_sharding()
        unsent, steps = controller.reducer.has_accumulated, controller.executor.steps
        try:
            self._build(steps)
        except MismatchError:  # on all ranks
            self._inner.param_groups.pop()
            self._given_names = names
            self._build(steps)
            raise
        finally:
            if self._controller is not None:
                self._controller.shared, self._controller.against = (
                    controller.shared,
                    controller.against,
                )
                self._controller.reducer.has_accumulated = unsent

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r}, overlap={self._settings.overlap!r})"

    def __reduce__(self) -> Any:
        raise UsageError(
            "a DistributedOptimizer is bound to its ranks and cannot be pickled or copied; "
            "save optimizer.state_dict() instead"
        )

    # Training.

    @_not_compiled
    @outside_inference_mode
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Applies the last gradients, or has the next forward pass apply them.

        Raises:
            Error: A gradient was changed while it was in flight.
            FaultError: Communication failed, on any rank.
        """
        self._check_usable()
        if (controller := self._controller) is not None:
            if closure is None or not controller.evaluates_first:
                return controller.step(closure)
            loss = controller.evaluate(closure)
            DistributedOptimizer.step(self)  # and not that of a subclass, which calls this one
            return loss
        if isinstance(self._updater, FusedUpdate):
            self._updater.check()
        if self._settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._param_table.params, self._settings.max_grad_norm)
        with self._update_guard.updating():
            result: float | None = self._update_guard.step(
                self._updater.step, closure, is_known(self._inner)
            )
            self._on_updated()
            self._update_guard.count_step()
        if self._settings.shard_optimizer:
            self._used_up = [param for param in self._param_table.params if param.grad is not None]
            for param in self._used_up:
                param.grad = None
        return result

    @_not_compiled
    @outside_inference_mode
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients; those in flight keep their values for the update that awaits them.

        With shard_optimizer, those that no `step()` has used are dropped, for which it waits for
        the other ranks, which are to do so too.
        """
        self._check_usable()
        if self._controller is not None:
            self._controller.zero_grad(set_to_none)
        else:
            if not set_to_none:  # zeros are gradients too
                for param in self._used_up:
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            self._used_up = []
            self._inner.zero_grad(set_to_none)

    @_not_compiled
    @outside_inference_mode
    def synchronize(self) -> None:
        """Waits until gradients are final and applies pending updates.

        Whoever reads gradients or parameters in Python gets them so without it; it is for what
        reads their memory in other ways. With backward_passes_per_step above 1 it sends what has
        been accumulated until then, on all ranks.

        Raises:
            UsageError: Gradients of a sharded optimizer are on their way, which nobody has whole.
        """
        if (controller := self._live) is not None:
            controller.check_whole_gradients()
            if self._driver is not None and self._driver.accumulates:
                controller.flush_accumulated()
        self.drain()

    @_not_compiled
    @outside_inference_mode
    def flush_accumulated(self) -> None:
        """Sends what this rank has accumulated and not sent, as `step()` would. Collective."""
        self._check_usable()
        if self._controller is not None:
            self._controller.flush_accumulated()

    @_not_compiled
    def drain(self) -> None:
        """Makes final what is on its way, and sends nothing: for this rank alone to call."""
        if (controller := self._live) is not None:
            controller.drain()
            controller.up_to_date()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Horovod's, around `step()` after `synchronize()`; here that never waits twice."""
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate on this rank; the next one outside sends the sum.

        So does `step()`, where none has followed.
        """
        self._check_usable()
        if self._controller is None:
            yield
            return
        self._controller.apply_all()
        assert self._driver is not None
        driver, before = self._driver, self._driver.set_sync(False)
        try:
            yield
        finally:
            driver.set_sync(before)

    @property
    def plan(self) -> _core.Plan | None:
        """The plan in force; None with a single rank."""
        controller = self._live
        return controller.executor.plan if controller is not None else None

    @property
    def decision(self) -> Decision | None:
        """What the plan was made from and what is predicted; None until it is made."""
        return self._planner.decision if self._planner is not None else None

    @property
    def settled(self) -> bool:
        """True while the plan is there to stay: nothing is being learned or tried."""
        controller, decision = self._live, self.decision
        if controller is None:
            return True
        return not controller.reducer.learning and decision is not None and not decision.trial_steps

    # Used by `join`.

    @property
    def size(self) -> int:
        """Number of ranks that share gradients."""
        return self._rank_group.size

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are sent, with their names."""
        return list(zip(self._param_table.names, self._param_table.params, strict=True))

    def names_of_groups(self) -> list[list[str]] | None:
        """By group, the names that its parameters were given; None if some have none."""
        names = self._given_names or {}
        groups = [group["params"] for group in self._inner.param_groups]
        if any(param not in names for params in groups for param in params):
            return None
        return [[names[param] for param in params] for params in groups]

    def join_with_zeros(self) -> None:
        """Takes part in the other ranks' steps, without data, until all ranks do so. Collective."""
        self._check_usable()
        while (controller := self._live) is not None:
            controller.drain()
            self.zero_grad()
            if not controller.contribute_zeros():
                break
            self.step()

    # Used by Context.

    @property
    def closed(self) -> bool:
        """Nothing is sent any more."""
        return self._closed

    @property
    def sends(self) -> bool:
        """Other ranks wait for what this one sends."""
        return self._live is not None

    def orphan(self) -> list[Any]:
        """In a process that was forked, which reads the model: gives what is never to be ended."""
        controller = self._live
        return [self] if controller is None else [self, controller.executor.orphan()]

    def status(self) -> dict[str, Any]:
        """How far this rank has come; see `Engine.status`. Empty if nothing is sent."""
        executor = self._executor
        return executor.status() if executor is not None else {}

    def states(self) -> dict[str, dict[str, Any]]:
        """Of all that it waits for other ranks in, by label."""
        return {self.label: self.status()}

    def hold(self, message: str) -> None:
        """After a fault: from now on who reads parameters waits, until `settle_fault`."""
        if (controller := self._live) is not None:
            self._update_guard.fail(message, self._param_table.params, controller.clean_up)

    def fail(self, message: str) -> None:
        """Every wait from now on raises FaultError with this message; to be called after `hold`."""
        if (executor := self._executor) is not None:
            executor.fail(message)

    def left(self) -> RankProgress | None:
        """What the fault has left here, after `hold`; None if there was nothing to hold."""
        controller = self._controller
        return self._update_guard.left(
            controller.examine if controller is not None else _examine_alone
        )

    def settle_fault(self, verdict: str, judgement: RecoveryDecision) -> None:
        """Whether what is left is a state to go on from; see `ParamRecovery.decide`."""
        self._update_guard.settle(verdict, judgement)

    def set_timeline(self, writer: _core.TimelineWriter | None) -> None:
        """Records from the next step on; None stops."""
        if (controller := self._live) is not None:
            controller.executor.set_timeline(writer)

    def close(self, whole_state: bool = True) -> None:
        """Applies pending updates, unless communication has failed; then ends the engine.

        Collective, in that all ranks must close at the same place.

        Args:
            whole_state: With shard_optimizer, give the wrapped optimizer its whole state back;
                `shutdown` does not.
        """
        self._end(whole_state)

    # Inside.

    @outside_inference_mode
    def _end(self, whole_state: bool) -> None:
        self._closed = True
        for handle in self._state_hooks:
            handle.remove()
        self._state_hooks = []
        if (controller := self._live) is not None:
            try:
                controller.end(whole_state)
            finally:
                assert self._driver is not None
                self._driver.close()
                retain_owner(None, self._param_table.params)
            if controller.shards is None and self._update_guard.recovery is None:
                self._controller = self._driver = None  # with its memory

    @property
    def _live(self) -> StepController | None:
        """What takes the steps, while gradients are sent."""
        controller = self._controller
        return None if controller is None or controller.ended else controller

    @property
    def _executor(self) -> PlanExecutor | None:
        """What moves gradients; threads ask for it while the one that trains may end it."""
        return getattr(self._live, "executor", None)

    def _drain(self) -> None:
        if (controller := self._live) is not None:
            controller.drain()

    def _apply_pending(self) -> None:
        if (controller := self._live) is not None:
            controller.apply_all()

    def _on_new_state(self) -> None:
        if self._controller is not None and self._controller.shards is not None:
            self._controller.shards.reshard_state()

    def _on_updated(self) -> None:
        """The wrapped optimizer has taken a step as a whole, and nobody has read parameters yet."""

    def _bring_up_to_date(self) -> None:
        if self._update_guard.recovery is not None:
            self._update_guard.recovery.check()
        else:
            if self._rank_group.size > 1:
                self._update_guard.check_whole()
            self._drain()

    def _check_usable(self) -> None:
        if self._rank_group.size == 1:
            return
        if self._closed:
            raise UsageError("this DistributedOptimizer is closed; wrap the optimizer anew")
        if (controller := self._live) is not None:
            controller.check()

    @outside_inference_mode
    def _build(self, steps_before: int) -> None:
        """Everything that depends on which parameters there are. Collective."""
        settings, rank_group = self._settings, self._rank_group
        param_table = ParamTable.of(self._inner, self._given_names)
        served = self._serve(param_table)
        self._end(whole_state=True)
        self._controller = self._driver = None
        self._param_table, self._updater = param_table, served.updater
        if holds_shards(self._inner):
            raise UsageError(
                "this optimizer holds shards of its state from before a shutdown: make it anew and "
                "load a checkpoint, or call close() on its DistributedOptimizer before shutdown()"
            )
        if rank_group.size == 1:
            self._closed = False
            return  # nothing to send: the wrapped optimizer as it is
        changing = warn_of_renormalized(self.label, param_table, self._owner)
        device = device_of(param_table.names, param_table.params)
        try:
            planner = self._make_planner(param_table, device, served, steps_before)
        except OtherOrderError as error:  # on all ranks, which take the order of the first
            param_table = param_table.in_order(error.names)
            served = self._serve(param_table)
            planner = self._make_planner(param_table, device, served, steps_before)
        if self._given_names is None:
            check_order(rank_group, self.label, param_table.params)
        self._param_table, self._planner = param_table, planner
        if settings.topology is not None:
            parse(settings.topology, rank_group.size)  # alike, so an error is on all ranks
        self._controller = StepController(
            rank_group,
            self._inner,
            self._updater,
            settings,
            param_table,
            changing,
            device,
            planner,
            self._update_guard,
            self._memory,
            steps_before,
            self._on_updated,
        )
        self._driver = BackwardDriver(
            self._controller, param_table.params, settings.passes_per_step
        )
        retain_owner(self, param_table.params)
        self._state_hooks = self._hook_state()
        self._closed = False

    def _make_planner(
        self, param_table: ParamTable, device: Device, served: ValidatedOptimizer, steps_before: int
    ) -> Planner:
        return Planner(
            self._rank_group, self.label, self._settings, param_table, device, served.codecs,
            served.sparse, steps_before,
        )  # fmt: skip

    def _serve(self, param_table: ParamTable) -> ValidatedOptimizer:
        """Claims parameters.

        Raises:
            UsageError: Some of them are not served; nothing has changed.
        """
        settings, size = self._settings, self._rank_group.size
        served = validate_optimizer(self._inner, param_table, settings, size, self._owner)
        register_params(self, param_table.params, param_table.names)
        return served


def _examine_alone(is_quiet: bool) -> tuple[bool, bool]:
    """See `UpdateGuard.left`; a step of a single rank is there as a whole or not."""
    return not is_quiet, False

# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: wraps any torch optimizer and averages gradients over all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.comm.topology import TopologyLike
from usbyte.torch.compression.codecs import Rules
from usbyte.torch.compression.state import CODEC_STATE_KEY, codes_shards
from usbyte.torch.optimizer import grad_scaler
from usbyte.torch.optimizer.config import (
    check_combination,
    integer,
    names_of,
    positive,
    validate_policy,
)
from usbyte.torch.optimizer.session import OptimizerParticipant, OptimizerSession
from usbyte.torch.optimizer.wrapper import OptimizerWrapper
from usbyte.torch.plan.decision import Decision
from usbyte.torch.plan.job import Overlap, Policy, Settings
from usbyte.torch.plan.sparse import model_of
from usbyte.torch.reduce_op import Average, ReduceOp
from usbyte.torch.runtime.torch_modes import outside_inference_mode
from usbyte.torch.torch_private import not_compiled
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
    """Excludes a method from torch.compile, as the methods of torch's optimizers are."""
    return not_compiled(method)


class DistributedOptimizer(OptimizerWrapper):
    """Wraps `optimizer` so that `step()` applies gradients averaged over all ranks.

    The wrapped optimizer is used as it is: state, param_groups and state_dict are its own, and its
    own `step` makes every update. The constructor is collective.

    Args:
        optimizer: The optimizer to wrap. Do not call it directly afterwards.
        named_parameters: `model.named_parameters()`. The names appear in messages and timelines,
            and ranks with different orders of parameters match them by name. Names must be unique
            and cover every parameter of `optimizer`. By default ranks match parameters by their
            position in the optimizer.
        by_position: Nothing; an error says to give the other arguments by name.
        overlap: "backward": gradients are final when `backward()` returns, as with DDP. "forward":
            `step()` returns immediately; the all-reduce and the update of each layer overlap with
            the next forward pass, and a layer waits only for its own parameters. Accessing a
            parameter or gradient earlier waits until it is up to date, so results are bitwise equal
            to "backward". "auto" (default): backward in the first steps; then forward, if it is
            predicted to be faster and nothing in the first steps forbids it. The log gives the
            choice and the reason.
        policy: Policy that plans the communication. "auto" (default) makes a plan from a profile of
            the first steps and a probe of the network, tries a few plans with equally good
            predictions (not with shard_optimizer), keeps the fastest, and starts anew when the time
            of a step changes. Other names in `usbyte._core.policies()` are published systems.
            "tune:bytescheduler" and "tune:dear" tune theirs as published, "tune:us-byte" and
            "tune:dcredit" try units of several sizes. A callable maps a Profile and a NetworkModel
            to a Plan. If None, USBYTE_POLICY.
        op: Reduction over ranks: `Average` (default) or `Sum`.
        model: The module that owns the parameters; found in the first forward pass by default.
        compression: Lossy compression of gradients; default none. A codec of `Compression` or its
            spec applies to parameters of two or more dimensions, or to all if it is a cast. A dict
            maps patterns of parameter names to codecs. From a list of these, the least lossy first,
            the plan uses the one that is fastest, or none. "auto" chooses between bf16, int8 and
            none. Policy "auto" sends gradients uncompressed where that is predicted to be faster;
            other policies but "bytecomp" always compress. Codecs with error feedback add what they
            did not send to the next gradients. On a GPU `topk`, `randk`, `dct`, `dgc` and
            `powersgd` run on the host, others as kernels. No effect with a single rank.
        shard_optimizer: Each rank updates one shard of every parameter, with 1 / size of the
            optimizer state and work. Updated parameters are gathered in the next forward pass,
            so overlap is "forward". The optimizer must treat every element independently. `step()`
            consumes the gradients, as if `zero_grad()` followed; a second `step()` without backward
            is an error. Gradients that are set to None before `step()` are dropped, on all ranks.
            `state_dict` and `load_state_dict` use the whole state and are collective. Default
            False.
        fused_update: On CUDA, runs the updates of torch.optim.SGD, Adam or AdamW as one kernel
            launch for all parameters that are due. Results differ at most in the rounding of the
            last bit. Step hooks are refused. Default False.
        max_grad_norm: With shard_optimizer: upper limit of the gradient norm over all parameters;
            larger gradients are scaled down. Default none.
        sparse_as_dense: Sends sparse gradients, as of `nn.Embedding(sparse=True)`, as dense ones.
            By default only the rows that are present are sent, from a GPU through host memory, and
            the wrapped optimizer gets sparse sums on the device of the parameters. The layers with
            sparse gradients are found through `model` or `model.named_parameters()`.
        topology: Dimensions of the network along which all-reduces are sent in chunks, each by its
            own route: "hosts" (inside each host, and between hosts); sizes such as "2x4" or [2, 4],
            innermost first, whose speeds are then measured; a `Topology`; or the path of its JSON
            file. With compression, codecs work in one or both of two dimensions where that is
            faster. Default: USBYTE_TOPOLOGY, or "hosts" with policy "themis", or none; with a
            `process_set` of fewer ranks, none.
        partition_bytes: For policy "bytescheduler": larger tensors are split. Default
            USBYTE_PARTITION_BYTES, 32 MiB.
        credit_bytes: For policy "bytescheduler": most bytes in flight. Default USBYTE_CREDIT_BYTES,
            64 MiB.
        bucket_bytes: For policy "ddp": size of a bucket. Default USBYTE_BUCKET_BYTES, 25 MiB.
        tune_steps: Steps of each trial of a plan, at least 2. Default 7 for "auto", 100 for
            "tune:bytescheduler", 5 for "tune:dear", 10 for other policies with trials. With "auto",
            0 turns trials off.
        ranks: A World or Subgroup, for optimizers built on this one, which register themselves with
            the world; use `process_set` otherwise.
        backward_passes_per_step: Number of backward passes whose gradients are accumulated, at
            least 1, default 1. Their sum is sent in the last one, or in `step()` if that comes
            earlier.
        gradient_predivide_factor: Horovod's; default 1. With `Average` it has no effect, because
            gradients are divided by the number of ranks before the sum. With `Sum` it must be 1.
        num_groups: Ignored with a warning. Horovod's scripts pass it; here the plan decides which
            gradients are sent together.
        groups: Horovod's; ignored with a warning, for the same reason.
        process_set: Ranks that share gradients; only they construct the optimizer. Default all
            ranks. A `ProcessSet`, a list of ranks, a process group of torch.distributed, or a
            one-dimensional `DeviceMesh`.

    Raises:
        UsageError: An argument cannot be used, or a name is missing or used twice.
        MismatchError: Ranks have parameters of other names, shapes or dtypes; raised on every rank.

    Examples:
        >>> import torch
        >>> import usbyte.torch as ub
        >>> ub.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * ub.size())
        >>> optimizer = ub.DistributedOptimizer(optimizer, model.named_parameters())
        >>> ub.broadcast_parameters(model.state_dict())
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.close()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        *by_position: object,
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
        if isinstance(optimizer, OptimizerWrapper):
            raise UsageError(
                f"optimizer is a {type(optimizer).__name__} already: wrap the torch optimizer "
                "once, and use the result"
            )
        if by_position:
            raise UsageError(
                "DistributedOptimizer takes only the optimizer and named_parameters by position; "
                "give other arguments by name, such as compression=ub.Compression.fp16"
            )
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
        policy = validate_policy(policy or env.policy or "auto", shard_optimizer, tune_steps)
        rank_group = whole
        if process_set is not None:
            rank_group = subgroup_of(current(), ranks_of(process_set, current().size))
        if num_groups or groups is not None:
            log.warning("num_groups and groups have no effect: what travels together is planned")
        if topology is None and rank_group is current():
            topology = env.topology or ("hosts" if policy == "themis" else None)
        settings = Settings(
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
        owner = model or model_of(named_parameters)
        names = names_of(named_parameters)
        self._session = OptimizerSession(self, optimizer, settings, rank_group, owner, names)
        self._participant = OptimizerParticipant(self._session, self)
        self._inner = optimizer  # from now on, undeclared attributes go to the wrapped optimizer
        self._session.build(steps_before=0)
        if rank_group.size == 1:
            log.info("there is one rank: nothing is sent, and the wrapped optimizer does all")
        self._add_state_hooks()
        grad_scaler.install()
        current().on_close(grad_scaler.uninstall)
        if ranks is None:
            rank_group.add(self._participant)

    # The interface of torch.optim.Optimizer, by delegation.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's. A read between `backward()` and `step()` waits for gradients.

        GradScaler and others read the gradients from it to change them in place, which cannot be
        observed.
        """
        controller = self._session.live
        if controller is not None and controller.reducer.in_flight:
            controller.drain()
        if controller is not None and controller.pending:
            # Threads that apply updates narrow the groups meanwhile.
            with self._session.update_guard.lock:
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
        """Returns the wrapped optimizer's state_dict, up to date. Collective with shard_optimizer.

        With compression it also holds the codec state of this rank, under the key `usbyte_memory`,
        which the wrapped optimizer ignores. To lose none of it, save and load on every rank. After
        a fault the codec state is left out, with a warning, if a part of it was sent in a step that
        is not in the parameters.

        Raises:
            FaultError: The run has failed, and left no consistent state.
            Error: A step was applied partially.
        """
        self._bring_up_to_date()
        codec_state, controller = self._session.codec_state.state(), self._session.controller
        extra = {CODEC_STATE_KEY: codec_state} if codec_state else {}
        if controller is None or controller.shards is None:
            return self._inner.state_dict() | extra
        sharded = self._inner.state
        self._inner.state = controller.shards.whole_state()  # type: ignore[assignment]
        try:
            return self._inner.state_dict() | extra
        finally:
            self._inner.state = sharded

    @outside_inference_mode
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer, and replaces or clears the codec state.

        Raises:
            UsageError: The codec state is of other parameters, or of other shards than this rank
                compresses by now.
        """
        self._drain()
        session, loaded = self._session, state_dict.get(CODEC_STATE_KEY, {})
        codec_state = session.codec_state
        codec_state.check(loaded, dict(session.named()), session.rank_group.size)
        coded = loaded and self.plan is not None and codes_shards(self.plan)
        if coded:
            codec_state.check_same(loaded)
        self._inner.load_state_dict({k: v for k, v in state_dict.items() if k != CODEC_STATE_KEY})
        codec_state.load(loaded, session.rank_group.rank)

    @outside_inference_mode
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the wrapped optimizer and plans anew. Collective.

        Raises:
            UsageError: The group is not supported; it is not added.
            MismatchError: The ranks pass different groups; no rank adds one.
        """
        self._session.add_param_group(param_group)
        self._add_state_hooks()  # a closed optimizer is open again

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r}, overlap={self._session.settings.overlap!r})"

    # Training.

    @_not_compiled
    @outside_inference_mode
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Applies the last gradients, now or, with overlap "forward", in the next forward pass.

        Args:
            closure: As for `torch.optim.Optimizer.step`.

        Returns:
            The result of `closure`; None without one.

        Raises:
            Error: A gradient was changed while it was in flight.
            FaultError: Communication failed, on any rank.
        """
        self._session.check_usable()
        self._session.first_gradient.step(self._session.param_table.params, closure is not None)
        if self._session.local_steps is not None:
            return self._session.local_steps.step(closure)
        controller = self._session.controller
        assert controller is not None
        if closure is None or not controller.evaluates_first:
            return controller.step(closure)
        loss = controller.evaluate(closure)
        DistributedOptimizer.step(self)  # a subclass's step() calls this one
        return loss

    @_not_compiled
    @outside_inference_mode
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients. Gradients that a deferred update still needs keep their values for it.

        With shard_optimizer, gradients that no `step()` has used are dropped. This waits for the
        other ranks, which must drop theirs as well.

        Args:
            set_to_none: As for `torch.optim.Optimizer.zero_grad`.
        """
        self._session.check_usable()
        steps = self._session.local_steps or self._session.controller
        assert steps is not None
        steps.zero_grad(set_to_none)

    @_not_compiled
    @outside_inference_mode
    def synchronize(self) -> None:
        """Waits until gradients are final and applies pending updates.

        Reads of gradients and parameters in Python do so by themselves. Call this before their
        memory is read in another way. With backward_passes_per_step above 1 it sends what has been
        accumulated so far, and must be called on all ranks.

        Raises:
            UsageError: With shard_optimizer: gradients are in flight, of which no rank has the
                whole.
        """
        if (controller := self._session.live) is not None:
            controller.check_whole_gradients()
            if controller.driver.accumulates:
                controller.driver.flush_accumulated()
        self.drain()

    @_not_compiled
    @outside_inference_mode
    def flush_accumulated(self) -> None:
        """Sends the gradients that this rank has accumulated, as `step()` would. Collective."""
        self._session.check_usable()
        if (controller := self._session.live) is not None:
            controller.driver.flush_accumulated()

    @_not_compiled
    def drain(self) -> None:
        """Waits for gradients in flight and applies pending updates. Sends nothing."""
        self._participant.drain()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Does nothing. Horovod needs it around `step()` after `synchronize()`."""
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes accumulate on this rank; the next one outside sends the sum.

        If no backward pass follows, `step()` sends it.
        """
        self._session.check_usable()
        if (controller := self._session.live) is None:
            yield
            return
        controller.apply_all()
        driver, before = controller.driver, controller.driver.set_sync(False)
        try:
            yield
        finally:
            driver.set_sync(before)

    @property
    def plan(self) -> _core.Plan | None:
        """The plan in force; None with a single rank."""
        controller = self._session.live
        return controller.executor.plan if controller is not None else None

    @property
    def decision(self) -> Decision | None:
        """The plan with the profile and network model it was made from; None until it is made."""
        planner = self._session.planner
        return planner.decision if planner is not None else None

    @property
    def settled(self) -> bool:
        """True while the plan is final: no learning and no trial is going on."""
        controller, decision = self._session.live, self.decision
        if controller is None:
            return True
        return not controller.reducer.learning and decision is not None and not decision.trial_steps

    def close(self, whole_state: bool = True) -> None:
        """Applies pending updates, unless communication has failed; then ends the engine.

        Collective: all ranks must close at the same place.

        Args:
            whole_state: With shard_optimizer, give the wrapped optimizer its whole state back;
                default True. `shutdown` passes False.
        """
        self._session.close(whole_state)

    def _add_state_hooks(self) -> None:
        if self._session.live is not None and not self._session.state_hooks:
            self._session.state_hooks = self._hook_state()

    # For OptimizerWrapper.

    def _apply_pending(self) -> None:
        if (controller := self._session.live) is not None:
            controller.apply_all()

    def _drain(self) -> None:
        self._session.drain()

    def _bring_up_to_date(self) -> None:
        self._session.bring_up_to_date()

    def _on_new_state(self) -> None:
        controller = self._session.controller
        if controller is not None and controller.shards is not None:
            controller.shards.reshard_state()


def session_of(optimizer: DistributedOptimizer) -> OptimizerSession:
    """Returns what the optimizer trains with, for optimizers that wrap it."""
    return optimizer._session

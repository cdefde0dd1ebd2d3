"""DistributedOptimizer: any torch optimizer, on gradients summed over all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import Error, UsageError
from usbyte.torch.arguments import check_combination, check_policy, names_of, positive
from usbyte.torch.awaited import release, weakly
from usbyte.torch.changes import Changes
from usbyte.torch.compression import MEMORY, Memory, Rules, check_momentum, check_relays, choices_of
from usbyte.torch.context import Context, current
from usbyte.torch.decision import Decision
from usbyte.torch.device import Mark, device_of
from usbyte.torch.fused import FusedUpdate
from usbyte.torch.gates import Gates
from usbyte.torch.members import members_of
from usbyte.torch.mesh import Given, parse, told
from usbyte.torch.ops import Average, ReduceOp
from usbyte.torch.overlap import Overlap, Watch, agree
from usbyte.torch.ownership import claim, keep
from usbyte.torch.planning import Planner, Policy
from usbyte.torch.process_sets import Members as SomeRanks
from usbyte.torch.process_sets import ranks_of
from usbyte.torch.reducer import Reducer, codes_shards
from usbyte.torch.salvage import Judgement, Left
from usbyte.torch.sharding import ShardedUpdates, check_dense
from usbyte.torch.sparse import model_of, sparse_parameters
from usbyte.torch.updates import DeferredUpdates, calls_closure_first, has_step_hooks, is_known
from usbyte.torch.wrapper import OptimizerWrapper

__all__ = [
    "DistributedOptimizer",
]

log = logging.getLogger("usbyte")

_F = TypeVar("_F", bound=Callable[..., Any])


def _not_compiled(method: _F) -> _F:
    """Runs as it is inside of what is compiled, as the methods of torch's optimizers do."""
    return cast("_F", torch._disable_dynamo(method))


class DistributedOptimizer(OptimizerWrapper):
    """Wraps `optimizer` so that `step()` applies gradients averaged over all ranks.

    Nothing of the wrapped optimizer is re-implemented: state, param_groups and state_dict are its
    own, and every update is its own `step`. Constructing it is collective.

    Args:
        optimizer: The optimizer to wrap. Do not call it directly afterwards.
        named_parameters: `model.named_parameters()`, for names in messages and timelines. Names
            must be unique and cover every parameter of `optimizer`.
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
            error. `state_dict` and `load_state_dict` deal in the whole state and are collective.
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
        topology: Given | None = None,
        partition_bytes: int | None = None,
        credit_bytes: int | None = None,
        bucket_bytes: int | None = None,
        tune_steps: int | None = None,
        ranks: Context | None = None,
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
        if shard_optimizer:
            overlap = "forward"
        self._passes_per_step = backward_passes_per_step
        whole = current() if ranks is None else ranks
        context = whole
        if process_set is not None:
            context = members_of(whole, ranks_of(process_set, whole.size))
        context.close_abandoned()
        self._context = context
        if num_groups or groups is not None:
            log.warning("num_groups and groups have no effect: what travels together is planned")
        self._compression: Rules | Sequence[Rules] = "none" if compression is None else compression
        self._memory = Memory()
        self._steps = 0  # completed before the reducer was made
        self._sharded, self._max_grad_norm = shard_optimizer, max_grad_norm
        self._fuses = fused_update
        self._shards: ShardedUpdates | None = None
        env = context.env
        policy = policy or env.policy or "auto"
        check_policy(policy, shard_optimizer, tune_steps)
        self._inner = optimizer
        self._overlap = overlap
        self._model = model
        self._op = op
        self._scale = 1.0 / context.size if op == Average else 1.0
        self._policy, self._tune_steps = policy, tune_steps
        if topology is None and context is current():
            topology = env.topology or ("hosts" if policy == "themis" else None)
        self._topology = topology
        self._options = {
            "partition_bytes": positive("partition_bytes", partition_bytes, env.partition_bytes),
            "credit_bytes": positive("credit_bytes", credit_bytes, env.credit_bytes),
            "bucket_bytes": positive("bucket_bytes", bucket_bytes, env.bucket_bytes),
        }
        self._densifies = sparse_as_dense
        self._owner = model or model_of(named_parameters)
        self._given_names = names_of(named_parameters)
        self.label = context.next_label()
        self._reducer: Reducer | None = None
        self._gates: Gates | None = None
        self._planner: Planner | None = None
        self._learned = False  # there is a plan, and a decision on overlap
        self._changes = Changes()
        self._on_device = False  # what a fault has left is
        self._set_to_none = True
        self._shared = ""  # a parameter that another thread than the one that trains has used
        self._told_of_threads = False
        self._closed = False
        self._build()
        context.add(self)

    # What torch.optim.Optimizer promises, by delegation.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's. Read between `backward()` and `step()`, gradients are final.

        GradScaler and others take them from here to change them, in ways that leave no trace.
        """
        reducer: Reducer | None = getattr(self, "_reducer", None)
        if reducer is not None and reducer.in_flight:
            self._drain()
        if reducer is not None and (self._updates.count or self._changes.elsewhere):
            with self._changes.lock:  # whoever applies updates narrows them meanwhile
                return self._inner.param_groups
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's, up to date; with shard_optimizer, only this rank's shards."""
        self._bring_up_to_date()
        return self._inner.state

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, up to date. Collective if it is sharded.

        With compression it also holds what this rank's codecs remember, as `MEMORY`, which the
        wrapped optimizer does not mind: to lose nothing of it, save and load on every rank.

        Raises:
            FaultError: The run has failed, and what it has left is no state to go on from.
        """
        self._bring_up_to_date()
        memory = self._memory.state()
        extra = {MEMORY: memory} if memory else {}
        if self._shards is None:
            return self._inner.state_dict() | extra
        sharded, self._inner.state = self._inner.state, self._shards.whole_state()  # type: ignore[assignment]
        try:
            return self._inner.state_dict() | extra
        finally:
            self._inner.state = sharded

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer; what codecs remember is as it says, or nothing.

        Raises:
            UsageError: What codecs remember is of other parameters.
        """
        self._drain()
        memory = state_dict.get(MEMORY, {})
        params = dict(zip(self._names(), self._params, strict=True))
        self._memory.check(memory, params, self._context.size)
        if memory and self._reducer is not None and codes_shards(self._reducer.plan):
            raise UsageError(
                "load_state_dict: each rank compresses shards of its own by now, which need not be "
                "those of the state; load it right after the optimizer is made"
            )
        self._inner.load_state_dict({k: v for k, v in state_dict.items() if k != MEMORY})
        self._memory.load(memory, self._context.rank)
        if self._shards is not None:
            self._shards.recut()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds to the wrapped optimizer and plans anew. Collective."""
        self._drain()
        self._inner.add_param_group(param_group)
        self._end_sharding()
        self._steps = self._reducer.steps if self._reducer is not None else 0
        self._build()

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r}, overlap={self._overlap!r})"

    def __reduce__(self) -> Any:
        raise UsageError(
            "a DistributedOptimizer is bound to its ranks and cannot be pickled or copied; "
            "save optimizer.state_dict() instead"
        )

    # Training.

    @_not_compiled
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Applies the last gradients, or has the next forward pass apply them.

        Raises:
            Error: A gradient was changed while it was in flight.
            FaultError: Communication failed, on any rank.
        """
        self._check_usable()
        reducer = self._reducer
        if reducer is not None:
            self._check_threads(reducer)
        if closure is not None and reducer is not None:
            if calls_closure_first(self._inner) and not self._needs_whole_step():
                with torch.enable_grad():
                    loss = closure()
                self._watch.finds_threads()  # what the closure has run in others is over
                DistributedOptimizer.step(self)  # and not that of a subclass, which calls this one
                return loss
            if self._overlap == "forward":
                raise UsageError(
                    f"{type(self._inner).__name__} may call its closure several times, and needs "
                    'the gradients at once: leave out overlap="forward"'
                )
        if reducer is not None and reducer.unsent and not reducer.in_flight and closure is None:
            self._apply_all()
            reducer.send_kept()
        if self._shards is not None and reducer is not None:
            self._sharded_step(self._shards, reducer)
            return None
        if (
            reducer is None
            or not reducer.in_flight
            or reducer.plan_ends
            or self._needs_whole_step()
            or closure is not None
            or not reducer.untouched()
        ):
            self._drain()
            self._watch.step(closure is not None, self._needs_whole_step())
            start: Mark = reducer.device.now() if reducer is not None else 0.0
            if self._max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self._params, self._max_grad_norm)
            with self._changes.updating():
                result = self._step_now(closure)
                self._changes.count_step()
            if reducer is not None:
                reducer.finish_step(start)
                if reducer.learning:
                    if self._learned:
                        self._watch.begin()
                    self._learned = False
                elif not self._learned:
                    self._finish_learning()
            self._watch.step_ends()
            return result
        with self._changes.lock:
            self._updates.defer()
            self._changes.put_off()
            reducer.in_flight = False
            self._watch.step_ends()
        self._apply(self._ungated)
        return None

    @_not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients; those in flight keep their values for the update that awaits them."""
        self._check_usable()
        self._set_to_none = set_to_none
        if self._shards is not None:
            self._zero_spent(self._shards.used)
            self._shards.spent = not set_to_none  # zeros are gradients too
        elif self._updates.count or self._changes.elsewhere:
            with self._changes.lock:  # updates in other threads need their gradients
                reset = self._updates if self._updates.count else self._inner
                reset.zero_grad(set_to_none)
        else:
            self._drain()
            self._inner.zero_grad(set_to_none)
        if self._reducer is not None:
            self._reducer.forget_results()

    @_not_compiled
    def synchronize(self) -> None:
        """Waits until gradients are final and applies pending updates.

        Whoever reads gradients or parameters in Python gets them so without it; it is for what
        reads their memory in other ways. With backward_passes_per_step above 1 it sends what has
        been accumulated until then, on all ranks.
        """
        if self._reducer is not None and self._reducer.accumulates and not self._reducer.in_flight:
            self._apply_all()
            self._reducer.send_kept()
        self.drain()

    @_not_compiled
    def drain(self) -> None:
        """Makes final what is on its way, and sends nothing: for this rank alone to call."""
        self._drain()
        self._watch.up_to_date()

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
        if self._reducer is None:
            yield
            return
        self._apply_all()
        before = self._reducer.set_sync(False)
        try:
            yield
        finally:
            self._reducer.set_sync(before)

    @property
    def plan(self) -> _core.Plan | None:
        """The plan in force; None with a single rank."""
        return self._reducer.plan if self._reducer is not None else None

    @property
    def decision(self) -> Decision | None:
        """What the plan was made from and what is predicted; None until it is made."""
        return self._planner.decision if self._planner is not None else None

    @property
    def settled(self) -> bool:
        """True while the plan is there to stay: nothing is being learned or tried."""
        if self._reducer is None:
            return True
        decision = self.decision
        return not self._reducer.learning and decision is not None and not decision.trial_steps

    # Used by `join`.

    @property
    def size(self) -> int:
        """Number of ranks that share gradients."""
        return self._context.size

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are sent, with their names."""
        return list(zip(self._names(), self._params, strict=True))

    def stand_in(self) -> None:
        """Takes part in the other ranks' steps, without data, until all ranks do so. Collective."""
        self._check_usable()
        while self._reducer is not None:
            self._drain()
            self.zero_grad()
            if not self._reducer.send_none():
                break
            self.step()

    # Used by Context.

    @property
    def closed(self) -> bool:
        """Nothing is sent any more."""
        return self._closed

    def orphan(self) -> list[Any]:
        """In a process that was forked, which reads the model: gives what is never to be ended."""
        return [self] if self._reducer is None else [self, self._reducer.orphan()]

    def status(self) -> dict[str, Any]:
        """How far this rank has come; see `Engine.status`. Empty if nothing is sent."""
        return self._reducer.status() if self._reducer is not None else {}

    def hold(self, message: str) -> None:
        """After a fault: from now on who reads parameters waits, until `settle_fault`."""
        if self._reducer is not None:
            self._guard(message, self._reducer)

    def fail(self, message: str) -> None:
        """Every wait from now on raises FaultError with this message; to be called after `hold`."""
        if self._reducer is not None:
            self._reducer.fail(message)

    def left(self) -> Left | None:
        """What the fault has left here, after `hold`; None if there was nothing to hold."""
        return self._changes.left(self._examine)

    def _examine(self, is_quiet: bool) -> tuple[bool, bool]:
        """Whether a step was applied in part, and whether its rest can be; see `Changes.left`."""
        updates, reducer = self._shards or self._updates, self._reducer
        # Of sharded parameters a shard each is a step ahead of the rest at once.
        whole = updates.count in (0, 0 if self._shards else len(self._params))
        completable, torn = False, self._on_device
        with suppress(UsageError):  # the engine has ended meanwhile
            if reducer is not None:
                torn = reducer.is_torn()
                alone = updates.count > 0 and is_quiet and self._shards is None
                completable = alone and reducer.has_all()
        return not whole or not is_quiet or torn, completable

    def settle_fault(self, verdict: str, judgement: Judgement) -> None:
        """Whether what is left is a state to go on from; see `Salvage.decide`."""
        self._changes.settle(verdict, judgement)

    def set_timeline(self, writer: _core.TimelineWriter | None) -> None:
        """Records from the next step on; None stops."""
        if self._reducer is not None:
            self._reducer.set_timeline(writer)

    def close(self, whole_state: bool = True) -> None:
        """Applies pending updates, unless communication has failed; then ends the engine.

        Collective, in that all ranks must close at the same place.

        Args:
            whole_state: With shard_optimizer, give the wrapped optimizer its whole state back;
                `shutdown` does not.
        """
        self._end_engine(whole_state)

    # Inside.

    def _drain(self) -> None:
        if self._reducer is None:
            return
        self._apply_all()
        if self._reducer.in_flight:
            if self._shards is not None:
                raise UsageError(
                    "with shard_optimizer=True no rank has whole gradients: call step() right "
                    "after backward(), and clip with max_grad_norm="
                )
            with self._changes.lock:
                if self._reducer.in_flight:
                    self._reducer.settle()
                else:  # another thread has put the updates off meanwhile
                    self._apply_all()

    def _end_engine(self, whole_state: bool = True) -> None:
        self._closed = True
        reducer, gates = self._reducer, self._gates
        if reducer is None or gates is None:
            return
        try:
            if not reducer.failed and not reducer.in_backward:
                self._apply_all()
                if reducer.in_flight and self._shards is None:
                    reducer.settle()
                if whole_state:
                    self._end_sharding()
        finally:
            if self._changes.salvage is None:
                self._give_up()
            reducer.release_gradients()
            gates.close()
            reducer.close()
            self._gates = self._reducer = None
            keep(None, self._params)

    def _build(self) -> None:
        self._end_engine()
        self._shards = None
        rows = [(p, g) for g, group in enumerate(self._inner.param_groups) for p in group["params"]]
        self._frozen = [p for p, _ in rows if not p.requires_grad]
        rows = [(p, g) for p, g in rows if p.requires_grad and p.numel()]
        self._params = [p for p, _ in rows]
        self._group_of = [g for _, g in rows]
        self._ungated: list[int] = []
        self._learned = False
        self._in_step = False  # of the wrapped optimizer, which may run a closure
        self._late: list[bool] = []  # updates that the forward pass did not ask for
        names = self._names()
        claim(self, self._params, names)
        if not self._params:
            raise UsageError(
                "the optimizer has no parameter with elements that requires a gradient"
            )
        self._fused = FusedUpdate(self._inner, names, self._params) if self._fuses else None
        count = range(len(self._params))
        self._fetch_param = [weakly(self._on_param_read, i) for i in count]
        self._fetch_gradient = [weakly(self._on_gradient_read, i) for i in count]
        self._updates = DeferredUpdates(
            self._inner, self._take_step, self._params, self._group_of, self._fetch_param
        )
        self._watch = Watch(self._inner, names, self._params)
        if self._sharded:
            check_dense(names, self._params)
        if any(getattr(p, "_usbyte_shard", False) for p in self._inner.state):
            raise UsageError(
                "this optimizer holds shards of its state from before a shutdown: make it anew and "
                "load a checkpoint, or call close() on its DistributedOptimizer before shutdown()"
            )
        codecs = choices_of(self._compression, names, self._params)
        if codecs.optional:
            self._check_chooses()
        check_momentum(codecs.specs, self._inner.param_groups)
        if self._context.size == 1:
            self._closed = False
            return  # nothing to send: the wrapped optimizer as it is
        if self._sharded:
            check_relays(codecs.specs)
        device = device_of(names, self._params)
        sparse = self._sparse_names(names)
        self._planner = planner = Planner(
            self._context,
            self.label,
            names,
            self._params,
            device,
            self._policy,
            self._overlap,
            codecs,
            sparse,
            self._sharded,
            self._options,
            self._tune_steps,
            self._steps,
            alike={
                "op": str(self._op),
                "policy": self._policy if isinstance(self._policy, str) else "a function",
                "max_grad_norm": self._max_grad_norm,
                "backward_passes_per_step": self._passes_per_step,
                "topology": told(self._topology, self._context.size),
            },
        )
        if self._topology is not None:
            parse(self._topology, self._context.size)  # alike, so an error is on all ranks
        self._gates = gates = Gates(self._params, self._on_use, self._on_root, device, self._model)
        try:
            self._reducer = Reducer(
                self._context,
                names,
                self._params,
                device,
                planner,
                gates,
                self._scale,
                self._densifies,
                self._policy == "auto",
                self._overlap == "auto",
                self._sharded,
                self._passes_per_step,
                self._topology,
                self._memory,
                self._steps,
                self._before_first_gradient,
                self._on_gradient,
                self._on_backward_end,
                self._on_learned,
            )
        except BaseException:
            gates.close()
            raise
        keep(self, self._params)
        self._closed = False

    def _sparse_names(self, names: Sequence[str]) -> set[str]:
        """Of parameters whose gradients travel as the rows that they have."""
        known = set() if self._densifies else sparse_parameters(self._owner)
        sparse = {n for n, p in zip(names, self._params, strict=True) if p in known}
        if sparse and (self._sharded or self._fuses):
            what = "shard_optimizer=True" if self._sharded else "fused_update=True"
            raise UsageError(
                f"the gradient of '{min(sparse)}' is sparse, which does not go with {what}: pass "
                "sparse_as_dense=True"
            )
        return sparse

    def _check_chooses(self) -> None:
        if self._policy not in _core.policies():
            what = f"policy '{self._policy}'" if isinstance(self._policy, str) else "a function"
            raise UsageError(
                f"{what} cannot choose from several codecs: name one for compression=, or take "
                'policy="auto"'
            )

    def _names(self) -> list[str]:
        if self._given_names is None:
            return [f"group{g}.param{i}" for i, g in enumerate(self._group_of)]
        missing = [p for p in self._params if p not in self._given_names]
        if missing:
            raise UsageError(
                f"named_parameters lacks {len(missing)} of the optimizer's parameters, the first "
                f"of shape {tuple(missing[0].shape)}; pass model.named_parameters()"
            )
        return [self._given_names[p] for p in self._params]

    def _take_step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._reducer is not None:
            self._reducer.applied = True
        # Looked up each time, as schedulers replace it.
        optimizer = self._fused if self._fused is not None else self._inner
        return self._changes.step(optimizer.step, closure, is_known(self._inner))

    def _bring_up_to_date(self) -> None:
        if self._changes.salvage is not None:
            self._changes.salvage.check()
        else:
            if self._context.size > 1:
                self._check_whole()
            self._drain()

    def _guard(self, message: str, reducer: Reducer | None) -> None:
        """After a fault: nobody reads parameters until it is decided what they are."""
        self._on_device = reducer is not None and reducer.device.core is not None
        self._changes.fail(message, self._params, partial(self._clean_up, reducer))

    def _clean_up(self, reducer: Reducer | None, completes: bool) -> None:
        """When somebody goes on from what is left."""
        if completes and reducer is not None:
            reducer.stop_waiting()
            with self._changes.updating_after_fault():
                self._updates.apply(range(len(self._params)), reducer)
        self._give_up()

    def _give_up(self) -> None:
        """Forgets the updates that are pending, as those of a run that has failed."""
        self._changes.forget()
        self._updates.forget()

    def _needs_whole_step(self) -> bool:
        """True if step hooks or a GradScaler want to see this step as a whole."""
        return getattr(self._inner, "found_inf", None) is not None or has_step_hooks(self._inner)

    def _step_now(self, closure: Callable[[], float] | None) -> float | None:
        args = () if closure is None else (closure,)
        if self._overlap == "backward" or self._reducer is None:
            return self._take_step(*args)
        self._in_step = True
        try:
            if self._learned:
                return self._take_step(*args)
            with self._watch.groups(self._overlap == "forward"):
                return self._take_step(*args)
        finally:
            self._in_step = False

    def _check_whole(self) -> None:
        if self._changes.torn:
            raise Error(
                f"a step of the wrapped optimizer ended half-way ({self._changes.torn}), so that "
                "parameters are not those of any step; restart the job from its last checkpoint"
            )

    def _check_usable(self) -> None:
        if self._context.size == 1:
            return
        if self._closed:
            raise UsageError("this DistributedOptimizer is closed; wrap the optimizer anew")
        if self._reducer is not None:
            self._reducer.check()
        self._check_whole()
        if self._reducer is not None and self._reducer.in_backward:
            raise Error(
                "the last backward() did not end, so the other ranks wait for its gradients in "
                "vain; restart the job from its last checkpoint"
            )
        for param in self._frozen:
            if param.requires_grad:
                raise UsageError(
                    f"a parameter of shape {tuple(param.shape)} was frozen when the optimizer was "
                    "wrapped and is not any more; wrap the optimizer anew after unfreezing"
                )

    def _sharded_step(self, shards: ShardedUpdates, reducer: Reducer) -> None:
        if self._needs_whole_step():
            raise UsageError(
                "shard_optimizer=True does not work with GradScaler or step hooks; leave it out"
            )
        if not reducer.in_flight:
            if shards.spent:
                raise UsageError(
                    "step() again without backward(): with shard_optimizer=True a step uses its "
                    "gradients up; call backward() before the next one"
                )
            return
        with self._changes.applying():
            shards.step()
        self._changes.put_off()
        self._watch.step_ends()
        self._apply(self._ungated)
        if reducer.plan_ends:
            self._apply_all()
            self._end_sharding()
            reducer.finish_step(reducer.device.now())
            if reducer.learning:
                self._learned = False
                self._zero_spent(shards.used)
            else:
                self._begin_sharding(reducer).used = shards.used

    def _begin_sharding(self, reducer: Reducer) -> ShardedUpdates:
        self._shards = ShardedUpdates(
            self._context,
            self.label,
            self._inner,
            self._params,
            self._group_of,
            reducer,
            self._max_grad_norm,
            self._fetch_param,
            self._take_step,
        )
        return self._shards

    def _zero_spent(self, used: Sequence[bool]) -> None:
        """Resets gradients that a sharded step has used up, as the user last did."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters are held, and may stay so
            for param, was_used in zip(self._params, used, strict=True):
                param.grad = None if self._set_to_none or not was_used else torch.zeros_like(param)

    def _end_sharding(self) -> None:
        if self._shards is not None:
            self._shards.uncut()
            self._shards = None

    def _on_learned(self) -> None:
        """All ranks are about to plan: they agree on the overlap first."""
        assert self._gates is not None
        assert self._planner is not None
        self._ungated = sorted(self._gates.finish_learning())
        if self._overlap == "auto":
            reason = self._watch.reason(self._gates, self._ungated, self._shared)
            self._planner.settle_overlap(agree(self._context, self.label, reason))

    def _finish_learning(self) -> None:
        assert self._reducer is not None
        assert self._planner is not None
        if self._sharded:
            self._begin_sharding(self._reducer)
        elif self._planner.overlap == "forward":
            log.info(
                "%s: updates wait for the next forward pass, except %d whose use was not seen",
                self.label,
                len(self._ungated),
            )
        self._learned = True

    @property
    def _defers(self) -> bool:
        """Updates wait for the next forward pass, under the plan in force."""
        if not self._learned or self._overlap == "backward":
            return False
        decision = self.decision
        return decision is not None and decision.overlap == "forward"

    def _on_root(self, trains: bool) -> None:
        # Evaluation may take other paths through the model than those that were learned, and a
        # second forward pass before step() leads to a second backward pass.
        assert self._reducer is not None
        self._note_use(0)
        if not trains or (self._reducer.in_flight and self._shards is None):
            self._drain()

    def _on_param_read(self, i: int, param: torch.Tensor) -> None:
        self._on_use([i])
        release(param)

    def _on_use(self, indices: Sequence[int]) -> None:
        self._note_use(indices[0])
        self._apply(indices)

    def _note_use(self, i: int) -> None:
        pending = self._shards.count if self._shards is not None else self._updates.count
        if pending or not self._learned:
            self._watch.used(i)

    def _check_threads(self, reducer: Reducer) -> None:
        """Whether others than the calling thread, which trains, have used parameters."""
        name = self._watch.finds_threads()
        self._shared = self._shared or name
        if not name or not self._defers:
            return
        if self._overlap == "auto":
            reducer.ask_for_plan()
        if not self._told_of_threads:
            self._told_of_threads = True
            log.warning(
                "%s: another thread than the one that trains has used '%s' while updates wait for "
                "the forward pass, so that either may see a parameter in the middle of its update: "
                "call optimizer.drain() after step(), before others use parameters, and let them "
                "be done before the next step()",
                self.label,
                name,
            )

    def _on_gradient_read(self, i: int, grad: torch.Tensor) -> None:
        reducer = self._reducer
        if reducer is not None and reducer.in_flight:
            self._drain()
        elif self._updates.pending[i]:
            self._apply([i])
        elif not self._learned and not self._in_step:
            self._watch.gradient_read(i)
        release(grad)

    def _before_first_gradient(self, i: int) -> None:
        # Layers that the forward pass skipped have not asked for their updates. If one of them gets
        # a gradient all the same, it was read past its gate.
        if self._gates is not None:
            self._gates.rest()
        self._check_whole()
        updates = self._shards or self._updates
        self._late = list(updates.pending) if updates.count else []
        self._on_gradient(i)
        self._apply_all()
        self._watch.up_to_date()

    def _on_gradient(self, i: int) -> None:
        if self._late and self._late[i]:
            assert self._reducer is not None
            raise Error(
                f"parameter '{self._reducer.names[i]}' was used in the forward pass before its "
                "update had been applied, in a way that the first steps did not show; use "
                'overlap="backward", or call optimizer.synchronize() before the forward pass'
            )

    def _on_backward_end(self) -> None:
        assert self._reducer is not None
        self._late = []
        defers = self._defers and not self._in_step
        if not defers:
            self._reducer.settle()
            self._watch.backward()
        if defers or not (self._learned or self._in_step or self._overlap == "backward"):
            self._reducer.hold_gradients(self._fetch_gradient)

    def _apply(self, indices: Sequence[int]) -> None:
        if self._shards is not None:
            with self._changes.applying():
                self._shards.arrive(indices)
                self._changes.count_applied(self._shards.count)
        elif self._reducer is not None and (self._updates.count or self._changes.elsewhere):
            with self._changes.applying():
                self._updates.apply(indices, self._reducer)
                self._changes.count_applied(self._updates.count)

    def _apply_all(self) -> None:
        self._apply(range(len(self._params)))

"""DasoOptimizer: gradients averaged inside a node, parameters exchanged between nodes, late."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import Error, MismatchError, UsageError
from usbyte.planning import tuning
from usbyte.torch.comm.axis_groups import axis_groups, host_topology
from usbyte.torch.comm.topology import sizes_of
from usbyte.torch.daso.flat_params import ParameterVectors
from usbyte.torch.daso.node_averager import NodeAverager, NodeExchange
from usbyte.torch.daso.schedule import DasoSchedule, Phase, Start
from usbyte.torch.fault.recovery import RankProgress
from usbyte.torch.optimizer.config import integer
from usbyte.torch.optimizer.distributed_optimizer import DistributedOptimizer
from usbyte.torch.optimizer.param_groups import ParamGroupIndex
from usbyte.torch.runtime.torch_modes import outside_inference_mode
from usbyte.torch.world.consistency import difference_of
from usbyte.torch.world.rank_group import RankGroup
from usbyte.torch.world.subgroup import subgroup_of
from usbyte.torch.world.world import current

__all__ = ["DasoOptimizer"]

log = logging.getLogger("usbyte")

#: Under which a state_dict holds what is DASO's own.
STATE = "usbyte.daso"


@dataclass
class _InFlight:
    """An exchange whose result is not used yet.

    Attributes:
        exchange: What to wait for; None if the vectors hold the sums.
        wait: S, batches from its begin to its use.
        left: Of those, batches still to come.
    """

    exchange: NodeAverager | None
    wait: int
    left: int


class DasoOptimizer(DistributedOptimizer):
    """Trains with DASO, which is another algorithm than synchronous SGD: a node learns late.

    Ranks of a node average their gradients in every step, during backward, as those of a
    `DistributedOptimizer` do, and so have the same parameters bit for bit. Nodes have different
    ones for most of the time: every B batches the ranks of one local index, each time another,
    begin to add up the *parameters* of their nodes, and S batches later each node takes
    x <- (2 S x + sum) / (2 S + P), where P is the number of nodes and the sum has their parameters
    of S batches ago, its own among them. The network between nodes has S batches' time for that,
    and moves the parameters once in B batches. What a node learns from others is stale, the batch
    that an update sees is that of one node, and a merge undoes P / (2 S + P) of what the node has
    learned in those S batches: the result is not that of synchronous training. docs/daso.md has
    measurements.

    The first and the last epochs, warm-up and cool-down, are synchronous: after each batch all
    ranks wait for the average of the nodes' parameters (S = 0 above), as in the authors'
    implementation. With an optimizer that is linear in the gradients, as SGD with momentum, this is
    synchronous SGD but for rounding; with Adam it is not quite, as each node normalizes by its own
    gradients. When the loss is stable, B and S are halved, down to 1; once they are, and the loss
    is stable again, they start anew. `end_epoch` has to be called after each epoch for all of that.

    Coquelin et al., "Accelerating neural network training with distributed asynchronous and
    selective optimization (DASO)", J. Big Data 9 (2022), arXiv 2104.05588. Where that leaves things
    open, or this differs: local indices take turns by the number of the exchange, those of warm-up
    and cool-down included; the ranks' losses are averaged to judge them, and an epoch counts as
    improved if its loss is below the best one so far, warm-up included, by more than `stability`;
    an exchange begins only once the one before has been used, and one in flight keeps its S; at the
    begin of the cool-down it is used at once; parameters travel in float32 (float64 as such), not
    cast to 16 bits as in the authors' implementation; inside a node the sums are sent on as soon as
    they are there, in place of merged parameters when they are due, to the same result. B and S are
    8 and a quarter of B by default, and losses judged, as in that implementation.

    State of the optimizer (momenta) is each node's own and never averaged. Buffers (statistics of
    batch norm) are each rank's own, as with `DistributedOptimizer`: before a validation or a
    checkpoint `broadcast_parameters(model.state_dict())` after `synchronize_nodes()` makes them
    alike. Who loads a model while an exchange is in flight loads the optimizer's state with it, or
    the parameters from before are merged into those that were loaded. Parameters on a GPU travel
    between nodes by way of the host, which waits for the copies.

    Args:
        optimizer: The optimizer to wrap. Do not call it directly afterwards.
        named_parameters: `model.named_parameters()`, for names in messages and timelines.
        total_epochs: Of the whole training, which tells when the cool-down begins.
        warmup_epochs: Synchronous epochs at the start.
        cooldown_epochs: Synchronous epochs at the end.
        exchange_every: B at first, batches.
        exchange_wait: S at first, batches, B at most; a quarter of B if left out.
        stability: A loss has improved if it is below the best one by more than this part of it.
        patience: Epochs in a row without improvement after which the loss is stable.
        topology: The network, or its sizes; a node is a line of the innermost dimension. If left
            out, what the launcher says of hosts and their slots.
        policy: How the communication inside a node is planned; see `DistributedOptimizer`. None
            that tries plans by their time; "auto" does not here.
        model: The module that owns the parameters; found at the first forward pass if left out.

    Raises:
        UsageError: Bad arguments on any rank, hosts with different numbers of ranks, a topology of
            another number of ranks.
        MismatchError: Ranks have other arguments, or parameters of other names, shapes or dtypes;
            raised on every rank.
    """

    _exchange: NodeExchange | None = None
    _node: RankGroup | None = None
    _groups: ParamGroupIndex

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        *,
        total_epochs: int,
        warmup_epochs: int = 4,
        cooldown_epochs: int = 4,
        exchange_every: int = 8,
        exchange_wait: int | None = None,
        stability: float = 0.05,
        patience: int = 2,
        topology: _core.Topology | Sequence[int] | None = None,
        policy: str | None = None,
        model: nn.Module | None = None,
    ) -> None:
        rank_group = current()
        policy = policy or rank_group.env.policy or "auto"
        named = None if named_parameters is None else list(named_parameters)
        arguments: dict[str, Any] = {}
        sizes: list[int] | None = None
        problem = ""
        try:
            every = integer("exchange_every", exchange_every)
            wait = max(1, every // 4) if exchange_wait is None else exchange_wait
            arguments = {
                "every": every,
                "wait": integer("exchange_wait", wait),
                "total_epochs": integer("total_epochs", total_epochs),
                "warmup_epochs": integer("warmup_epochs", warmup_epochs),
                "cooldown_epochs": integer("cooldown_epochs", cooldown_epochs),
                "stability": _number("stability", stability),
                "patience": integer("patience", patience),
            }
            sizes = None if topology is None else sizes_of(topology)
            schedule = DasoSchedule(**arguments)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UsageError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}")
            if policy in tuning.TRIED and policy != "auto":
                raise UsageError(f"policy '{policy}' tries plans, which nodes would do unequally")
        except UsageError as error:
            problem = str(error)
        settings = {
            "topology": sizes,
            "policy": policy,
            "USBYTE_BACKEND": rank_group.env.backend,
            "USBYTE_LEARNING_STEPS": rank_group.env.learning_steps,
            "USBYTE_ONE_SHOT_BYTES": rank_group.env.one_shot_bytes,
            "USBYTE_BUCKET_BYTES": rank_group.env.bucket_bytes,
        }
        _check_alike(rank_group, problem, arguments | settings, _specs(optimizer, named))
        sizes = host_topology(rank_group) if sizes is None else sizes
        slots, nodes = sizes[0] if sizes else 1, math.prod(sizes[1:])
        groups = axis_groups(rank_group, [slots, nodes])
        self._schedule = schedule
        self._in_flight: _InFlight | None = None
        self._vectors: ParameterVectors | None = None
        self._in_step_end = False  # the node's own update is done, and the step is not
        self._merging = False  # other nodes' parameters are about to be used
        self._has_settled = False
        self._whole = rank_group
        if groups[1] is not None:
            label = rank_group.next_label()
            first = rank_group.rank - rank_group.rank % slots
            self._node = subgroup_of(rank_group, list(range(first, first + slots)))
            self._exchange = NodeExchange(rank_group, label, groups[0], groups[1], self._node.rank)
            self._exchange.owner = self  # whose thread keeps this until it is closed
        elif rank_group.rank == 0:
            log.warning("DASO: there is one node only, so gradients are averaged and no more")
        try:
            super().__init__(
                optimizer,
                named,
                overlap="backward",
                policy=policy,
                model=model,
                # As parameters do between nodes.
                sparse_as_dense=True,
                tune_steps=0 if policy == "auto" else None,
                ranks=self._node,
            )
        except BaseException:
            self._end_exchange()
            raise
        self._lay_out()

    @property
    def phase(self) -> Phase:
        """Of the batches to come: "warm-up", "cycling" or "cool-down"."""
        return self._schedule.phase

    @property
    def exchange_every(self) -> int:
        """B at present: batches from one exchange to the next in the cycling phase."""
        return self._schedule.every

    @property
    def exchange_wait(self) -> int:
        """S at present: batches after which the result of an exchange is used."""
        return self._schedule.wait

    @property
    def settled(self) -> bool:
        """True once the plan inside the node is made, after as many steps on all nodes."""
        self._has_settled = self._has_settled or super().settled
        return self._has_settled

    # GradScaler then leaves it to `step` what to do about infinite gradients.
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Applies the node's average of the last gradients, then what other nodes have sent.

        Raises:
            FaultError: Communication failed, on any rank.
        """
        self._check_usable()
        if getattr(self._inner, "found_inf", None) is not None:
            raise UsageError(
                "a GradScaler leaves out steps where gradients are infinite, and DASO's nodes have "
                "different ones: use bfloat16, which needs none"
            )
        if self._exchange is not None:  # a node of one rank has nobody else to look
            self._param_table.check_frozen()
            self._groups.refresh()
        result = super().step(closure)
        if self._exchange is None:
            return result
        self._exchange_nodes()
        self._in_step_end = False
        return result

    def _exchange_nodes(self) -> None:
        assert self._exchange is not None
        if self._in_flight is not None:
            self._in_flight.left -= 1
            if self._in_flight.left <= 0:
                self._merge()
        start = self._schedule.end_batch(self._in_flight is not None)
        if start is not None:
            self._begin(start)

    def _on_updated(self) -> None:
        self._in_step_end = self._exchange is not None

    def end_epoch(self, loss: float | torch.Tensor) -> float:
        """Ends an epoch: the next one may belong to another phase, or have other B and S.

        Collective.

        Args:
            loss: This rank's training loss of the epoch.

        Returns:
            The ranks' average.

        Raises:
            Error: The loss of a rank is not finite; raised on every rank.
        """
        self._check_usable()
        own = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        losses: list[float] = self._whole.eager.allgather_json("usbyte.daso.loss", own, float)
        for rank, value in enumerate(losses):
            if not math.isfinite(value):
                raise Error(
                    f"the loss of rank {rank} is {value} in epoch {self._schedule.epoch + 1}: "
                    "go back to a checkpoint, with a smaller learning rate or clipped gradients"
                )
        mean = math.fsum(losses) / len(losses)
        self._schedule.end_epoch(mean)
        if self.phase == "cool-down":
            self._merge()
        return mean

    def synchronize_nodes(self) -> None:
        """Gives all ranks the same parameters: the average of the nodes'. Collective.

        Not needed after a step of the warm-up or of the cool-down. Before a checkpoint that rank 0
        writes for all it is, and at the end of a training without cool-down; `synchronize` is, as
        in `DistributedOptimizer`, about this rank's pending gradients alone.
        """
        self._check_usable()
        self.synchronize()
        if self._exchange is not None:
            self._merge()
            self._begin(self._schedule.start(0))

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with where DASO is, and what is in flight, as `STATE`.

        It waits for an exchange in flight, which is part of it, and changes nothing. Nodes have
        different parameters and optimizer states in the cycling phase: to go on exactly, save and
        load on one rank of each node, or call `synchronize_nodes` first to go on from one.
        """
        self._update_guard.check_whole()
        own: dict[str, Any] = {"schedule": self._schedule.state(), "in_flight": None}
        flight = self._in_flight
        if flight is not None and self._exchange is not None and self._vectors is not None:
            self._arrive(flight)
            own["in_flight"] = {
                "wait": flight.wait,
                "left": flight.left,
                "nodes": self._exchange.size,
                "sums": [vector.clone() for vector in self._vectors.vectors],
            }
        return super().state_dict() | {STATE: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer; without a `STATE` in it DASO starts anew.

        Raises:
            UsageError: An exchange was in flight between another number of nodes, or with other
                parameters.
        """
        own = state_dict.get(STATE)
        flight = own["in_flight"] if own is not None else None
        vectors = self._vectors.vectors if self._vectors is not None else []
        if flight is not None:
            nodes = self._exchange.size if self._exchange is not None else 1
            shapes = [v.shape for v in vectors] if nodes > 1 else []
            if (flight["nodes"], [v.shape for v in flight["sums"]]) != (nodes, shapes):
                raise UsageError(
                    f"this state has an exchange in flight between {flight['nodes']} nodes, and "
                    f"there are {nodes} here, or other parameters: save it after "
                    "synchronize_nodes() to load it elsewhere"
                )
        if self._in_flight is not None:
            self._arrive(self._in_flight)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != STATE})
        self._in_flight = None
        if own is None:
            self._schedule.reset()
            return
        self._schedule.load(own["schedule"])
        if flight is not None:
            for vector, sums in zip(vectors, flight["sums"], strict=True):
                vector.copy_(sums)
            self._in_flight = _InFlight(None, flight["wait"], flight["left"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `DistributedOptimizer`; what is in flight is used first."""
        self._merge()
        super().add_param_group(param_group)
        self._lay_out()

    def __repr__(self) -> str:
        return f"DasoOptimizer({self._inner!r}, phase={self.phase!r})"

    # Used by Context.

    @property
    def sends(self) -> bool:
        """See `DistributedOptimizer`; a node of one rank sends parameters only."""
        return super().sends or (self._exchange is not None and not self._closed)

    def states(self) -> dict[str, dict[str, Any]]:
        """See `DistributedOptimizer`; with the last exchange between nodes that has begun."""
        states = super().states()
        if self._exchange is not None:
            last = self._schedule.exchanges - 1
            states[self._exchange.label] = {"step": last, "phase": "exchange"}
        return states

    def hold(self, message: str) -> None:
        """See `DistributedOptimizer`."""
        super().hold(message)
        alone = self._exchange is not None and self._update_guard.recovery is None  # on its node
        if alone and not self._closed:
            self._update_guard.fail(
                message, self._param_table.params, lambda _: self._update_guard.forget()
            )

    def fail(self, message: str) -> None:
        """See `DistributedOptimizer`."""
        super().fail(message)
        if self._exchange is not None:
            self._exchange.fail(message)

    def left(self) -> RankProgress | None:
        """See `DistributedOptimizer`; a step ends when other nodes' parameters have been used."""
        left = super().left()
        if left is None or not (self._in_step_end or self._merging):
            return left
        return RankProgress(left.completed - self._in_step_end, partial=True, completable=False)

    def close(self, whole_state: bool = True) -> None:
        """Uses what is in flight, unless communication has failed; then ends all threads.

        Collective, in that all ranks must close at the same place. Nodes may be left with different
        parameters: see `synchronize_nodes`.
        """
        try:
            works = self._live is None or self._live.is_healthy
            if self._exchange is not None and not self._exchange.failed and works:
                self._merge()
        finally:
            try:
                super().close(whole_state)
            finally:
                self._end_exchange()

    # Inside.

    def _check_usable(self) -> None:
        self._update_guard.check_whole()
        if self._closed:
            raise UsageError("this DasoOptimizer is closed; wrap the optimizer anew")
        super()._check_usable()

    @outside_inference_mode
    def _lay_out(self) -> None:
        if self._exchange is not None:
            self._vectors = ParameterVectors(self._param_table.params)
            self._groups = ParamGroupIndex(self._inner, self._param_table)

    @torch.no_grad()
    def _begin(self, start: Start) -> None:
        assert self._exchange is not None
        assert self._vectors is not None
        self._vectors.gather()
        exchange = self._exchange.start(self._vectors.vectors, start.number)
        self._in_flight = _InFlight(exchange, start.wait, start.wait)
        if start.wait == 0:
            self._merge()

    def _arrive(self, flight: _InFlight) -> None:
        if flight.exchange is not None:
            assert self._exchange is not None
            self._exchange.wait(flight.exchange)
            flight.exchange = None

    @torch.no_grad()
    def _merge(self) -> None:
        """Uses what is in flight, if anything is."""
        flight = self._in_flight
        if flight is None:
            return
        assert self._exchange is not None
        assert self._vectors is not None
        self._merging = True
        self._arrive(flight)
        self._in_flight = None
        with self._update_guard.updating():
            self._vectors.merge(flight.wait, self._exchange.size)
            self._merging = False

    def _end_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


def _specs(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]] | None
) -> list[list[object]]:
    """What has to be alike on all ranks of each parameter; see `difference_of`."""
    names = {row[1]: row[0] for row in named or [] if isinstance(row, tuple) and len(row) == 2}
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    return [
        [
            names.get(p, f"group{g}.param{i}"),
            list(p.shape),
            list(p.stride()),
            f"{p.dtype} on {p.device.type}",
        ]
        for g, group in enumerate(groups)
        for i, p in enumerate(group["params"])
        if p.requires_grad
    ]


def _number(name: str, given: float) -> float:
    try:
        return float(given + 0)  # texts are none
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"{name} must be a number, not {given!r}") from None


def _check_alike(
    rank_group: RankGroup, problem: str, arguments: dict[str, Any], specs: list[list[object]]
) -> None:
    """Raises on every rank what is wrong on any."""
    mine = [problem, arguments, specs]
    kind = tuple[str, dict[str, Any], list[list[Any]]]
    rows = rank_group.eager.allgather_json("usbyte.daso", mine, kind)
    for rank, (wrong, _, _) in enumerate(rows):
        if wrong:
            raise UsageError(wrong if wrong == problem else f"on rank {rank}: {wrong}")
    for rank, (_, given, _) in enumerate(rows):
        for name, value in given.items():
            if value != rows[0][1].get(name):
                what = f"exchange_{name}" if name in ("every", "wait") else name
                raise MismatchError(
                    f"DasoOptimizer: {what} is {rows[0][1].get(name)} on rank 0 but {value} on "
                    f"rank {rank}. Give all ranks the same arguments and environment."
                )
    if any(row[2] != rows[0][2] for row in rows):
        difference = difference_of([row[2] for row in rows])
        raise MismatchError(f"DasoOptimizer: {difference}. Build the same model on all ranks.")

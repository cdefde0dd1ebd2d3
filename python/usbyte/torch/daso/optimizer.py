# SPDX-License-Identifier: Apache-2.0
"""DasoOptimizer: gradients averaged inside a node, parameters averaged between nodes, late."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import Error, UsageError
from usbyte.planning import tuning
from usbyte.torch.comm.axis_groups import axis_groups, host_topology
from usbyte.torch.comm.topology import sizes_of
from usbyte.torch.daso.flat_params import ParameterVectors
from usbyte.torch.daso.node_averager import NodeAverager, NodeSum
from usbyte.torch.daso.schedule import DasoSchedule, Phase, Start
from usbyte.torch.fault.decision import RankProgress
from usbyte.torch.optimizer.config import integer
from usbyte.torch.optimizer.distributed_optimizer import DistributedOptimizer
from usbyte.torch.optimizer.param_groups import ParamGroupIndex
from usbyte.torch.runtime.torch_modes import outside_inference_mode
from usbyte.torch.world.consistency import (
    digest_of,
    raise_problem,
    verify_same,
    verify_same_params,
)
from usbyte.torch.world.rank_group import RankGroup
from usbyte.torch.world.subgroup import subgroup_of
from usbyte.torch.world.world import current

__all__ = ["DasoOptimizer"]

log = logging.getLogger("usbyte")

#: Key of the state of DASO in a state_dict.
STATE = "usbyte.daso"


@dataclass
class _InFlight:
    """A node averaging whose result has not been used yet.

    Attributes:
        pending: The sum to wait for; None if the vectors hold the sums already.
        wait: S, number of batches from its start to its use.
        left: Batches that remain until its use.
    """

    pending: NodeSum | None
    wait: int
    left: int


class DasoOptimizer(DistributedOptimizer):
    """Trains with DASO, which is not synchronous SGD: nodes get each other's results late.

    The ranks of a node average their gradients in every step, during backward, as with
    `DistributedOptimizer`. Their parameters are thus equal bit for bit. Different nodes have
    different parameters for most of the time. Every B batches the ranks of one local index start to
    sum the *parameters* of all nodes; the local indices take turns. S batches later each node sets
    x <- (2 S x + sum) / (2 S + P). P is the number of nodes. The sum is over the parameters that
    all nodes, this one included, had S batches ago. The network between nodes has the time of S
    batches for that, and carries the parameters only once in B batches. The price: what a node gets
    from others is stale, an update sees the batch of one node only, and a merge undoes P / (2 S +
    P) of what the node has learned in these S batches. The result is not that of synchronous
    training. docs/daso.md has measurements.

    The first epochs (warm-up) and the last (cool-down) are synchronous: after each batch all ranks
    wait for the average of the nodes' parameters (S = 0 above), as in the authors' implementation.
    With an optimizer that is linear in the gradients, such as SGD with momentum, this equals
    synchronous SGD but for rounding. With Adam it does not quite, because each node normalizes by
    its own gradients. When the loss is stable, B and S are halved, down to 1. When both are 1 and
    the loss is stable again, they return to their initial values. Call `end_epoch` after each
    epoch; the phases and these changes depend on it.

    Coquelin et al., "Accelerating neural network training with distributed asynchronous and
    selective optimization (DASO)", J. Big Data 9 (2022), arXiv 2104.05588. Choices where the paper
    is silent, and differences:

    - Local indices take turns by the number of the node averaging; those of warm-up and cool-down
      count too.
    - The losses of all ranks are averaged. An epoch has improved if its loss is below the best one
    so
      far, warm-up included, by more than `stability`.
    - A node averaging starts only after the previous one has been used. One in flight keeps its S.
    At
      the start of the cool-down it is used at once.
    - Parameters are sent in float32, and float64 ones in float64; the authors' implementation casts
    to
      16 bits.
    - Inside a node, the sums are broadcast as soon as they are complete; the authors broadcast
    merged
      parameters when they are due. The result is the same.
    - B = 8, S = B // 4 and the losses as the criterion are the defaults of that implementation.

    The state of the optimizer (momenta) is local to each node and never averaged. Buffers (batch
    norm statistics) are local to each rank, as with `DistributedOptimizer`. Before a validation or
    a checkpoint, call `synchronize_nodes()` and then `broadcast_parameters(model.state_dict())` to
    make both parameters and buffers equal. If you load a model while a node averaging is in flight,
    load the optimizer's state as well; otherwise the old parameters are merged into the loaded
    ones. Parameters on a GPU are copied through host memory, and the host waits for these copies.

    Args:
        optimizer: The optimizer to wrap. Do not call it directly afterwards.
        named_parameters: `model.named_parameters()`, for names in messages and timelines.
        total_epochs: Epochs of the whole training; determines when the cool-down begins.
        warmup_epochs: Synchronous epochs at the start, default 4.
        cooldown_epochs: Synchronous epochs at the end, default 4.
        exchange_every: Initial B, in batches, at least 1, default 8.
        exchange_wait: Initial S, in batches, 1 <= S <= B; default B // 4, at least 1.
        stability: A loss has improved if it is below the best one by more than this fraction of the
            best one; 0 <= stability < 1, default 0.05.
        patience: Consecutive epochs without improvement after which the loss is stable, at least 1,
            default 2.
        topology: The network, or its sizes, innermost first. A node is a mesh axis group of the
            innermost dimension. By default nodes are the hosts that the launcher reports.
        policy: Policy for the communication inside a node, as for `DistributedOptimizer`; default
            "auto", here without trials. Policies that need trials ("tune:...") are refused.
        model: The module that owns the parameters; found in the first forward pass by default.

    Raises:
        UsageError: An argument is out of range on any rank, hosts have different numbers of ranks,
            or the topology has another number of ranks; raised on every rank.
        MismatchError: The ranks have different arguments, or parameters of different names, shapes
            or dtypes; raised on every rank.
    """

    _averager: NodeAverager | None = None
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
                raise UsageError(
                    f"policy '{policy}' tries plans, and nodes would try different ones: use "
                    '"auto" or a policy that tries none'
                )
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
        self._in_step_end = False  # inside step(), after the node's own update
        self._merging = False  # inside _merge(), before the sums have been used
        self._has_settled = False
        self._whole = rank_group
        if groups[1] is not None:
            label = rank_group.next_label()
            first = rank_group.rank - rank_group.rank % slots
            self._node = subgroup_of(rank_group, list(range(first, first + slots)))
            self._averager = NodeAverager(rank_group, label, groups[0], groups[1], self._node.rank)
            self._averager.owner = self  # its thread then keeps this object alive until close()
        elif rank_group.rank == 0:
            log.warning("DASO: there is one node only, so this is synchronous data parallelism")
        try:
            super().__init__(
                optimizer,
                named,
                overlap="backward",
                policy=policy,
                model=model,
                # Parameters travel densely between nodes anyway.
                sparse_as_dense=True,
                tune_steps=0 if policy == "auto" else None,
                ranks=self._node,
            )
        except BaseException:
            self._close_averager()
            raise
        self._lay_out()

    @property
    def phase(self) -> Phase:
        """Phase of the next batch: "warm-up", "cycling" or "cool-down"."""
        return self._schedule.phase

    @property
    def exchange_every(self) -> int:
        """Present B: batches from one node averaging to the next in the cycling phase."""
        return self._schedule.every

    @property
    def exchange_wait(self) -> int:
        """Present S: batches after which the result of a node averaging is used."""
        return self._schedule.wait

    @property
    def settled(self) -> bool:
        """True once the plan inside the node is final; it stays True."""
        self._has_settled = self._has_settled or super().settled
        return self._has_settled

    # With this, GradScaler does not skip step() itself, but passes it `found_inf`.
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Applies the node's average of the last gradients, then merges the sums that are due.

        Args:
            closure: As for `torch.optim.Optimizer.step`.

        Returns:
            The result of `closure`; None without one.

        Raises:
            UsageError: The optimizer is closed, or a GradScaler steps it: use bfloat16.
            FaultError: Communication failed, on any rank.
        """
        self._check_usable()
        if getattr(self._inner, "found_inf", None) is not None:
            raise UsageError(
                "a GradScaler skips steps with infinite gradients, and DASO's nodes have different "
                "gradients: use bfloat16, which needs no GradScaler"
            )
        if self._averager is not None:  # in a node of one rank, nothing else checks this
            self._param_table.check_frozen()
            self._groups.refresh()
        result = super().step(closure)
        if self._averager is None:
            return result
        self._average_nodes()
        self._in_step_end = False
        return result

    def _average_nodes(self) -> None:
        assert self._averager is not None
        if self._in_flight is not None:
            self._in_flight.left -= 1
            if self._in_flight.left <= 0:
                self._merge()
        start = self._schedule.end_batch(self._in_flight is not None)
        if start is not None:
            self._begin(start)

    def _on_updated(self) -> None:
        self._in_step_end = self._averager is not None

    def end_epoch(self, loss: float | torch.Tensor) -> float:
        """Ends an epoch: the next one may have another phase, or other B and S. Collective.

        Args:
            loss: This rank's training loss of the epoch.

        Returns:
            The average over all ranks.

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
        """Gives all ranks the same parameters: the average over the nodes. Collective.

        Call it before rank 0 writes a checkpoint for all ranks, and at the end of a training
        without cool-down. It is not needed after a step of the warm-up or of the cool-down.
        `synchronize`, as in `DistributedOptimizer`, only waits for pending gradients of this rank.

        Raises:
            FaultError: Communication failed, on any rank.
        """
        self._check_usable()
        self.synchronize()
        if self._averager is not None:
            self._merge()
            self._begin(self._schedule.start(0))

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state_dict; the key `usbyte.daso` has the state of DASO.

        It waits for a node averaging in flight, stores its sums, and changes nothing. In the
        cycling phase nodes have different parameters and optimizer states. To resume exactly, save
        and load on one rank of each node. To resume from one file, call `synchronize_nodes` before
        you save.
        """
        self._update_guard.check_whole()
        own: dict[str, Any] = {"schedule": self._schedule.state(), "in_flight": None}
        flight = self._in_flight
        if flight is not None and self._averager is not None and self._vectors is not None:
            self._arrive(flight)
            own["in_flight"] = {
                "wait": flight.wait,
                "left": flight.left,
                "nodes": self._averager.size,
                "sums": [vector.clone() for vector in self._vectors.vectors],
            }
        return super().state_dict() | {STATE: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer. Without the key `usbyte.daso`, DASO starts anew.

        Raises:
            UsageError: A node averaging was in flight between another number of nodes, or with
                other parameters.
        """
        own = state_dict.get(STATE)
        flight = own["in_flight"] if own is not None else None
        vectors = self._vectors.vectors if self._vectors is not None else []
        if flight is not None:
            nodes = self._averager.size if self._averager is not None else 1
            shapes = [v.shape for v in vectors] if nodes > 1 else []
            if (flight["nodes"], [v.shape for v in flight["sums"]]) != (nodes, shapes):
                raise UsageError(
                    f"this state has a node averaging in flight between {flight['nodes']} nodes, "
                    f"and there are {nodes} here, or other parameters: save it after "
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
        """Adds a parameter group, after merging a node averaging in flight. Collective."""
        self._merge()
        super().add_param_group(param_group)
        self._lay_out()

    def __repr__(self) -> str:
        return f"DasoOptimizer({self._inner!r}, phase={self.phase!r})"

    # Used by World.

    @property
    def sends(self) -> bool:
        """Whether other ranks wait for data of this one: gradients, or parameters."""
        return super().sends or (self._averager is not None and not self._closed)

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns progress by label, with that of the last node averaging that has begun."""
        states = super().states()
        if self._averager is not None:
            last = self._schedule.exchanges - 1
            states[self._averager.label] = {"step": last, "phase": "exchange"}
        return states

    def hold(self, message: str) -> None:
        """After a fault: blocks reads of parameters until `settle_fault`."""
        super().hold(message)
        alone = self._averager is not None and self._update_guard.recovery is None
        if alone and not self._closed:
            self._update_guard.fail(
                message, self._param_table.params, lambda _: self._update_guard.forget()
            )

    def fail(self, message: str) -> None:
        """Makes every later wait raise `FaultError(message)`. Call `hold` first."""
        super().fail(message)
        if self._averager is not None:
            self._averager.fail(message)

    def left(self) -> RankProgress | None:
        """Returns this rank's progress after a fault.

        A step is complete only after the sums of other nodes that were due have been merged.
        """
        left = super().left()
        if left is None or not (self._in_step_end or self._merging):
            return left
        return RankProgress(left.completed - self._in_step_end, partial=True, completable=False)

    def close(self, whole_state: bool = True) -> None:
        """Merges a node averaging in flight, unless communication failed; then ends all threads.

        Collective: all ranks must close at the same place. The nodes may have different parameters
        afterwards; call `synchronize_nodes` first to make them equal.
        """
        try:
            works = self._live is None or self._live.is_healthy
            if self._averager is not None and not self._averager.failed and works:
                self._merge()
        finally:
            try:
                super().close(whole_state)
            finally:
                self._close_averager()

    # Private.

    def _check_usable(self) -> None:
        self._update_guard.check_whole()
        if self._closed:
            raise UsageError("this DasoOptimizer is closed; wrap the optimizer anew")
        super()._check_usable()

    @outside_inference_mode
    def _lay_out(self) -> None:
        if self._averager is not None:
            self._vectors = ParameterVectors(self._param_table.params)
            self._groups = ParamGroupIndex(self._inner, self._param_table)

    @torch.no_grad()
    def _begin(self, start: Start) -> None:
        assert self._averager is not None
        assert self._vectors is not None
        self._vectors.gather()
        pending = self._averager.start(self._vectors.vectors, start.number)
        self._in_flight = _InFlight(pending, start.wait, start.wait)
        if start.wait == 0:
            self._merge()

    def _arrive(self, flight: _InFlight) -> None:
        if flight.pending is not None:
            assert self._averager is not None
            self._averager.wait(flight.pending)
            flight.pending = None

    @torch.no_grad()
    def _merge(self) -> None:
        """Waits for the node averaging in flight, if there is one, and merges its sums."""
        flight = self._in_flight
        if flight is None:
            return
        assert self._averager is not None
        assert self._vectors is not None
        self._merging = True
        self._arrive(flight)
        self._in_flight = None
        with self._update_guard.updating():
            self._vectors.merge(flight.wait, self._averager.size)
            self._merging = False

    def _close_averager(self) -> None:
        if self._averager is not None:
            self._averager.close()


def _specs(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]] | None
) -> list[list[object]]:
    """Returns the facts of each parameter that must be equal on all ranks."""
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
        return float(given + 0)  # the sum is an error for a str, which float() would accept
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"{name} must be a number, not {given!r}") from None


def _check_alike(
    rank_group: RankGroup, problem: str, arguments: dict[str, Any], specs: list[list[object]]
) -> None:
    """Raises on every rank the first problem or difference of any rank."""
    label, ranks = "DasoOptimizer", rank_group.ranks
    prefixed = ("every", "wait")
    values = {f"exchange_{k}" if k in prefixed else k: value for k, value in arguments.items()}
    rows = rank_group.eager.allgather_json(
        "usbyte.daso",
        [problem, values, digest_of(specs)],
        tuple[str, dict[str, Any], str],
    )
    raise_problem(ranks, label, [row[0] for row in rows])
    remedy = "Give all ranks the same arguments and environment."
    verify_same(ranks, label, [row[1] for row in rows], remedy)
    verify_same_params(rank_group, label, [row[2] for row in rows], specs)

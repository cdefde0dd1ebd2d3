# SPDX-License-Identifier: Apache-2.0
"""DasoOptimizer: gradients averaged inside a node, parameters averaged between nodes, late."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import Error, UsageError
from usbyte.torch.comm.axis_groups import axis_groups, host_topology
from usbyte.torch.daso.arguments import check_arguments
from usbyte.torch.daso.node_averager import NodeAverager
from usbyte.torch.daso.param_averaging import ParamAveraging, check_loadable
from usbyte.torch.daso.participant import DasoParticipant
from usbyte.torch.daso.schedule import Phase
from usbyte.torch.optimizer.distributed_optimizer import DistributedOptimizer, session_of
from usbyte.torch.optimizer.param_groups import ParamGroupIndex
from usbyte.torch.optimizer.param_owner import retain_owner
from usbyte.torch.optimizer.wrapper import OptimizerWrapper
from usbyte.torch.plan.decision import Decision
from usbyte.torch.world.rank_group import RankGroup
from usbyte.torch.world.subgroup import subgroup_of
from usbyte.torch.world.world import current

__all__ = ["DasoOptimizer"]

log = logging.getLogger("usbyte")

#: Key of the state of DASO in a state_dict.
STATE = "usbyte.daso"


class DasoOptimizer(OptimizerWrapper):
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
      so far, warm-up included, by more than `stability`.
    - A node averaging starts only after the previous one has been used. One in flight keeps its S.
      At the start of the cool-down it is used at once.
    - Parameters are sent in float32, and float64 ones in float64; the authors' implementation casts
      them to 16 bits in warm-up and cool-down.
    - Inside a node, the sums are broadcast as soon as they are complete; the authors broadcast
      merged parameters when they are due. The result is the same.
    - B = 8, S = B // 4 and the losses as the criterion are the defaults of that implementation. It
      begins with B = 4 and S = 1, waits for an exchange at the end of each epoch, and may skip
      averages inside a node; docs/daso.md has the whole list.

    The object wraps a `DistributedOptimizer` of the node's ranks, which wraps `optimizer`. Members
    that DASO does not change are those of the `DistributedOptimizer`.

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

    _inner: DistributedOptimizer
    _groups: ParamGroupIndex
    _participant: DasoParticipant

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
        policy = _core.policy_name(policy or rank_group.env.policy or "auto")
        named = None if named_parameters is None else list(named_parameters)
        self._schedule, sizes = check_arguments(
            rank_group,
            optimizer,
            named,
            policy,
            topology,
            exchange_every,
            exchange_wait,
            stability,
            total_epochs=total_epochs,
            warmup_epochs=warmup_epochs,
            cooldown_epochs=cooldown_epochs,
            patience=patience,
        )
        sizes = host_topology(rank_group) if sizes is None else sizes
        slots, nodes = sizes[0] if sizes else 1, math.prod(sizes[1:])
        groups = axis_groups(rank_group, [slots, nodes])
        self._whole = rank_group
        self._has_settled = False
        node_group: RankGroup = rank_group
        averager = None
        if groups[1] is not None:
            label = rank_group.next_label()
            first = rank_group.rank - rank_group.rank % slots
            node_group = subgroup_of(rank_group, list(range(first, first + slots)))
            averager = NodeAverager(rank_group, label, groups[0], groups[1], node_group.rank)
            averager.owner = self  # its thread then keeps this object alive until close()
        elif rank_group.rank == 0:
            log.warning("DASO: there is one node only, so this is synchronous data parallelism")
        try:
            node_optimizer = DistributedOptimizer(
                optimizer,
                named,
                overlap="backward",
                policy=policy,
                model=model,
                # Parameters travel densely between nodes anyway.
                sparse_as_dense=True,
                tune_steps=0 if policy == "auto" else None,
                ranks=node_group,
            )
        except BaseException:
            if averager is not None:
                averager.close()
            raise
        self._session = session_of(node_optimizer)
        self._averaging: ParamAveraging | None = None
        if averager is not None:
            guard = self._session.update_guard
            self._averaging = ParamAveraging(averager, self._schedule, guard)
        self._participant = DasoParticipant(self._session, self, self._averaging)
        self._inner = node_optimizer  # from now on, undeclared attributes go to it
        self._lay_out()
        rank_group.add(self._participant)

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
    def plan(self) -> _core.Plan | None:
        """The plan in force inside the node; None in a node of one rank."""
        return self._inner.plan

    @property
    def decision(self) -> Decision | None:
        """The plan with the profile and network model it was made from; None until it is made."""
        return self._inner.decision

    @property
    def settled(self) -> bool:
        """True once the plan inside the node is final; it stays True."""
        self._has_settled = self._has_settled or self._inner.settled
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
        if self._averaging is not None:  # in a node of one rank, nothing else checks this
            self._session.param_table.check_frozen()
            self._groups.refresh()
        result = self._inner.step(closure)
        if self._averaging is not None:
            self._averaging.end_batch()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients, as `torch.optim.Optimizer.zero_grad` does."""
        self._check_usable()
        self._inner.zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Waits until this rank's gradients are final, as in `DistributedOptimizer`."""
        self._inner.synchronize()

    def flush_accumulated(self) -> None:
        """Sends the gradients that this rank has accumulated. Collective inside the node."""
        self._check_usable()
        self._inner.flush_accumulated()

    def drain(self) -> None:
        """Waits for gradients in flight. Sends nothing."""
        self._inner.drain()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Does nothing. Horovod needs it around `step()` after `synchronize()`."""
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes accumulate on this rank; the next one outside sends the sum."""
        self._check_usable()
        with self._inner.no_sync():
            yield

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
        if self.phase == "cool-down" and self._averaging is not None:
            self._averaging.merge()
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
        if self._averaging is not None:
            self._averaging.merge()
            self._averaging.begin(self._schedule.start(0))

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state_dict; the key `usbyte.daso` has the state of DASO.

        It waits for a node averaging in flight, stores its sums, and changes nothing. In the
        cycling phase nodes have different parameters and optimizer states. To resume exactly, save
        and load on one rank of each node. To resume from one file, call `synchronize_nodes` before
        you save.
        """
        self._session.update_guard.check_consistent()
        in_flight = self._averaging.state() if self._averaging is not None else None
        own = {"schedule": self._schedule.state(), "in_flight": in_flight}
        return self._inner.state_dict() | {STATE: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer. Without the key `usbyte.daso`, DASO starts anew.

        Raises:
            UsageError: A node averaging was in flight between another number of nodes, or with
                other parameters.
        """
        own, averaging = state_dict.get(STATE), self._averaging
        in_flight = own["in_flight"] if own is not None else None
        if in_flight is not None:
            nodes, shapes = (averaging.averager.size, averaging.shapes) if averaging else (1, [])
            check_loadable(in_flight, nodes, shapes)
        if averaging is not None:
            averaging.wait()
        self._inner.load_state_dict({k: v for k, v in state_dict.items() if k != STATE})
        if averaging is not None:
            averaging.load(in_flight)
        if own is None:
            self._schedule.reset()
        else:
            self._schedule.load(own["schedule"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, after merging a node averaging in flight. Collective."""
        if self._averaging is not None:
            self._averaging.merge()
        self._inner.add_param_group(param_group)
        self._lay_out()

    def close(self, whole_state: bool = True) -> None:
        """Merges a node averaging in flight, unless communication failed; then ends all threads.

        Collective: all ranks must close at the same place. The nodes may have different parameters
        afterwards; call `synchronize_nodes` first to make them equal.
        """
        self._participant.close(whole_state)

    def __repr__(self) -> str:
        return f"DasoOptimizer({self._inner._inner!r}, phase={self.phase!r})"

    def _check_usable(self) -> None:
        self._session.update_guard.check_consistent()
        if self._session.closed:
            raise UsageError("this DasoOptimizer is closed; wrap the optimizer again")
        self._session.check_usable()

    def _lay_out(self) -> None:
        param_table = self._session.param_table
        if self._session.live is not None:
            retain_owner(self, param_table.params)  # which keep the optimizer inside alive
        if self._averaging is not None:
            self._averaging.lay_out(param_table.params)
            self._groups = ParamGroupIndex(self._inner._inner, param_table)

# SPDX-License-Identifier: Apache-2.0
"""Observes in the first steps whether a script's updates can be deferred to the next forward."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from usbyte.errors import UsageError
from usbyte.torch.optimizer.compat.known_optimizers import is_known, step_is_replaced
from usbyte.torch.optimizer.hyperparam_snapshot import check_groups_unchanged
from usbyte.torch.optimizer.overlap.forward_hooks import ForwardPreHooks
from usbyte.torch.torch_private import backward_id, keeps_graph
from usbyte.torch.world.rank_group import RankGroup


@dataclass
class _Seen:
    """What the learning steps have shown.

    Attributes:
        steps: Number of steps.
        closures: Number of steps with a closure.
        wholes: Number of steps that must update all parameters at once.
        repeated: Number of steps before which several backward passes sent gradients.
        with_reads: Number of steps before which a gradient was read.
        first_read: Smallest index of a parameter whose gradient was read before the last such step.
        changed: Name of a hyper-parameter that the optimizer's step changes; empty if there is
            none.
        backwards: Number of backward passes since the last step.
        most_forwards: Largest number of forward passes in one step.
        retained: Whether a backward pass retained its graph for another one.
        reads: Indices of the parameters whose gradients were read since the last step.
    """

    steps: int = 0
    closures: int = 0
    wholes: int = 0
    repeated: int = 0
    with_reads: int = 0
    first_read: int = 0
    changed: str = ""
    backwards: int = 0
    most_forwards: int = 0
    retained: bool = False
    reads: set[int] = field(default_factory=set)


class ScriptObserver:
    """Records what a script does between `backward()`, `step()` and the next forward pass.

    Deferred updates are correct in any script, because lazy tensors materialize before they are
    read. An early read leaves no computation behind which communication can hide, however. An
    optimizer that computes across parameters must not be called layer by layer; only the optimizers
    of torch.optim are known not to do so.

    Args:
        optimizer: The wrapped optimizer.
        names: Names of its parameters, by parameter index.
        params: Its parameters, by parameter index.

    Attributes:
        users: By thread that has used parameters since the last step, the first that it used.
        in_step: Whether the wrapped optimizer's step, with its closure, runs. The owner sets it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Sequence[str], params: Sequence[nn.Parameter]
    ) -> None:
        self._optimizer, self._names = optimizer, names
        self._bytes = [p.numel() * p.element_size() for p in params]
        self._seen = _Seen()
        self.in_step = False
        self._trainer: int | None = None  # thread of the last step, until updates are applied
        self.users: dict[int, int] = {}
        self._forwards = 0  # training passes of outermost modules since the last step
        self._retains = False  # whether the current backward pass retains its graph

    def begin(self) -> None:
        """Discards the records, at the start of new learning steps."""
        self._seen = _Seen()

    def backward(self) -> None:
        """Counts a backward pass whose reduced gradients have been waited for."""
        self._seen.backwards += 1

    def forward(self) -> None:
        """Counts a training forward pass of an outermost module."""
        self._forwards += 1

    def backward_begins(self, learns: bool) -> None:
        """Records whether the current backward pass retains its graph. Called inside `backward()`.

        Args:
            learns: Whether this is a learning step.
        """
        self._retains = keeps_graph()
        self._seen.retained = self._seen.retained or (learns and self._retains)

    def expects_another_pass(self) -> bool:
        """Returns whether another backward pass may precede `step()`, unlike in learning steps.

        Such a pass would add to gradients in flight.
        """
        many = self._forwards > self._seen.most_forwards
        return many or (self._retains and not self._seen.retained)

    def gradient_read(self, i: int) -> None:
        """Records that the gradient of parameter `i` was read between `backward()` and `step()`."""
        self._seen.reads.add(i)

    def used(self, i: int) -> None:
        """Records that this thread uses parameter `i`, whose update is or might be deferred.

        A thread that is in `users` need not call it.
        """
        # Uses in a backward pass do not count: the training thread waits for autograd's threads.
        if self._trainer is not None and backward_id() == -1:
            self.users.setdefault(threading.get_ident(), i)

    def up_to_date(self) -> None:
        """Records that no update is pending any more.

        Only calls in the training thread or inside a backward pass count.
        """
        here, in_backward = threading.get_ident(), backward_id() != -1
        if in_backward:  # on the CPU, backward runs in the thread that ran the forward pass
            self.users.pop(here, None)
        if in_backward or here == self._trainer:
            self._trainer = None

    def finds_threads(self) -> str:
        """Returns whether other threads have used parameters. Called at the beginning of each step.

        Returns:
            Name of a parameter that another thread than the calling one has used since the last
            step, while updates were or might have been deferred; empty if there is none.
        """
        users, self.users = self.users, {}
        users.pop(threading.get_ident(), None)
        return self._names[min(users.values())] if users else ""

    def step_ends(self) -> None:
        """Records the calling thread as the training thread, at the end of a step."""
        self._trainer = threading.get_ident()
        self._forwards = 0

    def step(self, closure: bool, whole: bool, learns: bool) -> None:
        """Records a call of `step()` that updates all parameters at once.

        Args:
            closure: Whether it has a closure.
            whole: Whether step hooks, a GradScaler or the optimizer need all parameters updated at
                once.
            learns: Whether this is a learning step.
        """
        seen = self._seen
        seen.steps += 1
        seen.closures += closure
        seen.wholes += whole
        seen.repeated += seen.backwards > 1
        if seen.reads:
            seen.with_reads += 1
            seen.first_read = min(seen.reads)
        seen.backwards, seen.reads = 0, set()
        if learns:
            seen.most_forwards = max(seen.most_forwards, self._forwards)

    @contextmanager
    def groups(self, strict: bool) -> Iterator[None]:
        """Context for the optimizer's step: records whether it changes its hyper-parameters.

        Args:
            strict: Whether a change is an error.

        Raises:
            UsageError: The step changed a hyper-parameter, and `strict` is True.
        """
        with check_groups_unchanged(self._optimizer) as changed:
            yield
        if changed and strict:
            raise UsageError(
                f"{type(self._optimizer).__name__}.step() changes its group's '{changed[0]}', so "
                'it cannot be applied layer by layer; use overlap="backward"'
            )
        self._seen.changed = next(iter(changed), self._seen.changed)

    def reason(
        self,
        forward_hooks: ForwardPreHooks,
        unhooked: Sequence[int],
        aliased: Sequence[int],
        shared: str,
        against: str,
    ) -> str:
        """Returns the reason against deferred updates; empty if there is none.

        Args:
            forward_hooks: Forward pre-hooks of the learning steps.
            unhooked: Parameters whose use no forward pre-hook observed.
            aliased: Parameters whose memory other tensors of the script use.
            shared: Name of a parameter that another thread has used; empty if there is none.
            against: Reason that was found after the learning steps; empty if there is none.
        """
        reasons = list(self._reasons(forward_hooks, unhooked, shared))
        if 2 * sum(self._bytes[i] for i in aliased) > sum(self._bytes):
            reasons.append(
                "the script keeps tensors that share memory with parameters, for example with "
                f"'{self._names[aliased[0]]}', as a state_dict() does"
            )
        if against:
            reasons.append(against)
        return "; ".join(reasons)

    def _reasons(
        self, forward_hooks: ForwardPreHooks, unhooked: Sequence[int], shared: str
    ) -> Iterator[str]:
        kind, seen = type(self._optimizer), self._seen
        if step_is_replaced(self._optimizer):
            yield (
                f"{kind.__name__}.step() was replaced by another function, which may combine "
                "parameters"
            )
        elif not is_known(self._optimizer):
            yield (
                f"{kind.__name__} is not one of torch's own optimizers and may combine "
                'parameters; if it does not, set overlap="forward"'
            )
        if seen.closures:
            yield f"{kind.__name__} may call the closure of its step() several times"
        if seen.changed:
            yield f"{kind.__name__}.step() changes its group's '{seen.changed}'"
        if seen.wholes:
            yield (
                "step hooks, a GradScaler, another step(), or Adafactor for parameters of several "
                "dtypes, need each step as a whole"
            )
        if seen.repeated:
            yield "several backward passes sent gradients before one step()"
        if seen.with_reads and 2 * seen.with_reads >= seen.steps:
            yield (
                "gradients are read between backward() and step(), for example that of "
                f"'{self._names[seen.first_read]}'"
            )
        whole = sum(self._bytes)
        early = [2 * n > forward_hooks.iterations for n in forward_hooks.read_early]
        read = [i for i, is_early in enumerate(early) if is_early]
        if 2 * sum(self._bytes[i] for i in read) > whole:
            yield (
                "parameters are read between step() and the forward pass, for example "
                f"'{self._names[read[0]]}'"
            )
        if shared:
            yield (
                f"a thread other than the training thread uses parameters, for example '{shared}'"
            )
        if 2 * sum(self._bytes[i] for i in unhooked) > whole:
            yield (
                "the use of parameters was not observed, as in compiled code, for example of "
                f"'{self._names[unhooked[0]]}'"
            )


def agree_on_overlap(rank_group: RankGroup, label: str, reason: str) -> str:
    """Returns the reason of the first rank that has one; empty if no rank has one. Collective.

    The result is the same on all ranks. It names the rank if the ranks have different reasons.
    """
    reasons: list[str] = rank_group.eager.allgather_json(f"{label}.overlap", reason, str)
    for rank, each in enumerate(reasons):
        if each:
            alike = all(other == each for other in reasons)
            return each if alike else f"{each} (on rank {rank})"
    return ""

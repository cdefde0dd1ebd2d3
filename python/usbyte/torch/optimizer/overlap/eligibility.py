# SPDX-License-Identifier: Apache-2.0
"""Whether updates may wait for the next forward pass: what the first steps show against it."""

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
    """Counts of steps, of those in which it happened, and of what is open."""

    steps: int = 0
    closures: int = 0
    wholes: int = 0
    repeated: int = 0  # several backward passes were sent
    with_reads: int = 0  # of gradients
    first_read: int = 0
    changed: str = ""  # in the optimizer's groups
    backwards: int = 0  # since the last step
    most_forwards: int = 0  # in a step
    retained: bool = False  # a graph was kept for another backward pass
    reads: set[int] = field(default_factory=set)  # since the last backward pass


class ScriptObserver:
    """Notes what a script does between `backward()`, `step()` and the next forward pass.

    Deferred updates are right whatever it does, as who reads a gradient or a parameter gets it
    fetched first. But then there is nothing to hide communication behind; and an optimizer that
    looks across parameters must not be called layer by layer, which only the known ones are known
    not to do.

    Args:
        optimizer: The wrapped one.
        names: Of its parameters.
        params: Those.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Sequence[str], params: Sequence[nn.Parameter]
    ) -> None:
        self._optimizer, self._names = optimizer, names
        self._bytes = [p.numel() * p.element_size() for p in params]
        self._seen = _Seen()
        self._trainer: int | None = None  # the thread that took the last step, while it matters
        self._users: dict[int, int] = {}  # threads since then, with the first parameter of each
        self._forwards = 0  # passes of outermost modules since the last step
        self._retains = False  # the present backward pass keeps its graph

    def begin(self) -> None:
        """Learning begins anew."""
        self._seen = _Seen()

    def backward(self) -> None:
        """A backward pass has ended, with sums that were waited for."""
        self._seen.backwards += 1

    def forward(self) -> None:
        """An outermost module begins a forward pass that a backward pass can follow."""
        self._forwards += 1

    def backward_begins(self, learns: bool) -> None:
        """Called inside `backward()`; the job is being learned, or not."""
        self._retains = keeps_graph()
        self._seen.retained = self._seen.retained or (learns and self._retains)

    def expects_another_pass(self) -> bool:
        """Whether another backward pass may come before `step()`, as none did while learning.

        It would add to gradients while they are on their way.
        """
        many = self._forwards > self._seen.most_forwards
        return many or (self._retains and not self._seen.retained)

    def gradient_read(self, i: int) -> None:
        """Somebody uses a gradient between `backward()` and `step()`."""
        self._seen.reads.add(i)

    def used(self, i: int) -> None:
        """The calling thread is about to use a parameter whose update waits, or might have."""
        # Autograd has threads of its own for backward passes, which the training thread waits for.
        if self._trainer is not None and backward_id() == -1:
            self._users.setdefault(threading.get_ident(), i)

    def up_to_date(self) -> None:
        """Updates do not wait any more; counts in the training thread, or in a backward pass."""
        here, in_backward = threading.get_ident(), backward_id() != -1
        if in_backward:  # on the CPU this is the thread that has run the forward pass, too
            self._users.pop(here, None)
        if in_backward or here == self._trainer:
            self._trainer = None

    def finds_threads(self) -> str:
        """To be called at the beginning of each step.

        Returns:
            Name of a parameter, if other threads than this one have used any since the last step
            while updates waited, or would have; else empty.
        """
        users, self._users = self._users, {}
        users.pop(threading.get_ident(), None)
        return self._names[min(users.values())] if users else ""

    def step_ends(self) -> None:
        """Updates wait from now on, or would."""
        self._trainer = threading.get_ident()
        self._forwards = 0

    def step(self, closure: bool, whole: bool, learns: bool) -> None:
        """`step()` is called, and taken as a whole.

        Args:
            closure: With one.
            whole: Step hooks, a GradScaler or the optimizer want all parameters updated at once.
            learns: The job is being learned.
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
        """Around the optimizer's step, which must not change its groups.

        Raises:
            UsageError: It does, if `strict`.
        """
        with check_groups_unchanged(self._optimizer) as changed:
            yield
        if changed and strict:
            raise UsageError(
                f"{type(self._optimizer).__name__}.step() changes its group's '{changed[0]}', so "
                'it cannot be applied layer by layer; leave out overlap="forward"'
            )
        self._seen.changed = next(iter(changed), self._seen.changed)

    def reason(
        self,
        forward_hooks: ForwardPreHooks,
        ungated: Sequence[int],
        aliased: Sequence[int],
        shared: str,
        against: str,
    ) -> str:
        """Why updates should not wait for the next forward pass; empty if they may.

        Args:
            forward_hooks: What they have seen.
            ungated: Parameters whose use they have not.
            aliased: Parameters whose memory other tensors of the script's show.
            shared: Name of a parameter that another thread has used; empty if none has.
            against: A reason that was found later; empty if none was.
        """
        reasons = list(self._reasons(forward_hooks, ungated, shared))
        if 2 * sum(self._bytes[i] for i in aliased) > sum(self._bytes):
            reasons.append(
                f"the script keeps other tensors over the memory of '{self._names[aliased[0]]}', "
                "and more, as a state_dict() is"
            )
        if against:
            reasons.append(against)
        return "; ".join(reasons)

    def _reasons(
        self, forward_hooks: ForwardPreHooks, ungated: Sequence[int], shared: str
    ) -> Iterator[str]:
        kind, seen = type(self._optimizer), self._seen
        if step_is_replaced(self._optimizer):
            yield (
                f"another function was put in the place of {kind.__name__}.step(), which may look "
                "across parameters"
            )
        elif not is_known(self._optimizer):
            yield (
                f"{kind.__name__} is none of torch's own optimizers, and may look across "
                'parameters; if it does not, say overlap="forward"'
            )
        if seen.closures:
            yield f"{kind.__name__} may call the closure of its step() several times"
        if seen.changed:
            yield f"{kind.__name__}.step() changes its group's '{seen.changed}'"
        if seen.wholes:
            yield (
                "step hooks, a GradScaler, another step(), or Adafactor for parameters of several "
                "dtypes, want to see each step as a whole"
            )
        if seen.repeated:
            yield "several backward passes before one step() were sent"
        if seen.with_reads and 2 * seen.with_reads >= seen.steps:
            yield (
                "gradients are used between backward() and step(), that of "
                f"'{self._names[seen.first_read]}' for one"
            )
        whole = sum(self._bytes)
        early = [2 * n > forward_hooks.iterations for n in forward_hooks.read_early]
        read = [i for i, is_early in enumerate(early) if is_early]
        if 2 * sum(self._bytes[i] for i in read) > whole:
            yield (
                f"parameters are read between step() and the forward pass, '{self._names[read[0]]}'"
                " for one"
            )
        if shared:
            yield (
                "parameters are used by another thread than the one that trains, "
                f"'{shared}' for one"
            )
        if 2 * sum(self._bytes[i] for i in ungated) > whole:
            yield (
                f"what uses '{self._names[ungated[0]]}', and more, was not seen to, as in compiled "
                "code"
            )


def agree_on_overlap(rank_group: RankGroup, label: str, reason: str) -> str:
    """The reason of the first rank that has one, the same on all ranks. Collective."""
    reasons: list[str] = rank_group.eager.allgather_json(f"{label}.overlap", reason, str)
    for rank, each in enumerate(reasons):
        if each:
            alike = all(other == each for other in reasons)
            return each if alike else f"{each} (on rank {rank})"
    return ""

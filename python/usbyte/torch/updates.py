"""Updates that wait for the next forward pass and then run layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from usbyte.torch.awaited import Fetch
from usbyte.torch.param_groups import Groups
from usbyte.torch.pending import PendingUpdates
from usbyte.torch.reducer import Reducer
from usbyte.torch.settings import Trained


class DeferredUpdates(PendingUpdates):
    """Applies an optimizer's step to the parameters whose gradients have arrived.

    An update is the optimizer's own `step`, with its groups narrowed to those parameters and with
    groups and hyper-parameters as they were when `defer` was called, whatever a scheduler has done
    since.

    Args:
        optimizer: The wrapped optimizer.
        step: Takes its step.
        tear: Called with the error that ends one half-way.
        trained: Its parameters.
        groups: Where they are in it.
        reducer: Has their gradients.
        fetch: By parameter, what whoever reads it is to call first.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        tear: Callable[[BaseException], None],
        trained: Trained,
        groups: Groups,
        reducer: Reducer,
        fetch: Sequence[Fetch],
    ) -> None:
        super().__init__(trained, reducer, fetch)
        self._optimizer, self._step, self._tear = optimizer, step, tear
        self._groups, self._group_of = groups, groups.look_up()
        self._hyper: list[dict[str, Any]] = []
        # Gradients that the user has zeroed meanwhile, by parameter.
        self._zero_after: dict[int, torch.Tensor] = {}

    def defer(self) -> None:
        """Puts off the update of every parameter."""
        self._group_of = self._groups.look_up()
        self._hyper = [hyper_parameters(group) for group in self._optimizer.param_groups]
        self._zero_after.clear()
        self.put_off()

    def zero_grad(self, set_to_none: bool) -> None:
        """Resets the gradients that the user sees; pending updates still get theirs."""
        self._come_behind(range(len(self._params)))
        with torch._C.DisableTorchFunctionSubclass():  # parameters are held
            for i, param in enumerate(self._params):
                if set_to_none:
                    param.grad = None
                elif param.grad is None:
                    continue
                elif i in self.pending:
                    self._zero_after[i] = param.grad
                else:
                    param.grad.zero_()

    def _apply(self, due: Sequence[int]) -> None:
        reducer = self._reducer
        wanted = self._with_alike(due)
        sums = {i: reducer.wait(i) for i in wanted}
        sums |= {i: reducer.sum(i) for i in self._arrived_with(wanted)}
        updated = self._begin(list(sums))
        if not updated:
            return
        kept: list[torch.Tensor | None] = []
        begun = False
        try:
            start = reducer.begin_update()
            kept = [self._params[i].grad for i in updated]
            for i in updated:
                self._params[i].grad = sums[i]
            with self._narrowed(updated):
                begun = True
                self._step()
        except BaseException as error:
            if begun:
                self._tear(error)
            else:
                self._put_back(updated)
            raise
        finally:
            for i, before in zip(updated, kept, strict=False):  # an interrupt may leave none
                if begun and before is not None and before is self._zero_after.get(i):
                    before.zero_()
                nobody = begun and sums[i] is None and before is reducer.gradient(i)
                self._params[i].grad = None if nobody else before
        self._end(updated, due)
        reducer.record_update(updated, start)

    @contextmanager
    def _narrowed(self, due: Sequence[int]) -> Iterator[None]:
        groups: dict[int, list[nn.Parameter]] = {}
        for i in due:
            if (g := self._group_of[i]) is not None:
                groups.setdefault(g, []).append(self._params[i])
        everything = self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**self._hyper[g], "params": params} for g, params in groups.items()
        ]
        try:
            yield
        finally:
            self._optimizer.param_groups = everything


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own, each of which updates every parameter by itself."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step(closure)` is to call the closure and then to take a step."""
    return is_known(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody is called before or after each step of the optimizer."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def mixes_dtypes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the first parameter of a group, by its dtype, decides how others are updated.

    So it does in torch's Adafactor, unless that is told its first epsilon.
    """
    return isinstance(optimizer, getattr(torch.optim, "Adafactor", ())) and any(
        group["eps"][0] is None and len({p.dtype for p in group["params"] if p.requires_grad}) > 1
        for group in optimizer.param_groups
    )


@contextmanager
def check_groups_unchanged(optimizer: torch.optim.Optimizer) -> Iterator[list[str]]:
    """Gives a list, which after the step inside names what it has changed in its groups.

    Narrowing would repeat that.
    """
    before = [hyper_parameters(group) for group in optimizer.param_groups]
    changed: list[str] = []
    yield changed
    for old, group in zip(before, optimizer.param_groups, strict=True):
        changed += [key for key, value in old.items() if not _same(group[key], value)]


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """A group without its parameters, as it is now; schedulers change tensors in place."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)

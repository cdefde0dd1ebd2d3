# SPDX-License-Identifier: Apache-2.0
"""Hooks that record when a training job needs its parameters and has its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.layout import dtype_name
from usbyte.torch.optimizer.overlap.forward_hooks import ForwardPreHooks
from usbyte.torch.plan.measurement import (
    NEVER,
    Iteration,
    StepProfiler,
    job_profile,
    max_over_ranks,
)
from usbyte.torch.reduce_op import Max
from usbyte.torch.runtime.device import Mark, device_of
from usbyte.torch.world.world import current, is_initialized

# Classes are compared by name, because torch has moved them between modules.
_COMMUNICATING = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


_StepHook = Callable[[Optimizer, Any, Any], None]


class Recorder:
    """Records the iterations of a job that does not communicate.

    Hooks only take timestamps; each iteration ends with one wait for the device. An iteration ends
    with the optimizer step after which every gradient has been used by an update, so that several
    optimizers can share a model. With gradient accumulation a gradient is ready when it was last
    accumulated.

    Args:
        params: The parameters to record, on one device, of floating-point dtypes.
        skip: Number of warm-up iterations.
        steps: Number of iterations to record after them.
        model: The module that owns the parameters; None to find it in the first forward pass.
        refuse: Called with the reason if the job cannot be recorded; by default UsageError is
            raised.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        skip: int,
        steps: int,
        model: nn.Module | None = None,
        refuse: Callable[[str], None] | None = None,
    ) -> None:
        self._params = params
        self._refuse = refuse or _raise
        self._index = {p: i for i, p in enumerate(params)}
        names = [f"of shape {tuple(param.shape)}, number {i}" for i, param in enumerate(params)]
        for name, param in zip(names, params, strict=True):
            dtype_name(name, param)
        self._device = device_of(names, params)
        self._wanted = skip + steps
        self._learning = StepProfiler(skip)
        self._forward_hooks = ForwardPreHooks(params, lambda _: None, lambda _: None, self._device)
        self._forward_hooks.install(model)
        self._begin_iteration()
        self._step_began: Mark = 0.0
        self._depth = 0  # of nested step() calls: a subclass's step() calls that of its base class
        self._handles = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in params]
        self._handles.append(register_module_forward_pre_hook(self._refuse_communication))

    def __len__(self) -> int:
        """Returns the number of iterations seen, warm-up included."""
        return len(self._learning)

    @property
    def done(self) -> bool:
        """Whether enough iterations were seen."""
        return len(self) >= self._wanted

    @property
    def unfinished(self) -> int:
        """Number of parameters whose gradients no optimizer step has used yet."""
        return len(self._waiting)

    @property
    def root_modules(self) -> list[nn.Module]:
        """The outermost modules in which parameters were found."""
        return self._forward_hooks.root_modules

    def before_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Optimizer step pre-hook."""
        if self._depth == 0:
            if self._captures("step()"):
                return
            self._forward_hooks.stop_recording()
            self._step_began = self._device.now()
        self._depth += 1

    def after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Optimizer step post-hook, also for optimizers of other parameters."""
        self._depth = max(self._depth - 1, 0)
        if self._depth > 0:
            return
        own = {self._index[p] for p in parameters_of(optimizer) if p in self._index}
        stepped = own & self._waiting
        if not stepped or self.done:
            return
        last = max(stepped, key=self._order.__getitem__)
        self._updates.append((self._step_began, self._ready[last], self._device.now()))
        self._waiting -= own
        if not self._waiting:
            self._end_iteration()

    def close(self) -> None:
        """Removes every hook."""
        self._forward_hooks.close()
        for handle in self._handles:
            handle.remove()

    def profile(self, names: Sequence[str], model: str) -> _core.Profile:
        """Returns the profile; after `init` this is collective and has the slowest rank's times.

        Args:
            names: Names of the parameters, in the order of `params`.
            model: Name of the job.
        """
        times = self._learning.times()
        if is_initialized() and current().size > 1:
            times = max_over_ranks(times, _slowest)
        return job_profile(names, self._params, times, flags=False, model=model)

    def _begin_iteration(self) -> None:
        self._ready: list[Mark] = [NEVER] * len(self._params)
        self._order = [0] * len(self._params)  # rank in the order of gradients, from 1; 0: none yet
        self._gradients = 0
        self._waiting: set[int] = set()  # parameters with a gradient that no update has used
        self._updates: list[tuple[Mark, Mark, Mark]] = []  # begin, last gradient, end

    def _end_iteration(self) -> None:
        used = [order > 0 for order in self._order]
        ready = [float(mark) for mark in self._ready]
        end = max(s for s in ready if s != NEVER)
        # A parameter without a gradient is ready when backward ends.
        ready = [min(s, end) for s in ready]
        # With a closure, backward runs inside step(): the update begins after the last gradient.
        updated_s = sum(float(end) - max(float(a), float(b)) for a, b, end in self._updates)
        self._learning.add(Iteration.of(self._forward_hooks.needed, ready, 0.0, updated_s))
        self._device.anchor()
        self._forward_hooks.begin_iteration(used)
        self._begin_iteration()

    def _refuse_communication(self, module: nn.Module, _args: Any) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            kind = type(module)
            if any(c.__name__ in _COMMUNICATING for c in kind.__mro__):
                self._refuse(
                    f"the job communicates through {kind.__name__}, and its waiting would count as "
                    "compute: profile it as a single process, or with ub.DistributedOptimizer"
                )

    def _captures(self, what: str) -> bool:
        if not self._device.capturing():
            return False
        self._refuse(
            f"the job captures {what} into a CUDA graph, whose replays run no hooks: profile it "
            "without CUDA graphs"
        )
        return True

    def _on_gradient(self, param: nn.Parameter) -> None:
        if self._captures("backward()"):
            return
        i = self._index[param]
        self._ready[i] = self._device.now()
        self._gradients += 1
        self._order[i] = self._gradients
        self._waiting.add(i)


def hook_on_all_steps(before: _StepHook, after: _StepHook) -> list[RemovableHandle]:
    """Registers both hooks for the steps of every optimizer of this process."""
    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the parameters of the optimizer that require gradients."""
    return [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]


def names_of(params: Sequence[nn.Parameter], roots: Iterable[nn.Module]) -> list[str]:
    """Returns a unique name of each parameter: its name in the root module that owns it.

    Where root modules share a name, the class of the root module is put in front. Parameters that
    no root module owns are named `param<i>`.
    """
    found: dict[nn.Parameter, str] = {}
    taken: set[str] = set()
    for root in roots:
        for name, param in root.named_parameters():
            if param in found:
                continue
            if name in taken:
                name = f"{type(root).__name__}.{name}"
            found[param] = _unique(name, taken)
            taken.add(found[param])
    return [found.get(p) or f"param{i}" for i, p in enumerate(params)]


def _unique(name: str, taken: set[str]) -> str:
    k, result = 2, name
    while result in taken:
        k, result = k + 1, f"{name}.{k}"
    return result


def _raise(why: str) -> None:
    raise UsageError(why)


def _slowest(times: torch.Tensor) -> torch.Tensor:
    """Returns the maximum over all ranks. Collective."""
    current().eager.allreduce("usbyte.profile.times", times, Max)
    return times

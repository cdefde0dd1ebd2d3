"""Hooks that record when a training job needs its parameters and has its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
from usbyte.torch.plan.measurement import NEVER, Iteration, StepProfiler, combine, job_profile
from usbyte.torch.reduce_op import Max
from usbyte.torch.runtime.device import Mark, device_of
from usbyte.torch.world.world import current, is_initialized

# By name, since torch has moved them about.
_COMMUNICATING = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


_StepHook = Callable[[Optimizer, Any, Any], None]


class Recorder:
    """Records the iterations of a job that does not communicate.

    Hooks note the time and nothing else; each iteration ends with a wait for the device. It ends
    with the optimizer step after which no gradient is left without an update, so that several
    optimizers may share a model. With gradient accumulation a gradient is ready when it was last
    added to.

    Args:
        params: Those to record, on one device, of floating dtypes.
        skip: Iterations of warm-up.
        steps: Iterations to record after them.
        model: The module that owns them; found at the first forward pass if None.
        refuse: Told why the job cannot be recorded; by default raises UsageError.
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
        self._depth = 0  # of steps in steps: those of a subclass call its base class's
        self._handles = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in params]
        self._handles.append(register_module_forward_pre_hook(self._refuse_communication))

    def __len__(self) -> int:
        """Iterations seen, those of warm-up included."""
        return len(self._learning)

    @property
    def done(self) -> bool:
        """Enough iterations were seen."""
        return len(self) >= self._wanted

    @property
    def unfinished(self) -> int:
        """Parameters whose gradients no optimizer step has used."""
        return len(self._waiting)

    @property
    def root_modules(self) -> list[nn.Module]:
        """The outermost modules in which parameters were found."""
        return self._forward_hooks.root_modules

    def before_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """A pre-hook of optimizers."""
        if self._depth == 0:
            if self._captures("step()"):
                return
            self._forward_hooks.stop_recording()
            self._step_began = self._device.now()
        self._depth += 1

    def after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """A post-hook of optimizers; of those of other parameters too."""
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
        """What was recorded; of the slowest rank, and collective, where `init` has been called.

        Args:
            names: Of the parameters.
            model: Name of the job.
        """
        times = self._learning.times()
        if is_initialized() and current().size > 1:
            eager = current().eager
            times = combine(times, lambda t: eager.allreduce("usbyte.profile.times", t, Max))
        return job_profile(names, self._params, times, flags=False, model=model)

    def _begin_iteration(self) -> None:
        self._ready: list[Mark] = [NEVER] * len(self._params)
        self._order = [0] * len(self._params)  # in which gradients have come, from 1
        self._gradients = 0
        self._waiting: set[int] = set()  # for an update
        self._updates: list[tuple[Mark, Mark, Mark]] = []  # begun, last gradient, ended

    def _end_iteration(self) -> None:
        used = [order > 0 for order in self._order]
        ready = [float(mark) for mark in self._ready]
        end = max(s for s in ready if s != NEVER)
        # What has no gradient is known to have none when backward ends.
        ready = [min(s, end) for s in ready]
        # A closure has run backward inside the step.
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
                    f"the job communicates through {kind.__name__}, whose waiting would count as "
                    "compute: profile it as a single process, or under ub.DistributedOptimizer"
                )

    def _captures(self, what: str) -> bool:
        if not self._device.capturing():
            return False
        self._refuse(
            f"the job captures {what} into a CUDA graph, whose replays cannot be seen: profile it "
            "without"
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
    """Calls both around the steps of every optimizer of this process."""
    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Those that get gradients."""
    return [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]


def names_of(params: Sequence[nn.Parameter], roots: Iterable[nn.Module]) -> list[str]:
    """Unique names: the modules', with the root's class in front where roots share a name."""
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

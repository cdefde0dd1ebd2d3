# SPDX-License-Identifier: Apache-2.0
"""`profile`: records the ready and need times of one training iteration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import TracebackType

import torch
from torch import nn
from torch.optim import Optimizer

from usbyte import _core
from usbyte._util import files
from usbyte.cluster_env import detect
from usbyte.errors import UsageError
from usbyte.planning.layout import dumps, without_flags
from usbyte.torch.optimizer.distributed_optimizer import DistributedOptimizer
from usbyte.torch.optimizer.param_owner import get_owner
from usbyte.torch.profiler.recorder import Recorder, hook_on_all_steps, names_of, parameters_of
from usbyte.torch.world.world import current, is_initialized

__all__ = ["Recording", "profile"]


class Recording:
    """Context manager that records a profile; `profile` makes it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        steps: int,
        skip: int,
        path: str | os.PathLike[str] | None,
        name: str | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"model must be a torch.nn.Module, not {type(model)}")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer)}")
        if steps < 1 or skip < 0:
            raise UsageError(
                f"steps must be at least 1 and skip at least 0, not steps={steps} and skip={skip}"
            )
        if path is not None and not Path(path).parent.is_dir():
            raise UsageError(f"cannot write '{path}': there is no folder '{Path(path).parent}'")
        self._model, self._optimizer = model, optimizer
        self._steps, self._skip = steps, skip
        self._path, self._name = path, name or type(model).__name__
        self._recorder: Recorder | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._distributed: DistributedOptimizer | None = None
        self._result: _core.Profile | None = None

    @property
    def done(self) -> bool:
        """Whether the profile is complete; training may go on."""
        return self._result is not None or (
            self._distributed is not None and self._distributed.decision is not None
        )

    def result(self) -> _core.Profile:
        """Returns the recorded profile.

        Raises:
            UsageError: Too few steps were recorded.
        """
        distributed = self._distributed
        if self._result is None and distributed is not None and distributed.decision is not None:
            self._finish(without_flags(distributed.decision.profile, self._name))
        if self._result is None:
            raise UsageError(self._missing())
        return self._result

    def __enter__(self) -> Recording:
        params = [p for p in self._model.parameters() if p.requires_grad]
        if self._optimizer is not None:
            own = set(parameters_of(self._optimizer))
            params = [p for p in params if p in own]
        if not params:
            raise UsageError(
                "no parameter of the model both requires a gradient and belongs to the optimizer: "
                "pass the model that is trained, and the optimizer that trains it"
            )
        self._result = None
        self._distributed = distributed_owner(params)
        if self._distributed is not None:
            return self
        self._params = params
        self._names = names_of(params, [self._model])
        self._recorder = Recorder(params, self._skip, self._steps, self._model)
        try:
            self._hook_on()
        except BaseException:
            self._close()
            raise
        return self

    def _hook_on(self) -> None:
        optimizer = self._optimizer
        if optimizer is None:
            self._handles = hook_on_all_steps(self._before_step, self._after_step)
            return
        try:
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        except AttributeError as error:  # from a wrapper that did not call Optimizer.__init__
            raise UsageError(
                f"{type(optimizer).__name__} takes no step hooks; give the optimizer that it wraps"
            ) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._close()
        if kind is None:
            self.result()

    # Both hooks stay until the block ends: torch fails if a step hook removes a step hook.
    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._result is not None:
            return
        if distributed_owner(self._params) is not None:
            raise UsageError("make the DistributedOptimizer before ub.profile, not inside it")
        assert self._recorder is not None
        self._recorder.before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._result is not None:
            return
        assert self._recorder is not None
        self._recorder.after_step(optimizer, args, kwargs)
        if self._recorder.done:
            self._recorder.close()
            self._finish(self._recorder.profile(self._names, self._name))

    def _finish(self, result: _core.Profile) -> None:
        self._result = result
        if self._path is None or rank() != 0:
            return
        try:
            files.write_bytes(Path(self._path), to_json(result).encode())
        except OSError as error:
            raise UsageError(f"cannot write '{self._path}': {error.strerror}") from error

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._recorder is not None:
            self._recorder.close()

    def _missing(self) -> str:
        if self._distributed is not None:
            return NOT_PLANNED
        if self._recorder is None:
            return "nothing was recorded yet: train inside `with ub.profile(...) as p:`"
        wanted = self._skip + self._steps
        return too_few(len(self._recorder), wanted, self._recorder.unfinished)


def profile(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    steps: int = 10,
    skip: int = 3,
    path: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> Recording:
    """Records the profile of an ordinary training loop: one iteration, without communication.

        with ub.profile(model, optimizer, path="profile.json") as p:
            for x, y in loader:           # skip + steps optimizer steps; more are not recorded
                ...
        job = p.result()                  # of class usbyte._core.Profile

    The profile says when the forward pass first needs each parameter and when its gradient is
    ready: medians over the iterations, with their spread. Hooks take timestamps and do not
    synchronize the device; each iteration ends with one wait for the device. After `init`, every
    rank must record; the result has the times of the slowest rank, and rank 0 writes the file.

    With several ranks under `DistributedOptimizer`, steps would include waits for the network. In
    that case nothing is recorded here: the result is the profile that the optimizer has measured in
    its first steps, without these waits (`optimizer.decision.profile`), and `steps` and `skip` have
    no effect. DDP and FSDP are refused. Any other communication counts as compute: profile such a
    job as a single process.

    Args:
        model: The module that is trained.
        optimizer: The optimizer whose steps end an iteration and whose parameters are recorded. The
            default is every optimizer of parameters of `model`.
        steps: Iterations to record; at least 1, default 10.
        skip: Warm-up iterations before them; at least 0, default 3.
        path: JSON file to write; default none.
        name: Name of the job; default the class name of `model`.

    Returns:
        A context manager. Its `result()` is the profile, its `done` tells whether that is complete.

    Raises:
        UsageError: An argument cannot be used; at the end of the block: too few steps were
            recorded.

    Examples:
        >>> import torch
        >>> import usbyte.torch as ub
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with ub.profile(model, optimizer, steps=2, skip=1) as recording:
        ...     for _ in range(3):
        ...         model(torch.ones(4, 2)).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> recording.result().model
        'Linear'
    """
    return Recording(model, optimizer, steps, skip, path, name)


NOT_PLANNED = (
    "the DistributedOptimizer has no plan yet, and so no profile: train for a few steps more than "
    "USBYTE_LEARNING_STEPS"
)


def distributed_owner(params: Sequence[nn.Parameter]) -> DistributedOptimizer | None:
    """Returns the DistributedOptimizer that sends the gradients of `params`; None if there is none.

    Raises:
        UsageError: There are several.
    """
    found: list[DistributedOptimizer] = []
    for param in params:
        owner = get_owner(param)
        if not isinstance(owner, DistributedOptimizer) or owner.plan is None:
            continue
        if all(owner is not other for other in found):
            found.append(owner)
    if len(found) > 1:
        raise UsageError(
            f"the parameters belong to {len(found)} DistributedOptimizers, and each has a profile "
            "of its own: use optimizer.decision.profile of each"
        )
    return found[0] if found else None


def too_few(seen: int, wanted: int, unfinished: int) -> str:
    """Returns the message that explains why there is no profile yet.

    Args:
        seen: Optimizer steps that were recorded, warm-up included.
        wanted: Optimizer steps that are needed, warm-up included.
        unfinished: Number of parameters whose gradients no optimizer step has used.
    """
    text = f"saw {seen} of {wanted} optimizer steps; train for longer, or record fewer"
    if unfinished:
        text += (
            f" ({unfinished} parameters have gradients that no step used: if they are not to be "
            "trained, pass the optimizer to ub.profile, or freeze them with requires_grad_(False))"
        )
    return text


def rank() -> int:
    """Returns this process's rank, also before `init`."""
    return current().rank if is_initialized() else detect().rank


def to_json(result: _core.Profile, **more: object) -> str:
    """Returns a profile as JSON, with the circumstances of its recording.

    Args:
        result: The profile.
        more: More circumstances to store, for example the batch size.
    """
    recorded = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": _processor(),
        "threads": torch.get_num_threads(),
        "ranks": current().size if is_initialized() else 1,
        **more,
    }
    return dumps(result, recorded)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'CPU'}, {os.cpu_count()} cores"

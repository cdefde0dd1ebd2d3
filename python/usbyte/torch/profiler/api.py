"""ub.profile: what a training job does in one iteration, as plans are made from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from usbyte import _core
from usbyte._util import files
from usbyte.cluster_env import detect
from usbyte.errors import UsageError
from usbyte.planning.layout import dumps, without_flags
from usbyte.torch.optimizer.param_owner import get_owner
from usbyte.torch.profiler.recorder import Recorder, hook_on_all_steps, names_of, parameters_of
from usbyte.torch.world.world import current, is_initialized

if TYPE_CHECKING:
    from usbyte.torch.optimizer.distributed_optimizer import DistributedOptimizer

__all__ = ["Recording", "profile"]


class Recording:
    """A profile that is being recorded; see `profile`."""

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
            raise UsageError(f"cannot record {steps} steps after {skip}; at least 1 after 0")
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
        """The profile is there; training may go on."""
        return self._result is not None or (
            self._distributed is not None and self._distributed.decision is not None
        )

    def result(self) -> _core.Profile:
        """The profile.

        Raises:
            UsageError: Too few steps were seen.
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
            raise UsageError("the model has no parameter that requires a gradient and is optimized")
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
        except AttributeError as error:  # of a wrapper that never was initialised as an Optimizer
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

    # Both stay until the block ends: torch does not bear that a hook of steps removes one.
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
    """Records what an ordinary training loop does in one iteration, without communication.

        with ub.profile(model, optimizer, path="profile.json") as p:
            for x, y in loader:           # skip + steps optimizer steps; more are not recorded
                ...
        job = p.result()                  # of class usbyte._core.Profile

    When the forward pass first uses each parameter and when its gradient is ready, in medians over
    iterations with their spread. Hooks note the time and wait for nothing. Where `init` has been
    called, every rank must record, and the slowest rank's times are taken; rank 0 writes the file.

    A job under `DistributedOptimizer` with several ranks waits for the network. Of it nothing is
    recorded here: the profile is what it has learned itself in its first steps, less that waiting
    (`optimizer.decision.profile`); then `steps` and `skip` have no effect. DDP and FSDP are
    refused, and what else communicates counts as compute: profile it as a single process.

    Args:
        model: What is trained.
        optimizer: Whose steps end an iteration, and whose parameters count; by default all
            optimizers of the model's parameters.
        steps: Iterations to record.
        skip: Iterations of warm-up before them.
        path: JSON to write.
        name: Of the job; by default the model's class.

    Raises:
        UsageError: Bad arguments; at the end of the block, too few steps.
    """
    return Recording(model, optimizer, steps, skip, path, name)


NOT_PLANNED = (
    "the DistributedOptimizer has no plan yet, and so no profile: train for some steps more than "
    "USBYTE_LEARNING_STEPS"
)


def distributed_owner(params: Sequence[nn.Parameter]) -> DistributedOptimizer | None:
    """The DistributedOptimizer that sends their gradients to other ranks.

    Raises:
        UsageError: They have several.
    """
    found: list[DistributedOptimizer] = []
    for param in params:
        owner = get_owner(param)
        if owner is not None and owner.plan is not None and all(owner is not o for o in found):
            found.append(owner)
    if len(found) > 1:
        raise UsageError(
            f"the parameters belong to {len(found)} DistributedOptimizers, each of which has a "
            "profile of its own: take optimizer.decision.profile of each"
        )
    return found[0] if found else None


def too_few(seen: int, wanted: int, unfinished: int) -> str:
    """Why there is no profile.

    Args:
        seen: Steps.
        wanted: Steps.
        unfinished: Parameters whose gradients no optimizer step has used.
    """
    text = f"saw {seen} of {wanted} optimizer steps; train for longer, or record fewer"
    if unfinished:
        text += (
            f" ({unfinished} parameters have gradients that no step used: where they are not to be "
            "trained, name the optimizer to ub.profile, or freeze them with requires_grad_(False))"
        )
    return text


def rank() -> int:
    """This process's rank, also where `init` has not been called."""
    return current().rank if is_initialized() else detect().rank


def to_json(result: _core.Profile, **more: object) -> str:
    """A profile and how it was recorded.

    Args:
        result: The profile.
        more: Of how it was recorded, for example the batch size.
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

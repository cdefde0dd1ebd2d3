# SPDX-License-Identifier: Apache-2.0
"""Records the profile of an unmodified script, with torch's global hooks."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.planning.layout import without_flags
from usbyte.torch.optimizer.distributed_optimizer import DistributedOptimizer
from usbyte.torch.profiler.api import NOT_PLANNED, distributed_owner, too_few
from usbyte.torch.profiler.recorder import Recorder, hook_on_all_steps, names_of, parameters_of


class StopRecording(BaseException):
    """Ends the script. A BaseException, so that no `except Exception` in the script catches it."""


class ScriptRecorder:
    """Waits for the first optimizer step, then records the parameters of that optimizer.

    Args:
        skip: Warm-up steps, at least 1: the first step shows which parameters there are.
        steps: Steps to record after them.
        name: Name of the job; None for the class name of the model.
        finish: Called once with the profile; while the script runs, if enough steps come.
        stop: Whether to raise `StopRecording` in the script after `finish`, or after a failure.
    """

    def __init__(
        self,
        skip: int,
        steps: int,
        name: str | None,
        finish: Callable[[_core.Profile], None],
        stop: bool,
    ) -> None:
        self._skip, self._steps, self._name = skip, steps, name
        self._finish, self._stop = finish, stop
        self._recorder: Recorder | None = None
        self._distributed: DistributedOptimizer | None = None
        self._params: list[nn.Parameter] = []
        self._handles: list[RemovableHandle] = []
        self._optimizer: Optimizer | None = None
        self._forward: RemovableHandle | None = None
        self._problem = ""
        self._over = False
        self.finished = False

    def __enter__(self) -> ScriptRecorder:
        self._handles = hook_on_all_steps(self._before_step, self._after_step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._close()
        self._stop = False
        if kind is None and not self.finished:  # the last step may have made the plan
            self._take_decision("job")

    @property
    def is_learned(self) -> bool:
        """Whether a DistributedOptimizer measures the profile, in its learning steps."""
        return self._distributed is not None

    def missing(self) -> str:
        """Returns the reason why there is no profile."""
        if self._problem:
            return self._problem
        if self._distributed is not None:
            return NOT_PLANNED
        if self._recorder is None:
            return "no step of a torch optimizer was seen"
        seen = 1 + len(self._recorder)
        return too_few(seen, self._skip + self._steps, self._recorder.unfinished)

    # Step hooks are removed when the script ends or between steps: torch fails if a step hook
    # removes a step hook.
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._recorder is not None and not self._over:
            self._recorder.before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._over:
            return
        recorder = self._recorder
        if recorder is None:
            try:
                self._begin(optimizer)
            except UsageError as error:
                self._fail(str(error))
            return
        if optimizer is not self._optimizer and not _all_of(optimizer) <= _all_of(self._optimizer):
            self._fail(
                "it steps several optimizers, and the recorder cannot know which of them belong to "
                "the job: record it with ub.profile(model) inside the script"
            )
            return
        recorder.after_step(optimizer, args, kwargs)
        if recorder.done:
            recorder.close()
            model = type(recorder.root_modules[0]).__name__ if recorder.root_modules else "job"
            names = names_of(self._params, recorder.root_modules)
            self._end(recorder.profile(names, self._name or model))

    def _begin(self, optimizer: Optimizer) -> None:
        params = parameters_of(optimizer)
        if not params or self._distributed is not None:
            return
        self._distributed = distributed_owner(params)
        if self._distributed is None:
            self._params, self._optimizer = params, optimizer
            self._recorder = Recorder(params, self._skip - 1, self._steps, refuse=self._fail)
            return
        self._forward = register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        # DistributedOptimizer defers no updates while step hooks are registered.
        for handle in self._handles:
            handle.remove()
        self._take_decision(type(module).__name__)  # the outermost module comes first

    def _fail(self, why: str) -> None:
        self._problem, self._over = why, True
        if self._recorder is not None:
            self._recorder.close()
        if self._stop:
            raise StopRecording

    def _take_decision(self, model: str) -> None:
        owner = self._distributed
        if owner is not None and owner.decision is not None and not self._over:
            self._end(without_flags(owner.decision.profile, self._name or model))

    def _end(self, result: _core.Profile) -> None:
        self.finished = self._over = True
        self._finish(result)
        if self._stop:
            raise StopRecording

    def _close(self) -> None:
        for handle in [*self._handles, self._forward]:
            if handle is not None:
                handle.remove()
        if self._recorder is not None:
            self._recorder.close()


def _all_of(optimizer: Optimizer | None) -> set[nn.Parameter]:
    return {p for g in optimizer.param_groups for p in g["params"]} if optimizer else set()

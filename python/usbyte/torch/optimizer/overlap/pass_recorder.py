# SPDX-License-Identifier: Apache-2.0
"""Records when forward and backward passes begin and end, for the timeline."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from usbyte.torch.optimizer.overlap.forward_hooks import ModuleHook, takes_hooks
from usbyte.torch.runtime.device import Device, Mark
from usbyte.torch.torch_private import (
    backward_id,
    call_after_backward,
    is_functorch_tensor,
    tensors_in,
)

# Forward passes that no backward pass follows must not fill the memory.
_MOST_PASSES = 256


class Pass(NamedTuple):
    """A forward or backward pass, by the name that the timeline shows."""

    name: str
    start: Mark
    end: Mark


class PassRecorder:
    """Records the passes of a step while a timeline is recorded; else it has no hooks.

    A forward pass is a call of an outermost module in training. A backward pass begins when it
    reaches the outputs of such a module. If it reaches none, because the module takes no hooks or
    hides its outputs, it begins with its first gradient of a parameter.

    Args:
        device: Device of the parameters.
        root_modules: The outermost modules. More may be appended; the next backward pass finds
            them.
    """

    def __init__(self, device: Device, root_modules: Sequence[nn.Module]) -> None:
        self._device, self._root_modules = device, root_modules
        self._enabled = False
        self._handles: list[RemovableHandle] = []
        self._hooked = 0  # number of root modules that were offered hooks
        self._forward: tuple[nn.Module, Mark] | None = None  # the module that runs, since when
        self._backward: tuple[int, Mark] | None = None  # `backward_id` of a pass, since when
        self._passes: deque[Pass] = deque(maxlen=_MOST_PASSES)

    def set_enabled(self, wanted: bool) -> None:
        """Starts (True) or stops (False) recording."""
        self._enabled = wanted
        if wanted:
            self._hook_modules()
            return
        for handle in self._handles:
            handle.remove()
        self._handles, self._hooked = [], 0
        self._forward = self._backward = None
        self._passes.clear()

    def take(self) -> list[Pass]:
        """Returns the passes that have ended since the last call."""
        passes = list(self._passes)
        self._passes.clear()
        return passes

    def begin_backward(self) -> None:
        """Records a backward pass up to its end. Call it in the pass, at the first gradient."""
        if not self._enabled:
            return
        self._hook_modules()
        self._forward = None  # of a forward pass that has raised
        self._reach()
        call_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._passes.append(Pass("backward", self._backward[1], self._device.now()))
            self._backward = None

    def _hook_modules(self) -> None:
        for module in self._root_modules[self._hooked :]:
            if takes_hooks(module):
                self._handles += [
                    module.register_forward_pre_hook(_PreForward(self), prepend=True),
                    module.register_forward_hook(_PostForward(self)),
                ]
        self._hooked = len(self._root_modules)

    def _enter(self, module: nn.Module) -> None:
        # A checkpointed module runs again in backward. A CUDA graph's replay calls no hook.
        trains = module.training and torch.is_grad_enabled() and backward_id() == -1
        if not trains or self._device.capturing():
            return
        if self._forward is None or self._forward[0] is module:
            self._forward = (module, self._device.now())

    def _leave(self, module: nn.Module, output: Any) -> None:
        if self._forward is None or self._forward[0] is not module or self._device.capturing():
            return
        self._passes.append(Pass("forward", self._forward[1], self._device.now()))
        self._forward = None
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf and not is_functorch_tensor(tensor):
                tensor.register_hook(self._on_output_gradient)

    def _on_output_gradient(self, _grad: torch.Tensor) -> None:
        if self._enabled and not self._device.capturing():
            self._reach()

    def _reach(self) -> None:
        """Records the beginning of the backward pass that runs, in the first call in it."""
        if self._backward is None or self._backward[0] != backward_id():
            self._backward = (backward_id(), self._device.now())


class _Hook(ModuleHook):
    """Hook of an outermost module. It keeps no `PassRecorder` alive."""

    def __init__(self, recorder: PassRecorder) -> None:
        self._recorder = weakref.ref(recorder)


class _PreForward(_Hook):
    def __call__(self, module: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling() and (recorder := self._recorder()) is not None:
            recorder._enter(module)


class _PostForward(_Hook):
    def __call__(self, module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and (recorder := self._recorder()) is not None:
            recorder._leave(module, output)

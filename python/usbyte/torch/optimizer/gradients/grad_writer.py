# SPDX-License-Identifier: Apache-2.0
"""Writes gradients to the flat buffer.

On the CPU torch writes them, or the engine where they are small. On a CUDA device the engine does,
an op at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from usbyte import _core
from usbyte.torch.layout import laid_out_alike
from usbyte.torch.optimizer.gradients.flat_buffer import FlatBuffer
from usbyte.torch.runtime.device import Device

_SMALL_NUMEL = 1 << 15  # up to this size torch uses one thread


class GradWriter(ABC):
    """Writes the gradients of a step to the flat buffer, and marks them ready in the engine.

    Args:
        params: The parameters, by parameter index.
        param_of_tensor: Parameter indices in the plan's order of tensors, without the control
            tensor.
        flat_buffer: Flat buffer of the plan in force.
        engine: Launches ops whose gradients are ready.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        param_of_tensor: Sequence[int],
        flat_buffer: FlatBuffer,
        engine: _core.Engine,
    ) -> None:
        self._params, self._param_of_tensor = params, param_of_tensor
        # Tensor 0 is the control tensor. Sparse gradients have no view.
        self._tensor_of_param = {i: k for k, i in enumerate(param_of_tensor, start=1)}
        self._views = dict(zip(param_of_tensor, flat_buffer.grads, strict=False))
        self._flat_buffer, self._engine = flat_buffer, engine

    @abstractmethod
    def begin(self) -> None:
        """Opens a step in the engine."""

    @abstractmethod
    def send(self, i: int, grad: torch.Tensor, shown: torch.Tensor | None) -> None:
        """Sends the gradient of parameter `i`, scaled.

        Args:
            i: Index of the parameter; not a sparse one.
            grad: Its gradient, of the shape and dtype of the parameter. It may be the flat buffer's
                memory.
            shown: Tensor over the flat buffer's memory that `param.grad` becomes once the gradient
                is there; None leaves `param.grad` as it is.
        """

    @abstractmethod
    def send_zeros(self, i: int) -> None:
        """Sends zeros for parameter `i`, whose `param.grad` does not change."""

    @abstractmethod
    def send_flags(self, flags: Sequence[float]) -> None:
        """Sends `flags` as the used part of the control tensor."""


class HostGradWriter(GradWriter):
    """Copies each gradient to the flat buffer, scaled, as soon as it is ready. For the CPU.

    Args:
        params: The parameters, by parameter index.
        param_of_tensor: Parameter indices in the plan's order of tensors, without the control
            tensor.
        flat_buffer: Flat buffer of the plan in force.
        engine: Launches ops whose gradients are ready.
        scale: Factor of all gradients: 1 / number of ranks for `Average`, 1 for `Sum`.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        param_of_tensor: Sequence[int],
        flat_buffer: FlatBuffer,
        engine: _core.Engine,
        scale: float,
    ) -> None:
        super().__init__(params, param_of_tensor, flat_buffer, engine)
        # torch.mul would turn a number into a tensor in each call.
        self._scale = torch.tensor(scale, dtype=torch.float64, device="cpu")
        # Dtype and strides of small gradients: the core scales them faster than torch launches.
        self._small = {
            i: (view.dtype, view.stride())
            for i, view in self._views.items()
            if view.dtype in (torch.float32, torch.float64) and view.numel() <= _SMALL_NUMEL
        }

    def begin(self) -> None:
        """Opens a step in the engine."""
        self._engine.begin_step()

    def send(self, i: int, grad: torch.Tensor, shown: torch.Tensor | None) -> None:
        """Copies the gradient of parameter `i` to the flat buffer, scaled, and marks it ready."""
        view = self._views[i]
        small = self._small.get(i)
        if small == (grad.dtype, grad.stride()) and not grad.is_neg():
            self._engine.ready(self._tensor_of_param[i], 0, grad.data_ptr())
        else:
            torch.mul(grad, self._scale, out=view)
            self._engine.ready(self._tensor_of_param[i])
        if shown is not None:
            self._params[i].grad = shown

    def send_zeros(self, i: int) -> None:
        """Writes zeros for parameter `i`, and marks it ready."""
        self._views[i].zero_()
        self._engine.ready(self._tensor_of_param[i])

    def send_flags(self, flags: Sequence[float]) -> None:
        """Writes `flags` to the control tensor, the used part of it, and marks it ready."""
        self._flat_buffer.used.copy_(_on_host(flags))
        self._engine.ready(0)


class DeviceGradWriter(GradWriter):
    """Passes gradients to the engine, which packs and scales those of an op at once. For CUDA.

    Until then a gradient stays where it is, and `param.grad` shows it there. Only the engine may
    write to the flat buffer, because it knows when the memory is free again.

    Args:
        device: Device of gradients and flat buffer.
        params: The parameters, by parameter index.
        param_of_tensor: Parameter indices in the plan's order of tensors, without the control
            tensor.
        flat_buffer: Flat buffer of the plan in force.
        engine: Packs, scales and sends the gradients.
    """

    def __init__(
        self,
        device: Device,
        params: Sequence[nn.Parameter],
        param_of_tensor: Sequence[int],
        flat_buffer: FlatBuffer,
        engine: _core.Engine,
    ) -> None:
        super().__init__(params, param_of_tensor, flat_buffer, engine)
        self._device = device
        self._sources: dict[int, torch.Tensor] = {}  # by tensor of the plan, until packed
        # By tensor of the plan, until packed: `param.grad`, and the tensor that replaces it then.
        self._user_visible_grads: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._flags: Sequence[float] = ()
        self._flags_there = flat_buffer.flags[:0]

    def begin(self) -> None:
        """Opens a step in the engine, ordered after the work on the current stream."""
        self._engine.begin_step(self._device.stream())

    def send(self, i: int, grad: torch.Tensor, shown: torch.Tensor | None) -> None:
        """Passes the gradient of parameter `i` to the engine; a copy if laid out otherwise."""
        view = self._views[i]
        if shown is not None:
            self._user_visible_grads[self._tensor_of_param[i]] = self._params[i].grad, shown
        if grad is shown:
            self._submit(self._tensor_of_param[i], None)
        elif laid_out_alike(grad, view):
            self._submit(self._tensor_of_param[i], grad)
        else:
            laid_out = torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=view.device
            )
            self._submit(self._tensor_of_param[i], laid_out.copy_(grad))

    def send_zeros(self, i: int) -> None:
        """Passes zeros for parameter `i` to the engine."""
        self._submit(self._tensor_of_param[i], torch.zeros_like(self._views[i]))

    def send_flags(self, flags: Sequence[float]) -> None:
        """Passes `flags` to the engine; while they do not change, the copy on the device."""
        if flags != self._flags:
            there = torch.zeros_like(self._flat_buffer.flags, device="cpu")
            there[: len(flags)] = _on_host(flags)
            self._flags, self._flags_there = (
                flags,
                there.to(self._flat_buffer.flags.device, non_blocking=True),
            )
        self._submit(0, self._flags_there)

    def _submit(self, tensor: int, source: torch.Tensor | None) -> None:
        address = 0
        if source is not None:
            address = source.data_ptr()
            self._sources[tensor] = source
        packed = self._engine.ready(tensor, self._device.stream(), address)
        if not packed:
            return
        used = [self._sources.pop(k) for k in packed if k in self._sources]
        self._device.record_stream(used)
        for k in packed:
            before, shown = self._user_visible_grads.pop(k, (None, None))
            # A hook may have replaced `param.grad` meanwhile.
            param = self._params[self._param_of_tensor[k - 1]]
            if shown is not None and param.grad is before:
                param.grad = shown


def _on_host(flags: Sequence[float]) -> torch.Tensor:
    return torch.tensor(flags, dtype=torch.float32, device="cpu")


def make_grad_writer(
    device: Device,
    params: Sequence[nn.Parameter],
    param_of_tensor: Sequence[int],
    flat_buffer: FlatBuffer,
    engine: _core.Engine,
    scale: float,
) -> GradWriter:
    """Returns the gradient writer for `device`. On CUDA, the engine applies the scale itself."""
    if device.core is None:
        return HostGradWriter(params, param_of_tensor, flat_buffer, engine, scale)
    return DeviceGradWriter(device, params, param_of_tensor, flat_buffer, engine)

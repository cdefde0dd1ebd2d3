# SPDX-License-Identifier: Apache-2.0
"""Gradients on their way into the arena: torch writes it on the host, the engine elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from usbyte import _core
from usbyte.torch.layout import laid_out_alike
from usbyte.torch.optimizer.gradients.flat_buffer import FlatBuffer
from usbyte.torch.runtime.device import Device

_SMALL_NUMEL = 1 << 15  # up to here torch uses one thread


class HostGradWriter:
    """Writes each gradient to the arena, scaled, as it comes.

    Args:
        params: The parameters, by index.
        at_slot: Their indices in the plan's order, in which the arena holds gradients behind the
            flags.
        arena: Where gradients go.
        engine: Sends what is ready.
        scale: Multiplied with gradients.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        at_slot: Sequence[int],
        flat_buffer: FlatBuffer,
        engine: _core.Engine,
        scale: float,
    ) -> None:
        self._params, self._at_slot = params, at_slot
        self._slot = {i: k + 1 for k, i in enumerate(at_slot)}  # 0: the flags
        self._views = dict(zip(at_slot, flat_buffer.grads, strict=False))  # sparse ones have none
        self._flat_buffer, self._engine = flat_buffer, engine
        # Of a number torch would make a tensor each time.
        self._scale = torch.tensor(scale, dtype=torch.float64, device="cpu")
        # By parameter, the layout in which the core scales in less time than torch needs to begin.
        self._small = {
            i: (view.dtype, view.stride())
            for i, view in self._views.items()
            if view.dtype in (torch.float32, torch.float64) and view.numel() <= _SMALL_NUMEL
        }

    def begin(self) -> None:
        """Opens a step."""
        self._engine.begin_step()

    def send(self, i: int, grad: torch.Tensor, shown: torch.Tensor | None) -> None:
        """Sends the gradient of parameter i, which the arena holds from then on, or already.

        Args:
            i: The parameter.
            grad: Its gradient.
            shown: What `param.grad` is to be then, over the arena's memory; None: as it is.
        """
        view = self._views[i]
        small = self._small.get(i)
        if small == (grad.dtype, grad.stride()) and not grad.is_neg():
            self._engine.ready(self._slot[i], 0, grad.data_ptr())
        else:
            torch.mul(grad, self._scale, out=view)
            self._engine.ready(self._slot[i])
        if shown is not None:
            self._params[i].grad = shown

    def send_zeros(self, i: int) -> None:
        """Sends zeros for parameter i, which keeps the gradient that it has, or none."""
        self._views[i].zero_()
        self._engine.ready(self._slot[i])

    def send_flags(self, flags: Sequence[float]) -> None:
        """Sends this rank's flags."""
        self._flat_buffer.used.copy_(_on_host(flags))
        self._engine.ready(0)


class DeviceGradWriter(HostGradWriter):
    """Gives gradients to the engine, which packs them, scaled, once it has all of an operation.

    Until then they stay where they are, also for who reads `param.grad`. Into the arena itself only
    the engine may write, as it knows when that is free again.

    Args:
        device: Where all of it is.
        args: As of `HostGradWriter`; the engine scales.
    """

    def __init__(
        self,
        device: Device,
        params: Sequence[nn.Parameter],
        at_slot: Sequence[int],
        flat_buffer: FlatBuffer,
        engine: _core.Engine,
    ) -> None:
        super().__init__(params, at_slot, flat_buffer, engine, 1.0)
        self._device = device
        self._sources: dict[int, torch.Tensor] = {}  # not packed yet, by slot
        # By slot until then: what the parameter has as its gradient, and what it is to have.
        self._user_visible_grads: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._flags: Sequence[float] = ()
        self._flags_there = flat_buffer.flags[:0]

    def begin(self) -> None:
        """See `HostGradWriter`."""
        self._engine.begin_step(self._device.stream())

    def send(self, i: int, grad: torch.Tensor, shown: torch.Tensor | None) -> None:
        """Sends the gradient of parameter i; see `HostGradWriter.send`."""
        view = self._views[i]
        if shown is not None:
            self._user_visible_grads[self._slot[i]] = self._params[i].grad, shown
        if grad is shown:
            self._submit(self._slot[i], None)
        elif laid_out_alike(grad, view):
            self._submit(self._slot[i], grad)
        else:
            laid_out = torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=view.device
            )
            self._submit(self._slot[i], laid_out.copy_(grad))

    def send_zeros(self, i: int) -> None:
        """See `HostGradWriter`."""
        self._submit(self._slot[i], torch.zeros_like(self._views[i]))

    def send_flags(self, flags: Sequence[float]) -> None:
        """See `HostGradWriter`; they seldom change, and are on the device then."""
        if flags != self._flags:
            there = torch.zeros_like(self._flat_buffer.flags, device="cpu")
            there[: len(flags)] = _on_host(flags)
            self._flags, self._flags_there = (
                flags,
                there.to(self._flat_buffer.flags.device, non_blocking=True),
            )
        self._submit(0, self._flags_there)

    def _submit(self, slot: int, source: torch.Tensor | None) -> None:
        address = 0
        if source is not None:
            address = source.data_ptr()
            self._sources[slot] = source
        packed = self._engine.ready(slot, self._device.stream(), address)
        if not packed:
            return
        used = [self._sources.pop(k) for k in packed if k in self._sources]
        self._device.record_stream(used)
        for k in packed:
            before, shown = self._user_visible_grads.pop(k, (None, None))
            # A hook may have put another one there.
            if shown is not None and (param := self._params[self._at_slot[k - 1]]).grad is before:
                param.grad = shown


def _on_host(flags: Sequence[float]) -> torch.Tensor:
    return torch.tensor(flags, dtype=torch.float32, device="cpu")


def sender(
    device: Device,
    params: Sequence[nn.Parameter],
    at_slot: Sequence[int],
    flat_buffer: FlatBuffer,
    engine: _core.Engine,
    scale: float,
) -> HostGradWriter:
    """The one for the device."""
    if device.core is None:
        return HostGradWriter(params, at_slot, flat_buffer, engine, scale)
    return DeviceGradWriter(device, params, at_slot, flat_buffer, engine)

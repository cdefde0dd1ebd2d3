# SPDX-License-Identifier: Apache-2.0
"""Devices of gradients (CPU or CUDA): their clock, streams, events and copies to the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.torch_private import raw_stream


class Mark(Protocol):
    """A point in time, convertible to float: seconds of the steady clock.

    The conversion may block until the device has reached that point. The difference of two marks
    is exact, however long ago the last `Device.anchor` was.
    """

    def __float__(self) -> float: ...
    def __sub__(self, other: Any, /) -> float: ...


class Device:
    """The CPU as a device: every call returns when its work is done.

    Attributes:
        core: The device object of the engine; None for the CPU.
        torch_device: The corresponding `torch.device`.
        lag: Number of steps after which the host reads values that the device has computed. The
            host does not wait for them unless it is further ahead than that.
    """

    core: _core.Cuda | None = None
    torch_device = torch.device("cpu")
    lag = 0

    def stream(self) -> int:
        """Returns the handle of this thread's current stream; 0 on the CPU."""
        return 0

    def capturing(self) -> bool:
        """Whether this thread's current stream is being captured into a CUDA graph."""
        return False

    def now(self) -> Mark:
        """Returns the time at which the work enqueued so far on the current stream completes.

        A mark that is recorded during CUDA graph capture has no time.
        """
        return _core.now_s()

    def anchor(self) -> None:
        """Relates the device's time to the host's anew. Call it now and then, for exact marks."""

    def record_stream(self, tensors: Sequence[torch.Tensor]) -> None:
        """Calls `record_stream` with the current stream for each tensor.

        The caching allocator then does not reuse their memory while work on that stream is pending.
        """

    def fence(self) -> Fence | None:
        """Records an event on the current stream, for other streams to wait on; None on the CPU."""
        return None

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """Starts a copy of a small 1-d tensor to the host, after the work enqueued so far."""
        return Fetched(tensor.clone(), None)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a CPU tensor's values on this device, without blocking the host."""
        return tensor

    def record_update(
        self, engine: _core.Engine, tensors: Sequence[int], start: Mark, end: Mark
    ) -> None:
        """Adds the update of the tensors with these indices in the plan to the timeline."""
        engine.record_update(tensors, float(start), float(end))

    def record_pass(self, engine: _core.Engine, name: str, start: Mark, end: Mark) -> None:
        """Adds a forward or backward pass of the current step to the timeline."""
        engine.record_pass(name, float(start), float(end))


class CudaDevice(Device):
    """A CUDA device: calls enqueue work on streams and return without waiting for it.

    Args:
        device: CUDA device with an index.
        core: The device object of the engine; made from the index if None.
    """

    lag = 8

    def __init__(self, device: torch.device, core: _core.Cuda | None = None) -> None:
        self.torch_device = device
        self.core = core if core is not None else _core.make_cuda(device.index)
        self._clock = _core.DeviceClock(self.core)

    def stream(self) -> int:
        """Returns the `cudaStream_t` of this thread's current stream."""
        return raw_stream(self.torch_device.index)

    def capturing(self) -> bool:
        """Whether this thread's current stream is being captured into a CUDA graph."""
        assert self.core is not None
        return self.core.capturing(self.stream())

    def now(self) -> Mark:
        """Records an event on the current stream; its time is known once the event completes."""
        return DeviceMark(self._clock, self._clock.mark(self.stream()))

    def anchor(self) -> None:
        """Relates the device's time to the host's anew. Call it now and then, for exact marks."""
        self._clock.anchor()

    def identity(self) -> str:
        """Returns a text that identifies the GPU on its host, equal in all processes there."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        return str(getattr(properties, "uuid", None) or f"{properties.name} {self.torch_device}")

    def record_stream(self, tensors: Sequence[torch.Tensor]) -> None:
        """Calls `record_stream` with the current stream for each tensor."""
        stream = torch.cuda.current_stream(self.torch_device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def fence(self) -> Fence | None:
        """Records an event on the current stream, for other streams to wait on."""
        return Fence(self.torch_device)

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """Starts a copy of a small 1-d tensor to page-locked host memory."""
        values = torch.empty(len(tensor), dtype=tensor.dtype, device="cpu", pin_memory=True)
        values.copy_(tensor, non_blocking=True)
        return Fetched(values, self.now())

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a CPU tensor to this device through page-locked memory, without blocking."""
        # Torch does not reuse the page-locked memory before the copy has completed.
        pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return pinned.to(self.torch_device, non_blocking=True)

    def record_update(
        self, engine: _core.Engine, tensors: Sequence[int], start: Mark, end: Mark
    ) -> None:
        """Adds the update to the timeline, with times that the device measures."""
        assert isinstance(start, DeviceMark)
        assert isinstance(end, DeviceMark)
        engine.record_update(tensors, start.moment, end.moment)

    def record_pass(self, engine: _core.Engine, name: str, start: Mark, end: Mark) -> None:
        """Adds the pass to the timeline, with times that the device measures."""
        assert isinstance(start, DeviceMark)
        assert isinstance(end, DeviceMark)
        engine.record_pass(name, start.moment, end.moment)


class DeviceMark:
    """A point in the work of a CUDA stream, whose time is known when the device reaches it.

    Attributes:
        moment: The same point as the engine's object.
    """

    __slots__ = ("_clock", "moment")

    def __init__(self, clock: _core.DeviceClock, moment: _core.Moment) -> None:
        self._clock, self.moment = clock, moment

    def __float__(self) -> float:
        return self._clock.seconds(self.moment)

    def __sub__(self, other: Mark) -> float:
        if isinstance(other, DeviceMark):
            return self._clock.between(other.moment, self.moment)
        return float(self) - float(other)

    def passed(self) -> bool:
        """Whether the device has reached the point, so that `float()` does not block."""
        return self._clock.passed(self.moment)


class Fence:
    """An event on a CUDA device's current stream, which other streams can wait on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream = torch.cuda.current_stream(device)
        self._behind = {stream.cuda_stream}  # streams that are ordered after the event
        self._event = stream.record_event()

    def wait(self, stream: int) -> None:
        """Makes later work on the calling thread's current stream wait for the event.

        Args:
            stream: Handle of the current stream. A stream under capture needs no wait, because the
                device was idle when the capture began.
        """
        if stream not in self._behind and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._behind.add(stream)


class Fetched:
    """Values that are being copied to the host.

    Args:
        values: 1-d CPU tensor that receives them.
        arrive: Time at which the copy completes; None if it has completed.
    """

    def __init__(self, values: torch.Tensor, arrive: Mark | None) -> None:
        self._values, self._arrive = values, arrive

    def get(self) -> list[float]:
        """Waits for the copy and returns the values."""
        if self._arrive is not None:
            float(self._arrive)
        values: list[float] = self._values.tolist()
        return values


class _HasDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


def passed(mark: Mark) -> bool:
    """Whether `float(mark)` does not block."""
    return not isinstance(mark, DeviceMark) or mark.passed()


@cache
def _cuda(index: int) -> CudaDevice:
    return CudaDevice(torch.device("cuda", index))


def device_at(device: torch.device) -> Device:
    """Returns the `Device` of a CPU or CUDA device; the current one if `device` has no index."""
    if device.type == "cpu":
        return Device()
    return _cuda(torch.cuda.current_device() if device.index is None else device.index)


def device_of(names: Sequence[str], tensors: Sequence[_HasDevice]) -> Device:
    """Returns the device that all tensors are on.

    Args:
        names: Names of the tensors, for messages.
        tensors: At least one tensor.

    Raises:
        UsageError: The tensors are on several devices, or on neither the CPU nor a CUDA device.
    """
    first = tensors[0].device
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.device.type not in ("cpu", "cuda"):
            raise UsageError(
                f"parameter '{name}' is on {tensor.device}; usbyte moves gradients on the CPU and "
                "on CUDA devices"
            )
        if tensor.device != first:
            raise UsageError(
                f"parameter '{names[0]}' is on {first} and '{name}' on {tensor.device}; one "
                "optimizer's parameters must be on one device: wrap one optimizer for each"
            )
    return device_at(first)

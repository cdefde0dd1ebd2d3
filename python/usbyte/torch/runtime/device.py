"""Where gradients are, and how work there is put in order: on the host, or on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.torch_private import raw_stream


class Mark(Protocol):
    """When something happened, seconds on the steady clock, like a float.

    To ask for it may be to wait until it has. A difference of two stays exact however long after
    the last `Device.anchor` they are.
    """

    def __float__(self) -> float: ...
    def __sub__(self, other: Any, /) -> float: ...


class Device:
    """The host: a call returns when its work is done.

    Attributes:
        core: The device as the engine sees it; None for the host.
        torch_device: The same as torch names it.
        lag: Steps after which the host looks at what the device has computed; one that is not
            further ahead than that does not wait.
    """

    core: _core.Cuda | None = None
    torch_device = torch.device("cpu")
    lag = 0

    def stream(self) -> int:
        """The stream that work of this thread goes to."""
        return 0

    def capturing(self) -> bool:
        """Whether this thread's work goes into a CUDA graph, to run when that is replayed."""
        return False

    def now(self) -> Mark:
        """When the work that was given to the device so far is over; has no time in a graph."""
        return _core.now_s()

    def anchor(self) -> None:
        """Keeps the times to come exact; called now and then."""

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Work on the present stream uses the tensors, which may belong to another one and go."""

    def fence(self) -> Fence | None:
        """Stands behind the work that this thread has given to the device; None for the host."""
        return None

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """What a 1-d tensor of few elements holds behind the work given to the device so far."""
        return Fetched(tensor.clone(), None)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same as a tensor of the host, where this is; the host does not wait."""
        return tensor

    def record_update(
        self, engine: _core.Engine, tensors: Sequence[int], start: Mark, end: Mark
    ) -> None:
        """Adds an update to the engine's timeline."""
        engine.record_update(tensors, float(start), float(end))


class CudaDevice(Device):
    """A CUDA device: work is put on streams, and the host goes on.

    Args:
        device: As torch names it, with an index.
        core: The same for the engine; made from the index if None.
    """

    lag = 8

    def __init__(self, device: torch.device, core: _core.Cuda | None = None) -> None:
        self.torch_device = device
        self.core = core if core is not None else _core.make_cuda(device.index)
        self._clock = _core.DeviceClock(self.core)

    def stream(self) -> int:
        """See `Device`."""
        return raw_stream(self.torch_device.index)

    def capturing(self) -> bool:
        """See `Device`."""
        assert self.core is not None
        return self.core.capturing(self.stream())

    def now(self) -> Mark:
        """See `Device`."""
        return DeviceMark(self._clock, self._clock.mark(self.stream()))

    def anchor(self) -> None:
        """See `Device`."""
        self._clock.anchor()

    def identity(self) -> str:
        """Another text for each GPU of a host, the same in all its processes."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        return str(getattr(properties, "uuid", None) or f"{properties.name} {self.torch_device}")

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Device`."""
        stream = torch.cuda.current_stream(self.torch_device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def fence(self) -> Fence | None:
        """See `Device`."""
        return Fence(self.torch_device)

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """See `Device`."""
        values = torch.empty(len(tensor), dtype=tensor.dtype, device="cpu", pin_memory=True)
        values.copy_(tensor, non_blocking=True)
        return Fetched(values, self.now())

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Device`; torch keeps the page-locked memory until it has been copied."""
        pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return pinned.to(self.torch_device, non_blocking=True)

    def record_update(
        self, engine: _core.Engine, tensors: Sequence[int], start: Mark, end: Mark
    ) -> None:
        """See `Device`."""
        assert isinstance(start, DeviceMark)
        assert isinstance(end, DeviceMark)
        engine.record_update(tensors, start.moment, end.moment)


class DeviceMark:
    """A moment on a device.

    Attributes:
        moment: For the engine.
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
        """Whether `float` does not have to wait."""
        return self._clock.passed(self.moment)


class Fence:
    """What is on a CUDA device's current stream so far, for other streams to come behind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream = torch.cuda.current_stream(device)
        self._behind = {stream.cuda_stream}  # streams that are
        self._event = stream.record_event()

    def wait(self, stream: int) -> None:
        """Later work on the calling thread's stream, which this is, comes behind it.

        A stream that is captured does so by itself: the device was idle when that began.
        """
        if stream not in self._behind and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._behind.add(stream)


class Fetched:
    """Values on their way to the host.

    Args:
        values: Where they will be, 1-d.
        arrive: When; None if they are there.
    """

    def __init__(self, values: torch.Tensor, arrive: Mark | None) -> None:
        self._values, self._arrive = values, arrive

    def get(self) -> list[float]:
        """The values; waits for them."""
        if self._arrive is not None:
            float(self._arrive)
        values: list[float] = self._values.tolist()
        return values


class _HasDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


def passed(mark: Mark) -> bool:
    """Whether `float(mark)` does not have to wait."""
    return not isinstance(mark, DeviceMark) or mark.passed()


@cache
def _cuda(index: int) -> CudaDevice:
    return CudaDevice(torch.device("cuda", index))


def device_at(device: torch.device) -> Device:
    """The host, or a CUDA device: the current one if `device` has no index."""
    if device.type == "cpu":
        return Device()
    return _cuda(torch.cuda.current_device() if device.index is None else device.index)


def device_of(names: Sequence[str], tensors: Sequence[_HasDevice]) -> Device:
    """The device that all tensors are on.

    Args:
        names: Of the tensors, for messages.
        tensors: One at least.

    Raises:
        UsageError: They are on several, or on one that is neither the host nor a CUDA device.
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

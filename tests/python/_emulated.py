# SPDX-License-Identifier: Apache-2.0
"""A device that is not there: tensors of the host, streams that are threads and late."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from usbyte import _core
from usbyte.torch.runtime.device import CudaDevice, Fetched


class EmulatedDevice(CudaDevice):
    """Kernels of torch run when they are called, as if each launch blocked the host.

    Everything of usbyte's own, copies and events, goes as it does on a device.
    """

    def __init__(self, most_delay_s: float = 2e-4) -> None:
        self.cuda = _core.make_emulated_cuda(most_delay_s=most_delay_s)
        super().__init__(torch.device("cpu"), self.cuda)

    def stream(self) -> int:
        return 0

    def identity(self) -> str:
        return "emulated"

    def record_stream(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def fence(self) -> None:
        return None

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        return Fetched(tensor.clone(), self.now())

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def emulate(most_delay_s: float = 2e-4) -> EmulatedDevice:
    """From now on parameters of this process count as on that device.

    Args:
        most_delay_s: Seconds by which work on a stream is late at most.
    """
    device = EmulatedDevice(most_delay_s)
    module = importlib.import_module("usbyte.torch.runtime.device")
    module.device_at = lambda _: device
    return device

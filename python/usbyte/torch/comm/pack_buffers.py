# SPDX-License-Identifier: Apache-2.0
"""Buffers that pack several blocks of gradients into one contiguous message."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch


class PackedMessage(NamedTuple):
    """A packed message.

    Attributes:
        views: The blocks that are packed; 1-d tensors of one dtype.
        buffer: Memory from the pool; 1-d, uint8, on the CPU.
        message: The elements of the views, concatenated, at the beginning of `buffer`.
    """

    views: list[torch.Tensor]
    buffer: torch.Tensor
    message: torch.Tensor


class PackBufferPool:
    """A pool of buffers for ops of several blocks, which are sent as one message.

    Buffers are reused, because touching new pages costs more than the copy. There are as many
    buffers as such ops have been in flight at once. The launching thread calls `pack` and a waiter
    thread calls `unpack`. The buffer of a failed op does not return to the pool, because the
    backend may still write to it.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()  # guards _free

    def pack(self, views: list[torch.Tensor]) -> PackedMessage:
        """Concatenates the views into one message.

        Args:
            views: 1-d CPU tensors of one dtype, at least one.
        """
        size = sum(view.nbytes for view in views)
        with self._lock:
            self._free.sort(key=len)
            fits = next((i for i, buffer in enumerate(self._free) if len(buffer) >= size), -1)
            buffer = self._free.pop(fits) if self._free else None
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        message = torch.cat(views, out=buffer[:size].view(views[0].dtype))
        return PackedMessage(views, buffer, message)

    def unpack(self, staged: PackedMessage) -> None:
        """Copies the message back into its views and returns the buffer to the pool.

        Do not use `staged` afterwards.
        """
        parts = staged.message.split([view.numel() for view in staged.views])
        for view, part in zip(staged.views, parts, strict=True):
            view.copy_(part)
        with self._lock:
            self._free.append(staged.buffer)

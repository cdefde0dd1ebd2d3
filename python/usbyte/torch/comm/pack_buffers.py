# SPDX-License-Identifier: Apache-2.0
"""Buffers in which several blocks of gradients become one message."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch


class PackedMessage(NamedTuple):
    """A packed message.

    Attributes:
        views: Where its elements come from and go to.
        buffer: 1-d uint8.
        message: The elements, at the beginning of the buffer.
    """

    views: list[torch.Tensor]
    buffer: torch.Tensor
    message: torch.Tensor


class PackBufferPool:
    """Memory in which ops of several blocks travel as one message.

    It is kept, as new pages cost more than the copy: as many buffers as there were such ops in
    flight. Who launches packs, the waiters unpack. A message whose op has failed keeps its
    buffer: the backend may still write there.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()  # guards _free

    def pack(self, views: list[torch.Tensor]) -> PackedMessage:
        """Copies the views' elements into one message."""
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
        """Copies the elements back; `staged` is not used any more."""
        parts = staged.message.split([view.numel() for view in staged.views])
        for view, part in zip(staged.views, parts, strict=True):
            view.copy_(part)
        with self._lock:
            self._free.append(staged.buffer)

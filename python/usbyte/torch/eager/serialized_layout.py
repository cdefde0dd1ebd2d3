# SPDX-License-Identifier: Apache-2.0
"""Memory layouts of serialized tensors, and which elements are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Largest ratio of spanned memory to elements. A column of a large matrix must not take as much
# memory on the receiving rank as the whole matrix.
_MOST_GAPS = 8

#: Dtypes that can be sent, by name without "torch.".
DTYPES = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype) and not str(found).startswith(("torch.q", "torch.bits"))
}


@dataclass(frozen=True)
class Layout:
    """Shape, strides, dtype and device of a tensor.

    Attributes:
        shape: Sizes of the dimensions.
        strides: Strides of the dimensions, in elements.
        dtype: Dtype of the elements.
        device: Device type, such as "cpu" or "cuda".
    """

    shape: list[int]
    strides: list[int]
    dtype: torch.dtype
    device: str

    @property
    def bytes(self) -> int:
        """Bytes that are sent: elements that share memory are sent once."""
        return _distinct_numel(self.shape, self.strides) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Allocates an uninitialised tensor; on the CPU if this rank has no such device."""
        try:
            return self._empty_on(self.device)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError, TypeError):
            if self.device == "cpu":
                raise
            return self._empty_on("cpu")

    def _empty_on(self, device: str) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def _distinct_numel(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of distinct memory elements of a tensor."""
    if 0 in shape:
        return 0
    return math.prod(n for n, step in zip(shape, strides, strict=True) if step > 0)


def travels(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of this layout can be sent with its strides.

    Elements may share memory only along whole dimensions (stride 0), and gaps must be limited:
    at most `_MOST_GAPS` memory elements for each element.
    """
    if 0 in shape:
        return True
    reach = 1
    for step, n in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1 and s > 0):
        if step < reach:
            return False
        reach += step * (n - 1)
    return reach <= _MOST_GAPS * _distinct_numel(shape, strides)


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view with each memory element once, its dimensions in memory order."""
    if 0 not in tensor.shape:
        for dim, step in enumerate(tensor.stride()):
            if step == 0:  # made by expand()
                tensor = tensor.narrow(dim, 0, 1)
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def dtype_name(tensor: torch.Tensor) -> str:
    """Returns the name of the tensor's dtype, as in `DTYPES`."""
    return str(tensor.dtype).removeprefix("torch.")

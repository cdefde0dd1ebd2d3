"""How tensors lie in memory, and which of their elements travel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Elements of memory for each element: a column of a large matrix must not take the matrix's memory.
_MOST_GAPS = 8

#: By name, what can travel.
DTYPES = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype) and not str(found).startswith(("torch.q", "torch.bits"))
}


@dataclass(frozen=True)
class Layout:
    """How the elements of a tensor lie in memory.

    Attributes:
        shape: Of the tensor.
        strides: In elements.
        dtype: Of the tensor.
        device: Type of its device.
    """

    shape: list[int]
    strides: list[int]
    dtype: torch.dtype
    device: str

    @property
    def bytes(self) -> int:
        """What travels: every element of memory once."""
        return _distinct_numel(self.shape, self.strides) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """An uninitialised tensor; on the CPU if this rank has no such device."""
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
    """Elements of memory that a tensor's elements are in."""
    if 0 in shape:
        return 0
    return math.prod(n for n, step in zip(shape, strides, strict=True) if step > 0)


def travels(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements share memory along whole dimensions only, and gaps are not too large."""
    if 0 in shape:
        return True
    reach = 1
    for step, n in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1 and s > 0):
        if step < reach:
            return False
        reach += step * (n - 1)
    return reach <= _MOST_GAPS * _distinct_numel(shape, strides)


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A view that has every element of memory once, in the order of memory."""
    if 0 not in tensor.shape:
        for dim, step in enumerate(tensor.stride()):
            if step == 0:  # as expand() makes it
                tensor = tensor.narrow(dim, 0, 1)
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype as `DTYPES` names it."""
    return str(tensor.dtype).removeprefix("torch.")

"""Reduction operators and their arithmetic on one flat buffer."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
import torch.distributed as dist

from usbyte.errors import UsageError

# What Gloo reduces; complex numbers as pairs, bool as bytes.
_REDUCIBLE = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.int8, torch.uint8, torch.int32, torch.int64,
        torch.complex64, torch.complex128, torch.bool,
    }
)  # fmt: skip


class ReduceOp(enum.Enum):
    """How values of different ranks become one.

    Averages of integers are truncated toward zero. MIN and MAX are NaN where one rank's value is.
    Of bool, SUM and MAX are "any", MIN and PRODUCT are "all".
    """

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    def __repr__(self) -> str:
        return self.value.capitalize()

    __str__ = __repr__


_BACKEND = {
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
_ON_BYTES_OF_BOOL = {
    ReduceOp.SUM: dist.ReduceOp.MAX,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.PRODUCT: dist.ReduceOp.MIN,
}


def check_reducible(what: str, dtype: torch.dtype, op: ReduceOp) -> None:
    """Refuses what cannot be reduced.

    Args:
        what: Name of the operation, for the message.
        dtype: Of the tensor.
        op: The reduction.

    Raises:
        UsageError: `dtype` cannot be reduced at all, or not with `op`.
    """
    if not isinstance(op, ReduceOp):
        raise UsageError(f"{what}: op must be Average, Sum, Min, Max or Product, not {op!r}")
    if dtype not in _REDUCIBLE:
        raise UsageError(f"{what} cannot reduce {dtype}: convert to int32 or float32 before")
    if dtype == torch.bool and op is ReduceOp.AVERAGE:
        raise UsageError(f"{what} cannot average torch.bool: use Max for any, Min for all")
    if dtype.is_complex and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise UsageError(f"{what} of {dtype} needs Sum or Average, not {op}")


def reduce_flat(
    flat: torch.Tensor,
    op: ReduceOp,
    factors: tuple[float, float],
    size: int,
    collective: Callable[[torch.Tensor, dist.ReduceOp.RedOpType], None],
) -> None:
    """Reduces a buffer in place: scale, collective, scale.

    Args:
        flat: 1-d contiguous, of a dtype that `check_reducible` admits.
        op: The reduction.
        factors: Multiplied before and after the reduction.
        size: Number of ranks, for AVERAGE.
        collective: Reduces the buffer it is given, which has flat's storage but maybe another dtype
            (and length, for complex numbers: twice as long).
    """
    before, after = factors
    _scale(flat, before)
    if flat.dtype == torch.bool:
        collective(flat.view(torch.uint8), _ON_BYTES_OF_BOOL[op])
    else:
        numbers = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        collective(numbers, _BACKEND[op])
    if op is ReduceOp.AVERAGE:
        flat.div_(size, rounding_mode=None if _fractional(flat) else "trunc")
    _scale(flat, after)


def _scale(flat: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if _fractional(flat):
        flat.mul_(factor)
    else:
        flat.copy_(flat.double().mul_(factor))  # truncates toward zero


def _fractional(flat: torch.Tensor) -> bool:
    return flat.is_floating_point() or flat.is_complex()

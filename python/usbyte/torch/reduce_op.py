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

    Averages of floating-point and complex numbers divide by the number of ranks before they add up,
    as with gradients, so that the sum does not overflow. Averages of integers are exact, truncated
    toward zero. Sums and products of integers wrap around, as torch's do. MIN and MAX are NaN where
    one rank's value is.
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


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

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
    """Reduces a buffer in place: scale, divide if it is an average, collective, scale.

    Args:
        flat: 1-d contiguous, of a dtype that `check_reducible` admits.
        op: The reduction.
        factors: Multiplied before and after the reduction.
        size: Number of ranks, for AVERAGE.
        collective: Reduces the buffer it is given: 1-d, with the same number of elements, one or
            two, for each of flat's.
    """
    before, after = factors
    _scale(flat, before)
    if op is ReduceOp.AVERAGE and not _fractional(flat):
        _average_integers(flat, size, collective)
    elif flat.dtype == torch.bool:
        collective(flat.view(torch.uint8), _ON_BYTES_OF_BOOL[op])
    else:
        if op is ReduceOp.AVERAGE and size > 1:
            flat.mul_(1 / size)
        numbers = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        collective(numbers, _BACKEND[op])
    _scale(flat, after)


def _average_integers(
    flat: torch.Tensor,
    size: int,
    collective: Callable[[torch.Tensor, dist.ReduceOp.RedOpType], None],
) -> None:
    """Averages integers exactly: sums of quotients and of remainders do not wrap around."""
    wide = flat.long()
    quotients = wide.div(size, rounding_mode="floor")
    numbers = torch.stack([quotients, wide - quotients * size], dim=1)
    collective(numbers.view(-1), dist.ReduceOp.SUM)
    quotients, remainders = numbers.unbind(1)
    floors = quotients + remainders.div(size, rounding_mode="floor")
    exact = remainders.remainder(size) == 0
    flat.copy_(floors + ((floors < 0) & ~exact))  # toward zero


def _scale(flat: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if _fractional(flat):
        flat.mul_(factor)
    else:
        flat.copy_(flat.double().mul_(factor))  # truncates toward zero


def _fractional(flat: torch.Tensor) -> bool:
    return flat.is_floating_point() or flat.is_complex()

# SPDX-License-Identifier: Apache-2.0
"""Reductions of eager collectives and their arithmetic on a 1-d tensor."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
import torch.distributed as dist

from usbyte.errors import UsageError

# The dtypes that Gloo reduces. Complex numbers are sent as pairs, bool as bytes.
_REDUCIBLE = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.int8, torch.uint8, torch.int32, torch.int64,
        torch.complex64, torch.complex128, torch.bool,
    }
)  # fmt: skip


class ReduceOp(enum.Enum):
    """The reduction that combines the values of all ranks.

    AVERAGE of floating-point and complex numbers divides by the number of ranks before the sum, as
    for gradients, so that the sum does not overflow. AVERAGE of integers is exact and truncates
    toward zero. SUM and PRODUCT of integers wrap around, as in torch. MIN and MAX return NaN where
    the value of any rank is NaN. For bool, SUM and MAX mean "any", MIN and PRODUCT mean "all", and
    AVERAGE is refused. Complex numbers support SUM and AVERAGE only.
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
    """Raises an error if tensors of `dtype` cannot be reduced with `op`.

    Args:
        what: Name of the operation, for the message.
        dtype: The dtype of the tensor.
        op: The reduction.

    Raises:
        UsageError: `op` is not a `ReduceOp`, or `dtype` cannot be reduced at all, or not with `op`.
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
    """Reduces `flat` in place: scale, divide (AVERAGE only), run the collective, scale.

    Args:
        flat: Shape [n], contiguous, of a dtype that `check_reducible` admits.
        op: The reduction.
        factors: Multipliers applied before and after the reduction.
        size: Number of ranks; used by AVERAGE.
        collective: Reduces the 1-d tensor that it gets, in place, over all ranks. The tensor has n
            elements, or 2 n where each element of `flat` is sent as two numbers.
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
    """Averages integers exactly, in place.

    Quotients and remainders by `size` are summed separately, because the sum of the values
    themselves could wrap around.
    """
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

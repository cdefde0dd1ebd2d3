# SPDX-License-Identifier: Apache-2.0
"""Memory layout of gradients in the flat buffer: dtypes, strides, and the control tensor."""

from __future__ import annotations

import torch
from torch import nn

from usbyte.errors import UsageError
from usbyte.planning.layout import CONTROL_TENSOR as CONTROL_TENSOR

# The control tensor is the first tensor of the flat buffer. It has a used flag for each parameter,
# set by the ranks that used the parameter in this step, then the votes, then the checksum flags of
# `StepChecksum`. It is next to the parameter that the forward pass needs first, whose gradient is
# ready last, so that one bucket can take both.

#: Votes of a rank: it wants a new plan, it has data, it has joined and has none, it has updated
#: parameters with the last reduced gradients, it has skipped that update. Each vote is a 0/1 flag
#: that is tested for non-zero: a sum of flags in the gradients' dtype, perhaps scaled by 1/size, is
#: no exact count.
NUM_VOTES = 5
#: Checksum flags behind the votes.
NUM_CHECK_FLAGS = 32

_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def rows_of(param: torch.Tensor) -> int:
    """Returns the number of rows of a parameter seen as a matrix, for codecs that factor matrices.

    This is the size of the dimension with the largest stride; 1 for vectors and empty tensors.
    """
    if param.dim() < 2 or param.numel() == 0:
        return 1
    return max(zip(param.stride(), param.shape, strict=True))[1]


def dtype_name(name: str, param: nn.Parameter) -> str:
    """Returns the core's name of a parameter's dtype, as "float32".

    Raises:
        UsageError: Gradients of this dtype cannot be sent.
    """
    try:
        return _DTYPES[param.dtype]
    except KeyError:
        remedy = ""
        if param.is_complex():
            remedy = (
                ": keep it as nn.Parameter(torch.view_as_real(...)), and take "
                "torch.view_as_complex of that in forward"
            )
        raise UsageError(
            f"parameter '{name}' has dtype {param.dtype}; gradients can be "
            + ", ".join(_DTYPES.values())
            + remedy
        ) from None


def is_dense(param: torch.Tensor) -> bool:
    """Returns whether the elements fill one contiguous memory range, without gaps or overlaps."""
    # empty_like preserves strides only of tensors that have neither gaps nor overlaps.
    return torch.empty_like(param, device="meta").stride() == param.stride()


def laid_out_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors of one shape have the same dtype and order of elements."""
    if a.dtype != b.dtype or a.is_neg() != b.is_neg():
        return False
    strides = a.stride(), b.stride()
    if strides[0] == strides[1]:
        return True
    return all(size <= 1 or x == y for size, x, y in zip(a.shape, *strides, strict=True))


def laid_out_like(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Returns `value` with the strides of `param`: `value` itself if it has them, else a copy.

    Values from a checkpoint need not have the strides of the parameter. The shapes are equal.
    """
    if value.stride() == param.stride():
        return value
    return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)


def used_numel(params: int) -> int:
    """Returns the number of elements of the control tensor for `params` parameters.

    It is rounded up to a multiple of 8, so that the gradients behind it are aligned: kernels move
    16 bytes at a time where data is aligned, which are 8 elements of the smallest dtype.
    """
    return -(-(params + NUM_VOTES + NUM_CHECK_FLAGS) // 8) * 8

"""Memory layout of gradients in the flat buffer: dtypes, strides, and the control tensor."""

from __future__ import annotations

import torch
from torch import nn

from usbyte.errors import UsageError

#: Name of the control tensor, the first tensor of the flat buffer. It holds, in this order:
#: one used flag for each parameter, set by the ranks that used the parameter in this step;
#: `NUM_VOTES` votes: this rank wants a new plan, has data, has joined and so has no data, updated
#: its parameters with the previous sums, skipped that update;
#: `NUM_CHECK_FLAGS` flags of the step checksum, see `StepChecksum`.
#: Votes are flags that are tested for non-zero, not counts: a count would not survive the rounding
#: of the gradients' dtype, nor the scaling of averages.
#: The control tensor lies next to the parameter that the forward pass needs first. The gradient of
#: that parameter is ready last, so one bucket can hold both.
CONTROL_TENSOR = "usbyte.used"
NUM_VOTES = 5
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

# SPDX-License-Identifier: Apache-2.0
"""Checks that a tensor's values can be read by address, from memory of its own."""

from __future__ import annotations

import torch

from usbyte.errors import UsageError
from usbyte.torch.torch_private import is_functorch_tensor


def check_plain(what: str, tensor: torch.Tensor, or_sparse: bool = False) -> None:
    """Raises UsageError for a tensor that must not be read by address.

    Args:
        what: Names the operation; the error message begins with it.
        tensor: Any tensor.
        or_sparse: Whether sparse COO tensors are accepted, too.

    Raises:
        UsageError: The tensor is not a dense tensor with memory of its own. The message names its
            class and what to pass instead.
    """
    found = flaw_of(tensor, or_sparse)
    if found is not None:
        flaw, remedy = found
        raise UsageError(f"{what} cannot take a {type(tensor).__name__} {flaw}: {remedy}")


def check_sendable(what: str, tensor: torch.Tensor, or_sparse: bool = False) -> None:
    """Raises UsageError for a parameter or gradient that must not be read by address.

    Args:
        what: Names the tensor, such as "parameter 'x'"; the error message begins with it.
        tensor: The parameter or gradient.
        or_sparse: Whether sparse COO tensors are accepted, too.

    Raises:
        UsageError: The tensor is not a dense tensor with memory of its own. The message names its
            class and what to change.
    """
    found = flaw_of(tensor, or_sparse)
    if found is None:
        return
    flaw, remedy = found
    if hasattr(tensor, "to_local"):
        remedy = (
            "leave out fully_shard(), parallelize_module() and distribute_tensor(), or "
            "DistributedOptimizer"
        )
    raise UsageError(f"{what} is a {type(tensor).__name__} {flaw}: {remedy}")


def check_dtype(name: str, grad: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises UsageError for a gradient of another dtype than its parameter had.

    Args:
        name: Name of the parameter.
        grad: Its gradient.
        dtype: Dtype of the parameter when the optimizer was wrapped.
    """
    if grad.dtype != dtype:
        raise UsageError(
            f"the gradient of '{name}' is of {grad.dtype}, and was of {dtype} when the optimizer "
            "was wrapped: wrap it again after the model's dtype is changed"
        )


def flaw_of(tensor: torch.Tensor, or_sparse: bool = False) -> tuple[str, str] | None:
    """Returns why a tensor must not be read by address.

    Args:
        tensor: Any tensor.
        or_sparse: Whether sparse COO tensors are accepted, too.

    Returns:
        Two parts of a message: what the tensor is, to follow the name of its class, and what to
        pass instead. None if the tensor can be read by address.
    """
    found = _flaw_of_class(tensor)
    if found is not None or (or_sparse and tensor.layout == torch.sparse_coo):
        return found
    if tensor.is_nested:
        return "that is nested", "pass its values() and offsets(), or to_padded_tensor(0.0)"
    if tensor.layout != torch.strided:
        return f"of layout {tensor.layout}", "pass tensor.to_dense()"
    if tensor.is_quantized:
        return "that is quantized", "pass tensor.dequantize(), or tensor.int_repr()"
    if _needed_bytes(tensor) > tensor.untyped_storage().nbytes():
        return (
            "whose memory has been freed",
            "pass it while it has data; FSDP, for example, frees parameters outside of forward "
            "and backward",
        )
    return None


def _flaw_of_class(tensor: torch.Tensor) -> tuple[str, str] | None:
    kind = type(tensor)
    if is_functorch_tensor(tensor):
        return "inside a torch.func transform", "call this outside of grad(), vmap() and the like"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return "whose values are not in memory of its own", _instead_of(kind)
    if torch.nn.parameter.is_lazy(tensor):
        return "that has no shape yet", "run one batch through its lazy module before"
    if tensor.device.type == "meta":
        return (
            "on the meta device, which has no data",
            'materialize it before, as with module.to_empty(device="cpu") and load_state_dict()',
        )
    if tensor._is_zerotensor():
        return "that is a zero without memory", "pass torch.zeros_like(tensor)"
    return None


def _instead_of(kind: type[torch.Tensor]) -> str:
    """Returns what to pass instead of a tensor whose class has a `__torch_dispatch__`."""
    if hasattr(kind, "to_local"):
        return "pass tensor.to_local(), which is this rank's part, or tensor.full_tensor()"
    if hasattr(kind, "fake_mode") or kind.__name__ == "FakeTensor":
        return "call this with real tensors, outside of FakeTensorMode"
    if hasattr(kind, "trigger_wait"):
        return "pass tensor.wait()"
    if hasattr(kind, "dequantize") and hasattr(kind, "tensor_data_names"):
        return "pass tensor.dequantize()"
    if hasattr(kind, "get_mask"):
        return "pass tensor.get_data() and tensor.get_mask()"
    return "pass plain tensors, such as those that it is made of"


def _needed_bytes(tensor: torch.Tensor) -> int:
    """Returns the storage size in bytes that the tensor's shape, strides and offset need."""
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + reach + 1) * tensor.element_size()

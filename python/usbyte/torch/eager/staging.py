# SPDX-License-Identifier: Apache-2.0
"""Copies between the user's tensors and the contiguous CPU tensors that collectives send."""

from __future__ import annotations

import math

import torch

from usbyte.errors import UsageError
from usbyte.torch.runtime.tensor_checks import check_plain


def stage(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """Returns the values as a contiguous CPU tensor without autograd.

    Args:
        tensor: A tensor that `check_plain` accepts.
        copy: Whether the result must not share memory with `tensor`. If False, it shares memory
            where `tensor` is contiguous and on the CPU.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    moved = plain.to("cpu").contiguous()
    check_plain("a collective", moved)  # under FakeTensorMode and the like, `to` makes others
    shared = moved.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return moved.clone() if copy and shared else moved


def check_writable(what: str, tensor: torch.Tensor) -> None:
    """Raises UsageError if elements of `tensor` share memory; the message begins with `what`."""
    shared = any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if shared and tensor.numel():  # empty channels_last tensors have strides of 0, too
        raise UsageError(
            f"{what} cannot write to a tensor whose elements share memory, as those of expand() "
            "do: pass tensor.contiguous()"
        )


def deliver(staged: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copies a result into the user's tensor, unless both are the same memory.

    Returns:
        `target`.
    """
    if staged.data_ptr() != target.data_ptr() or staged.device != target.device:
        target.detach().copy_(staged)
    return bump_version(target)


def bump_version(target: torch.Tensor) -> torch.Tensor:
    """Bumps the version counter, so that a backward that needs the previous values raises.

    Returns:
        `target`.
    """
    if not target.is_inference():  # inference tensors have no version counter
        torch.autograd.graph.increment_version(target)  # backends write without doing so
    return target


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor's memory as 1-d uint8, so that any dtype can be sent."""
    return flat_view(tensor).view(torch.uint8)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor as a 1-d view of the same memory."""
    # view(-1) keeps unusual strides of tensors with one element; view(dtype) then raises.
    return tensor.as_strided((tensor.numel(),), (1,))


def row_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of one row, which is an index of the first dimension."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def bytes_tensor(payload: bytes) -> torch.Tensor:
    """Returns a copy of `payload` as a 1-d uint8 tensor."""
    if not payload:  # frombuffer raises for an empty buffer
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)

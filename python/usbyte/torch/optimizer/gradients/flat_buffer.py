# SPDX-License-Identifier: Apache-2.0
"""The flat buffer: all gradients of an optimizer, in the plan's order of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from usbyte._core import Plan, TensorSpec
from usbyte.torch.layout import NUM_CHECK_FLAGS, NUM_VOTES, is_dense


class FlatBuffer:
    """A flat buffer and its views for one plan.

    Args:
        plan: Its tensors are the control tensor and then the gradients of `params`.
        params: Parameters in the plan's order of tensors; sparse ones are last.
        buffer: 1-d uint8, of the plan's size in bytes, on the device of the parameters.

    Attributes:
        buffer: 1-d uint8, the whole flat buffer.
        flags: 1-d, the whole control tensor.
        used: 1-d, the part of `flags` that is in use: one used flag for each parameter in the
            plan's order, then the step votes, then the checksum flags.
        votes: 1-d, the step votes and the checksum flags.
        grads: Views of the gradients of all dense parameters, with the parameter's shape and, if it
            has no gaps, its strides. Each view has its own version counter, so that a write to one
            gradient is not taken for a write to another.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[nn.Parameter],
        buffer: torch.Tensor,
    ) -> None:
        self.buffer = buffer
        flags, *tensors = plan.tensors
        self.flags = self._flat(plan, flags)
        self.used = self.flags[: len(params) + NUM_VOTES + NUM_CHECK_FLAGS]
        self.votes = self.used[len(params) :]
        self.grads = []
        for spec, param in zip(tensors, params, strict=True):
            if spec.sparse:
                continue
            flat = self._flat(plan, spec)
            view = flat.view(param.shape)
            if is_dense(param):
                view = flat.as_strided(param.shape, param.stride())
            self.grads.append(view.data)

    def _flat(self, plan: Plan, spec: TensorSpec) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        begin = plan.byte_offset(spec.offset)
        return self.buffer[begin : begin + spec.numel * dtype.itemsize].view(dtype)

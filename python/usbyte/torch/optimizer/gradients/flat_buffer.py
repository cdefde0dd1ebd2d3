# SPDX-License-Identifier: Apache-2.0
"""The arena: one flat buffer that holds every gradient, in the plan's order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from usbyte._core import Plan, TensorSpec
from usbyte.torch.layout import NUM_CHECK_FLAGS, NUM_VOTES, is_dense


class FlatBuffer:
    """Buffer and views for one plan.

    Args:
        plan: Its tensors are `CONTROL_TENSOR` and then the parameters' gradients.
        params: In the plan's order, without `CONTROL_TENSOR`; sparse ones last.
        buffer: 1-d uint8 of the plan's size, where they are.

    Attributes:
        buffer: 1-d uint8.
        flags: 1-d, all of `CONTROL_TENSOR`.
        used: 1-d, of those the flags, one for each parameter, in the plan's order, the votes and
            the flags of a checksum.
        votes: 1-d, the votes and those.
        grads: For each dense parameter its gradient's view, of its shape and strides. Each
            view has a version counter of its own, so that a write to one gradient can be told from
            a write to another.
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

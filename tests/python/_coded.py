# SPDX-License-Identifier: Apache-2.0
"""Codecs as tests need them."""

from __future__ import annotations

import torch.distributed as dist

import usbyte.torch as ub

CODECS = [
    ub.Compression.fp16, ub.Compression.bf16, ub.Compression.fp8, ub.Compression.int8,
    ub.Compression.topk(0.1), ub.Compression.randk(0.2), ub.Compression.qsgd(8),
    ub.Compression.terngrad, ub.Compression.signsgd, ub.Compression.efsignsgd,
    ub.Compression.onebit, ub.Compression.signum, ub.Compression.powersgd(1),
    ub.Compression.dct(0.1, period=3), ub.Compression.dgc(0.1, warmup_steps=4),
]  # fmt: skip


def cast_hook(dtype):
    """DDP's hook for casts, which averages before it casts; its state is the process group."""

    def hook(group, bucket):
        buffer = bucket.buffer()
        message = (buffer / dist.get_world_size()).to(dtype)
        work = dist.all_reduce(message, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0].to(buffer.dtype))

    return hook

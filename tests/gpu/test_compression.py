# SPDX-License-Identifier: Apache-2.0
"""Compressed gradients: casts as DDP's hooks make them, all codecs alike on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from _coded import CODECS, cast_hook
from _models import OPTIMIZERS, Awkward
from _training import prepare, wrong
from _transport import everywhere, for_ranks


def train(transport, rank, mode, hook=None, codec=None, optimizer="sgd", policy="auto"):
    torch.manual_seed(3)
    net = model = Awkward().to(transport.device)
    opt = OPTIMIZERS[optimizer](model.parameters())
    if mode == "ddp":
        group = dist.new_group(backend=transport.backend)
        net = DistributedDataParallel(model, find_unused_parameters=True, process_group=group)
        net.register_comm_hook(group, hook)
    else:
        opt = ub.DistributedOptimizer(
            opt,
            model.named_parameters(),
            overlap=mode,
            compression=codec,
            tune_steps=2,
            policy=policy,
        )
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(9):
        opt.zero_grad()
        tokens = torch.randint(0, 40, (4, 6), generator=data).to(transport.device)
        nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
        opt.step()
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    if mode != "ddp":
        opt.close()
    return state


def casts(transport, rank, size):
    ub.init()
    prepare()
    for codec in ("fp16", "bf16"):
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[codec]
        want = train(transport, rank, "ddp", cast_hook(dtype))
        for mode in ("backward", "forward"):
            state = train(transport, rank, mode, codec=codec, policy="ddp")
            assert not wrong(state, want), (codec, mode)


def test_casts_equal_ddps_hooks(transports, record_property):
    usable = for_ranks(transports, 2)
    record_property("over", ", ".join(t.name for t in usable))
    everywhere(usable, 2, casts, timeout=100)


def every_codec(transport, rank, size):
    ub.init()
    prepare()
    for i, codec in enumerate(CODECS):
        kind = "adamw" if codec.spec.startswith(("dgc", "signum")) else "sgd"
        mode = ("backward", "forward")[i % 2]
        state = train(transport, rank, mode, codec=codec, optimizer=kind)
        flat = torch.cat([v.double().flatten() for v in state.values()]).cpu()
        assert flat.isfinite().all(), codec
        assert torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min)), codec


def test_ranks_stay_equal_under_every_codec(transports, record_property):
    usable = for_ranks(transports, 2)
    record_property("over", ", ".join(t.name for t in usable))
    everywhere(usable, 2, every_codec, timeout=100)

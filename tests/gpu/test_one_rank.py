# SPDX-License-Identifier: Apache-2.0
"""A single rank: exactly the bare optimizer, and DDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from _models import OPTIMIZERS, Awkward, groups
from _training import prepare, wrong


@pytest.fixture(scope="module", autouse=True)
def _single():
    ub.init()
    prepare()
    yield
    ub.shutdown()
    torch.use_deterministic_algorithms(False)


def run(mode, optimizer, device):
    torch.manual_seed(0)
    model = Awkward().to(device)
    net, opt = model, OPTIMIZERS[optimizer](groups(model))
    if mode == "ddp":
        group = dist.new_group(backend="gloo" if device == "cpu" else "nccl")
        net = DistributedDataParallel(model, find_unused_parameters=True, process_group=group)
    elif mode != "bare":
        opt = ub.DistributedOptimizer(opt, model.named_parameters(), overlap=mode)
    data = torch.Generator().manual_seed(1)
    for step in range(12):
        opt.zero_grad()
        tokens = torch.randint(0, 40, (4, 6), generator=data).to(device)
        logits = net(tokens, step % 2 == 0).flatten(0, 1)
        nn.functional.cross_entropy(logits, tokens.flatten()).backward()
        opt.step()
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    if mode not in ("ddp", "bare"):
        opt.close()
    return state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_the_bare_optimizer_and_ddp_bit_for_bit(optimizer, device):
    expected = run("bare", optimizer, device)
    for mode in ("ddp", "backward", "forward"):
        assert not wrong(run(mode, optimizer, device), expected), mode

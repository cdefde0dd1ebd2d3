# SPDX-License-Identifier: Apache-2.0
"""Other tensors over the memory of parameters are up to date right after `step()`."""

import torch
from torch import nn

import usbyte.torch as ub
from _models import warnings_from_now_on
from _ranks import run_ranks


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def _stale_aliases(rank, size, overlap, begins):
    """Steps after which an alias, made before step `begins`, is not its parameter."""
    told = warnings_from_now_on()
    ub.init()
    model = _model()
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), overlap=overlap
    )
    generator = torch.Generator().manual_seed(rank)
    stale, aliases = [], []
    for k in range(begins + 8):
        if k == begins:
            aliases = [model.state_dict()["0.weight"], model[2].bias.data]
        opt.zero_grad()
        model(torch.randn(5, 6, generator=generator)).pow(2).mean().backward()
        opt.step()
        seen = [alias.clone() for alias in aliases]
        if aliases and not all(map(torch.equal, seen, [model[0].weight, model[2].bias])):
            stale.append(k)
    return stale, sum("keeps tensors that share memory with" in text for text in told)


def test_a_kept_state_dict_is_up_to_date():
    """Whenever it was taken; a warning tells once that updates do not wait for it."""
    for overlap, begins in (("forward", 0), ("forward", 8), ("auto", 0), ("auto", 8)):
        found = run_ranks(2, _stale_aliases, overlap, begins, env={"USBYTE_LEARNING_STEPS": "3"})
        for stale, told in found:
            assert stale == []
            assert told == 1 or overlap == "auto"

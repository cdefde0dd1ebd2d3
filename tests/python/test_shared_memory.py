# SPDX-License-Identifier: Apache-2.0
"""Parameters that have memory in common, whatever torch knows of it, are updated together."""

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import UsageError
from usbyte.torch.optimizer.compat.shared_memory import sharing_memory


class _Tied(nn.Module):
    """Three layers, two of which share weights in one of several ways."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        if how == "data":
            self.last.weight.data = self.first.weight.data.t()
        elif how == "set_":
            self.last.weight.data.set_(self.first.weight.data.t())
        elif how == "overlapping views":
            rows = torch.randn(20, 8)
            self.first.weight = nn.Parameter(rows[:8, :6])
            self.second.weight = nn.Parameter(rows[4:12])

    def tie(self):
        """As "data", in the middle of training."""
        self.last.weight.data = self.first.weight.data.t()

    def forward(self, x):
        """The output."""
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


_WAYS = ("data", "set_", "overlapping views", "late")


def _train(how, wrap, batches):
    """Parameters after training on what `batches` gives for each step."""
    model = _Tied(how)
    opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for k, each in enumerate(batches):
        if how == "late" and k == 6:
            model.tie()
        opt.zero_grad()
        for x in each:
            ((model(x) - x).pow(2).mean() / len(each)).backward()
        opt.step()
    params = [p.detach().clone() for p in model.parameters()]
    if isinstance(opt, ub.DistributedOptimizer):
        opt.close()
    return params


def _differences(rank, size):
    """By way and overlap, how far parameters are from those of one process."""
    ub.init()
    xs = torch.randn(12, size, 5, 6, generator=torch.Generator().manual_seed(7))
    found = {}
    for how in _WAYS:
        expected = _train(how, lambda opt, _: opt, xs)
        for overlap in ("backward", "forward"):

            def wrap(opt, model, overlap=overlap):
                return ub.DistributedOptimizer(
                    opt, model.named_parameters(), overlap=overlap, policy="wfbp"
                )

            mine = _train(how, wrap, xs[:, rank : rank + 1])
            found[f"{how}, {overlap}"] = max(
                float((a - b).abs().max()) for a, b in zip(mine, expected, strict=True)
            )
    return found


def test_tied_parameters_train_as_in_one_process():
    """Each gets both updates before either is used."""
    for found in run_ranks(2, _differences, env={"USBYTE_LEARNING_STEPS": "3"}, timeout=90):
        assert {how: diff for how, diff in found.items() if diff > 1e-5} == {}


@pytest.mark.usefixtures("single")
def test_shards_of_tied_parameters_are_refused():
    """Each rank would have one update of the two only."""
    model = _Tied("data")
    with pytest.raises(UsageError, match=r"'first.weight' and 'last.weight' share memory"):
        ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            shard_optimizer=True,
        )


def test_groups_of_tensors_that_share_memory():
    """Neighbours in one storage share nothing; chains and transposes do."""
    flat = torch.zeros(24)
    parts = [flat[:8], flat[8:16], flat[12:20], flat[19:].view(5, 1), torch.zeros(3)]
    assert sharing_memory(parts) == [[1, 2, 3]]
    square = flat[:16].view(4, 4)
    assert sharing_memory([square.t(), parts[4], square[1]]) == [[0, 2]]
    assert sharing_memory([torch.zeros(0), torch.zeros(0)]) == []

# SPDX-License-Identifier: Apache-2.0
"""Evaluation between `step()` and the next forward pass computes what it does under DDP."""

import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        """Scores."""
        return self.head(self.encoder(x))


#: Which module a script evaluates.
_PARTS = {
    "model": lambda model, x: model(x),
    "encoder": lambda model, x: model.encoder(x),
    "layer": lambda model, x: model.encoder.layers[1](x),
    "attention": lambda model, x: model.encoder.layers[0].self_attn(x, x, x)[0],
}


def _outputs(rank, net, model, opt, part):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(99))
    outputs = []
    for _ in range(8):
        opt.zero_grad()
        net(torch.randn(4, 5, 16, generator=generator)).pow(2).mean().backward()
        opt.step()
        model.eval()
        with torch.no_grad():
            outputs.append(_PARTS[part](model, x))
        model.train()
    return outputs


def _differing(rank, size):
    ub.init()
    found = []
    for part in _PARTS:
        model = _Model()
        net, sgd = nn.parallel.DistributedDataParallel(model), _sgd(model)
        expected = _outputs(rank, net, model, sgd, part)
        for overlap in ("backward", "forward", "auto"):
            model = _Model()
            opt = ub.DistributedOptimizer(_sgd(model), model.named_parameters(), overlap=overlap)
            for k, (a, b) in enumerate(
                zip(expected, _outputs(rank, model, model, opt, part), strict=True)
            ):
                if not torch.equal(a, b):
                    found.append(f"{part}, {overlap}, step {k}")
            opt.close()
    return found


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_evaluation_right_after_a_step():
    """To the last bit, also of modules inside the model that torch has fast paths for."""
    for found in run_ranks(2, _differing, env={"USBYTE_LEARNING_STEPS": "3"}, timeout=120):
        assert not found

# SPDX-License-Identifier: Apache-2.0
"""Jobs for an accelerator: the models of `_models`, with batches that keep one busy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _models import JOBS, Job


class Tiny(nn.Module):
    """A few dense layers on coarse images, to try the benchmarks themselves."""

    def __init__(self) -> None:
        super().__init__()
        sides = (3 * 7 * 7, 64, 64, 64, 1000)
        layers: list[nn.Module] = [nn.AvgPool2d(32), nn.Flatten()]
        for inputs, outputs in pairwise(sides):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (batch, 3, 224, 224) to logits (batch, 1000)."""
        logits: Tensor = self.layers(x)
        return logits


GPU_JOBS: dict[str, Job] = {
    "resnet50": replace(JOBS["resnet50"], batch=64),
    "bert-base": replace(JOBS["bert-base"], batch=16, tokens=512),
    "gpt2": replace(JOBS["gpt2"], batch=8, tokens=1024),
    "tiny": replace(JOBS["resnet50"], model=Tiny, batch=2),
}


@dataclass
class Training:
    """One model in training on a batch of random numbers.

    Attributes:
        model: Without anything around it.
        net: What is called.
        optimizer: What steps.
        batch: Inputs and targets.
        device: "cuda" or "cpu".
        finish: Makes the parameters final.
    """

    model: nn.Module
    net: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]
    device: str
    finish: Callable[[], None] = lambda: None

    def step(self) -> None:
        """Forward (of bfloat16 on a GPU, by autocast), backward and update."""
        inputs, targets = self.batch
        self.optimizer.zero_grad()
        half: AbstractContextManager[object] = nullcontext()
        if self.device == "cuda":
            half = torch.autocast("cuda", dtype=torch.bfloat16)
        with half:
            loss = F.cross_entropy(self.net(inputs), targets)
        loss.backward()
        self.optimizer.step()

    def wait(self) -> None:
        """Returns when parameters are final and the device is idle."""
        self.finish()
        if self.device == "cuda":
            torch.cuda.synchronize()


def start(name: str, device: str, seed: int) -> Training:
    """A job's model, the same everywhere, with an optimizer and the data of `seed`."""
    job = GPU_JOBS[name]
    torch.manual_seed(0)
    model = job.model().to(device)
    torch.manual_seed(1 + seed)
    inputs, targets = job.sample(model)
    batch = inputs.to(device), targets.to(device)
    return Training(model, model, job.optimizer(model.parameters()), batch, device)

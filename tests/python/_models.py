# SPDX-License-Identifier: Apache-2.0
"""A small model and a training loop that the tests of the optimizer share."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}


class Awkward(nn.Module):
    """Everything a real model does to a data-parallel library.

    Tied weights, a frozen layer, a layer that nobody uses, one that only some ranks use in some
    steps, parameters read without their module being called (attention's out_proj, a bare scale),
    mixed dtypes on request.
    """

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.sometimes = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 64, dtype=torch.float64 if mixed else None)
        self.narrow = nn.Linear(64, 16, dtype=torch.float64 if mixed else None)
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, use_sometimes: bool = True) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        x = x + self.frozen(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        if use_sometimes:
            x = x + self.sometimes(x)
        x = self.norm(x)
        wide = torch.relu(self.wide(x.to(self.wide.weight.dtype)))
        x = x + self.narrow(wide).to(x.dtype)
        return self.head(x)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, of which the biases' has half the rate."""
    rows = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in rows if not n.endswith("bias")]},
        {"params": [p for n, p in rows if n.endswith("bias")], "lr": 0.02},
    ]


def short_probes() -> None:
    """Has little of the network measured, as in all ranks that tests run: they ask for no costs."""
    probe = importlib.import_module("usbyte.torch.comm.probe")
    probe._SPAN, probe._FEWEST_GROUPS, probe._SHOTS = 1, 2, 4
    transport = importlib.import_module("usbyte.torch.optimizer.gradients.plan_executor")
    assert {"LARGEST_BYTES", "measure", "measure_dimensions"} <= vars(transport).keys()
    transport.LARGEST_BYTES = 1 << 14
    transport.measure = partial(probe.measure, repeats=1)
    transport.measure_dimensions = partial(probe.measure_dimensions, repeats=1)


def train(
    mode: str,
    optimizer: str,
    rank: int,
    size: int,
    steps: int = 20,
    *,
    mixed: bool = False,
    double: bool = False,
    set_to_none: bool = True,
    accumulate: int = 1,
    on_step: Callable[..., None] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Trains `Awkward` under "ddp", "forward" or "backward" and returns its state_dict.

    Every mode sees the same data and starts from the same parameters.
    """
    torch.manual_seed(3)
    model = Awkward(mixed)
    if double:
        model.double()
    opt: Any = OPTIMIZERS[optimizer](groups(model))
    net: nn.Module = model
    if mode == "ddp":
        net = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        opt = ub.DistributedOptimizer(opt, model.named_parameters(), overlap=mode, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    data = torch.Generator().manual_seed(100 + rank)
    for step in range(steps):
        opt.zero_grad(set_to_none=set_to_none)
        for k in range(accumulate):
            tokens = torch.randint(0, 40, (4, 6), generator=data)
            used = step % 3 == 0 or (step % 3 == 1 and rank == 0)
            held = net.no_sync() if mode == "ddp" else opt.no_sync()
            if k == accumulate - 1:
                loss = nn.functional.cross_entropy(
                    net(tokens, used).flatten(0, 1), tokens.flatten()
                )
                loss.backward()
            else:
                with held:
                    loss = nn.functional.cross_entropy(
                        net(tokens, used).flatten(0, 1), tokens.flatten()
                    )
                    loss.backward()
        opt.step()
        scheduler.step()
        if on_step is not None:
            on_step(step, model, opt)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    if mode != "ddp":
        opt.close()
    return state


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference relative to the largest value of each tensor."""
    assert a.keys() == b.keys()
    return max(((a[k] - b[k]).abs().max() / b[k].abs().max()).item() for k in a)


def warnings_from_now_on() -> list[str]:
    """Those that usbyte logs in this process, as they come."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("usbyte").addHandler(handler)
    return warnings

# SPDX-License-Identifier: Apache-2.0
"""One rank of `usbyte demo`: trains copies of one model under DDP and usbyte, in turns.

Rank 0 prints one JSON object a line, each with the key "kind": "setup", "warmup", "block", "end".
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from usbyte.lab.shaping import shape_link

_CONTEXT, _BATCH, _WIDTH, _LAYERS = 64, 4, 256, 4
_TEXT_BYTES = 400_000
_CALIBRATION_STEPS = 8
# Communication over compute. There overlap can hide most of what DDP waits for.
_COMMUNICATION = 1.2
_BUCKETS_MB = (25, 1)  # DDP's default, and one that begins to send early.


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, _WIDTH, device="cpu", dtype=torch.float32)
        position = torch.zeros(_CONTEXT, _WIDTH, device="cpu", dtype=torch.float32)
        self.position = nn.Parameter(position)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, 256, device="cpu", dtype=torch.float32)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(_CONTEXT))

    def forward(self, text: Tensor) -> Tensor:
        """Returns logits, shape (batch, context, 256), for text of shape (batch, context)."""
        hidden = self.embedding(text) + self.position
        logits: Tensor = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return logits


class Contender:
    """A copy of the model, trained by one library.

    Args:
        name: What the table calls it.
        network: The model, or DDP's wrapper of it.
        optimizer: Its optimizer.
        windows: Text of this rank, shape (n, context + 1), uint8.
    """

    def __init__(
        self, name: str, network: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor
    ) -> None:
        self.name, self.optimizer = name, optimizer
        self.steps = 0
        self._network, self._windows = network, windows

    def step(self) -> None:
        """Trains on the next batch; all contenders see the same ones."""
        first = self.steps * _BATCH % (len(self._windows) - _BATCH)
        self.optimizer.zero_grad()
        loss_of(self._network, self._windows[first : first + _BATCH]).backward()
        self.optimizer.step()
        self.steps += 1

    def timed(self, steps: int) -> float:
        """Returns seconds a step of several steps, with all that they have sent."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        if isinstance(self.optimizer, ub.DistributedOptimizer):
            self.optimizer.drain()
        dist.barrier()
        return (time.perf_counter() - start) / steps

    @torch.no_grad()
    def loss(self, windows: Tensor) -> float:
        """Returns the mean loss over windows."""
        return loss_of(self._network, windows).item()


def loss_of(network: nn.Module, windows: Tensor) -> Tensor:
    """Returns the cross entropy of each next byte, in nats."""
    windows = windows.long()
    return F.cross_entropy(network(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def text() -> Tensor:
    """Returns the source of Python's standard library, shape (n, context + 1), uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(path.read_bytes() for path in files)[:_TEXT_BYTES]
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.unfold(0, _CONTEXT + 1, _CONTEXT)


def compute_s(model: nn.Module, windows: Tensor) -> float:
    """Returns seconds of a step without communication, while all ranks compute."""
    optimizer = torch.optim.AdamW(model.parameters())
    contender = Contender("", model, optimizer, windows)
    contender.step()
    return statistics.median(contender.timed(1) for _ in range(_CALIBRATION_STEPS))


def tell(kind: str, **values: Any) -> None:
    """Prints one line for the command, on rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps({"kind": kind, **values}), flush=True)


def build(make: Callable[[], GPT], windows: Tensor) -> list[Contender]:
    """Returns DDP with each bucket size, then usbyte; all with the same first weights."""
    contenders = []
    for size in _BUCKETS_MB:
        network = DistributedDataParallel(make(), bucket_cap_mb=size)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
        contenders.append(Contender(f"DDP, {size} MB buckets", network, optimizer, windows))
    model = make()
    planned = ub.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    return [*contenders, Contender("usbyte", model, planned, windows)]


def main(shaped: bool, rounds: int, block: int) -> None:
    """Trains; `shaped` says that this network namespace's loopback may be slowed down."""
    dist.init_process_group("gloo")
    ub.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))

    def make() -> GPT:
        torch.manual_seed(0)
        return GPT()

    model, data = make(), text()
    windows, held_out = data[ub.rank() : -16 : ub.size()], data[-16:]
    numbers = sum(parameter.numel() for parameter in model.parameters())
    seconds = compute_s(model, windows)
    rate = 4 * numbers / (_COMMUNICATION * seconds)
    if shaped and ub.rank() == 0:
        # Two ranks send at the same time, and both directions pass the one loopback device.
        shape_link(["tc"], "lo", 2 * rate)
    dist.barrier()
    tell(
        "setup", parameters=numbers, ranks=ub.size(), compute_s=seconds,
        bytes_per_s=rate if shaped else None,
    )  # fmt: skip
    contenders = build(make, windows)
    planned = contenders[-1]
    assert isinstance(planned.optimizer, ub.DistributedOptimizer)
    while not planned.optimizer.settled:
        planned.step()
        if planned.steps % 5 == 0:
            tell("warmup", name=planned.name, steps=planned.steps)
    for contender in contenders[:-1]:
        while contender.steps < planned.steps:
            contender.step()
            if contender.steps % 10 == 0:
                tell("warmup", name=contender.name, steps=contender.steps)
    for number in range(rounds):
        for contender in contenders:
            step_s = contender.timed(block)
            loss = contender.loss(held_out)
            tell("block", name=contender.name, round=number, step_s=step_s, loss=loss)
    decision = planned.optimizer.decision
    assert decision is not None
    tell(
        "end", steps=planned.steps, overlap=decision.overlap, plan=decision.plan.to_json(),
        profile=decision.profile.to_json(), network=decision.network.to_json(),
    )  # fmt: skip
    planned.optimizer.close()
    ub.shutdown()
    del contenders, planned
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] == "shaped", int(sys.argv[2]), int(sys.argv[3]))

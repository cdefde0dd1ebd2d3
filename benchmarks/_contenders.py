# SPDX-License-Identifier: Apache-2.0
"""Ways to train a replayed job: usbyte, PyTorch's own, Horovod, and no communication at all."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import sgd

import _horovod
import usbyte.torch as ub
from usbyte import _core
from usbyte.lab.replay import Replay, giving_way

#: Contenders besides PyTorch DDP and usbyte's policies.
OTHERS = ("alone", "fsdp", "horovod")


def _nothing() -> None: ...


@dataclass
class Trainer:
    """One model and its optimizer.

    Attributes:
        model: What is called; holds the replay.
        optimizer: What steps.
        finish: Makes the parameters final.
        close: Ends what communicates. All ranks call it at the same place.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing


def unavailable(name: str) -> str:
    """Why a contender cannot run on this host; "" if it can."""
    if name == "fsdp":
        if not hasattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard"):
            return f"torch {torch.__version__} has no fully_shard; 2.6 has"
    elif name == "horovod":
        try:
            for module in ("horovod.torch", "horovod.runner.gloo_run"):
                importlib.import_module(module)
        except ImportError as error:
            return f"cannot be imported: {error}"
    return ""


@contextmanager
def training(name: str, profile: _core.Profile) -> Iterator[tuple[Callable[[], None], Any]]:
    """Yields a function that makes one training step, and the optimizer.

    Args:
        name: "alone", "ddp:25" (bucket in MiB), "fsdp", "horovod", or overlap and policy as in
            "forward:auto"; "sharded:auto" is forward with a sharded optimizer.
        profile: The job.

    Raises:
        click.ClickException: At the end parameters hold wrong values.
    """
    rank, size = ub.rank(), ub.size()
    replay = Replay(profile, value=rank + 1.0)
    kind, _, setting = name.partition(":")
    make = {"ddp": _ddp, "fsdp": _fsdp, "horovod": _hvd, "alone": _alone}.get(kind, _usbyte)
    trainer = make(replay, setting, kind)
    x = torch.zeros(1, requires_grad=True)

    def step() -> None:
        trainer.optimizer.zero_grad()
        with giving_way():
            trainer.model(x).sum().backward()
        trainer.optimizer.step()
        replay.rest()

    try:
        yield step, trainer.optimizer
        trainer.finish()
        wrong = replay.wrong(rank + 1.0 if kind == "alone" else (size + 1) / 2)
    finally:
        trainer.close()
    if wrong:
        raise click.ClickException(
            f"{name}: on rank {rank} {len(wrong)} of {len(profile.tensors)} tensors hold wrong "
            f"values, {wrong[0]} is the first"
        )


def _sgd(replay: Replay) -> torch.optim.Optimizer:
    return torch.optim.SGD(replay.parameters(), lr=1.0)


def _gives_way(update: Callable[..., None]) -> Callable[..., None]:
    @wraps(update)
    def give_way(*args: Any, **kwargs: Any) -> None:
        with giving_way():
            update(*args, **kwargs)

    return give_way


# What every contender's step calls. A replaced `step` would not be deferred, nor cut into shards.
sgd.sgd = _gives_way(sgd.sgd)


def _alone(replay: Replay, _setting: str, _kind: str) -> Trainer:
    return Trainer(replay, _sgd(replay))


def _ddp(replay: Replay, bucket: str, _kind: str) -> Trainer:
    model = DistributedDataParallel(
        replay, bucket_cap_mb=float(bucket), gradient_as_bucket_view=True
    )
    return Trainer(model, _sgd(replay))


def _fsdp(replay: Replay, _setting: str, _kind: str) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ub.size(),))
    # Without resharding the volume is that of an all_reduce, as with the other contenders.
    for layer in replay.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(replay, mesh=mesh, reshard_after_forward=False)
    return Trainer(replay, _sgd(replay))


def _hvd(replay: Replay, _setting: str, _kind: str) -> Trainer:
    optimizer = _horovod.start().DistributedOptimizer(
        torch.optim.SGD(replay.parameters(), lr=1.0), named_parameters=replay.named_tensors()
    )
    return Trainer(replay, optimizer, close=_horovod.stop)


def _usbyte(replay: Replay, policy: str, mode: str) -> Trainer:
    sharded = mode == "sharded"
    optimizer = ub.DistributedOptimizer(
        _sgd(replay),
        replay.named_tensors(),
        overlap="forward" if sharded else mode,  # type: ignore[arg-type]
        policy=policy,
        shard_optimizer=sharded,
    )
    return Trainer(replay, optimizer, optimizer.synchronize, optimizer.close)

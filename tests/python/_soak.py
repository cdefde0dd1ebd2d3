# SPDX-License-Identifier: Apache-2.0
"""A long training in which plans, delays and checkpoints come at random."""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from _models import Awkward, groups
from usbyte import _core

SEGMENT = 60  # steps from one plan to the next
CHECK = 50  # steps from one comparison of all ranks to the next


def random_plan(rng: np.random.Generator) -> Callable[..., _core.Plan]:
    """A policy that cuts, fuses, orders and admits at random, and says nothing of time."""

    def policy(profile: _core.Profile, network: _core.NetworkModel) -> _core.Plan:
        tensors = profile.tensors
        changes = [b.offset for a, b in itertools.pairwise(tensors) if a.dtype != b.dtype]
        cuts = rng.integers(1, tensors[-1].end, size=rng.integers(0, 30)).tolist()
        points = sorted({0, tensors[-1].end, *changes, *cuts})
        blocks = list(itertools.pairwise(points))
        rng.shuffle(blocks)
        first: list[_core.Op] = []
        second: list[_core.Op] = []
        while blocks:
            taken = [tuple(block) for block in blocks[: rng.integers(1, 4)]]
            dtype = {_dtype_at(tensors, begin) for begin, _ in taken}
            taken = taken if len(dtype) == 1 else taken[:1]
            blocks = blocks[len(taken) :]
            window, fence = int(rng.choice([1, 1 << 14, 1 << 30])), bool(rng.random() < 0.2)
            if rng.random() < 0.4:
                first.append(_core.Op("reduce_scatter", taken, window, fence))
                second.append(_core.Op("all_gather", taken, window, bool(rng.random() < 0.2)))
            else:
                first.append(_core.Op("all_reduce", taken, window, fence))
        rng.shuffle(second)
        return _core.Plan("random", tensors, [*first, *second])

    return policy


def _dtype_at(tensors: list[_core.TensorSpec], element: int) -> str:
    return next(t.dtype for t in tensors if t.offset <= element < t.end)


def options(rng: np.random.Generator) -> dict[str, Any]:
    """Of the optimizer for the next segment, the same on all ranks."""
    kind = rng.integers(0, 6)
    if kind == 0:
        return {"shard_optimizer": True, "policy": "dear"}
    if kind == 1:
        return {"policy": "auto", "tune_steps": 2}
    overlap = ["backward", "forward", "auto"][rng.integers(0, 3)]
    own = np.random.default_rng(int(rng.integers(1 << 31)))  # only rank 0 draws plans
    return {"policy": random_plan(own), "overlap": overlap}


def soak(rank: int, size: int, steps: int, seed: int, reference: bool) -> dict[str, Any]:
    """Trains; returns figures, by `steps` // 10 and at the end, and what came out.

    Args:
        rank: This rank.
        size: Number of ranks.
        steps: Of the training.
        seed: The same on all ranks.
        reference: Train with DDP, on the same data and with the same checkpoints. Longer trainings
            amplify rounding, so that they do not end alike.
    """
    ub.init()
    torch.manual_seed(seed)
    shared, own = np.random.default_rng(seed), np.random.default_rng([seed, rank])
    plans = np.random.default_rng([seed, 10**6])
    model: nn.Module = Awkward().double()
    inner = torch.optim.AdamW(groups(model), lr=1e-3)
    net = DistributedDataParallel(model, find_unused_parameters=True) if reference else model
    optimizer: Any = inner
    data = torch.Generator().manual_seed(100 * seed + rank)
    saved: Any = None
    figures: list[dict[str, float]] = []
    names: set[str] = set()
    sharded = False
    for step in range(steps):
        if step % SEGMENT == 0 and not reference:
            if step:
                names.add(optimizer.plan.policy)
                optimizer.close()
            if step == SEGMENT * max(1, steps // SEGMENT // 10):
                figures.append(_figures())
            chosen = options(plans)
            sharded = "shard_optimizer" in chosen
            optimizer = ub.DistributedOptimizer(inner, model.named_parameters(), **chosen)
        _sleep_seldom(own, reference)
        optimizer.zero_grad(set_to_none=bool(shared.random() < 0.5))
        tokens = torch.randint(0, 40, (4, 6), generator=data)
        used = step % 3 == 0 or (step % 3 == 1 and rank == 0)
        output = net(tokens, used)
        _sleep_seldom(own, reference)
        checks = step % CHECK == CHECK - 1 and not reference
        if checks:
            expected = _average_gradients(copy.deepcopy(model), tokens, used)
        nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten()).backward()
        _sleep_seldom(own, reference)
        if checks and not sharded:
            _compare_gradients(model, expected, step)
        optimizer.step()
        if shared.random() < 0.01:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if shared.random() < 0.005 and saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        if step % CHECK == CHECK - 1 or step == steps - 1:
            _compare(model, step)
    if not reference:
        names.add(optimizer.plan.policy)
        optimizer.close()
        figures.append(_figures())
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    ub.shutdown()
    return {"figures": figures, "plans": sorted(names), "state": state if rank == 0 else None}


def _sleep_seldom(rng: np.random.Generator, reference: bool) -> None:
    seconds = rng.uniform(0, 0.02) if rng.random() < 0.02 else 0.0
    if seconds and not reference:
        time.sleep(seconds)


def _average_gradients(
    model: nn.Module, tokens: torch.Tensor, used: bool
) -> dict[str, torch.Tensor]:
    """Of the ranks, by one operation of its own for each parameter."""
    model.zero_grad()
    nn.functional.cross_entropy(model(tokens, used).flatten(0, 1), tokens.flatten()).backward()
    return {
        name: ub.allreduce(torch.zeros_like(p) if p.grad is None else p.grad, name=f"check.{name}")
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _compare_gradients(model: nn.Module, expected: dict[str, torch.Tensor], step: int) -> None:
    for name, param in model.named_parameters():
        if param.grad is not None:
            close = torch.allclose(param.grad, expected[name], rtol=1e-9, atol=1e-12)
            assert close, f"the gradient of {name} is wrong in step {step + 1}"
        elif name in expected:
            assert not expected[name].any(), f"{name} has no gradient in step {step + 1}"


def _compare(model: nn.Module, step: int) -> None:
    """Fails unless all ranks have the same parameters, bit for bit."""
    bits = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    mine = hashlib.sha256(bits).hexdigest()
    found = ub.allgather_object(mine)
    assert len(set(found)) == 1, f"parameters differ after step {step + 1}: {found}"


def _figures() -> dict[str, float]:
    """Without an optimizer, on this rank."""
    dist.barrier()
    gc.collect()
    process = psutil.Process()
    return {
        "mib": process.memory_info().rss / 2**20,
        "descriptors": process.num_fds(),
        "threads": threading.active_count(),
        "native": process.num_threads(),
    }

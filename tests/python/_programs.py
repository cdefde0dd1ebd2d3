# SPDX-License-Identifier: Apache-2.0
"""Random training programs, each run under usbyte and with plain averages of gradients.

On two ranks all plans without a codec give the same sums, so results must be equal bit for bit.
`make fuzz-programs` runs fresh programs. To run one that has failed again:

python tests/python/_programs.py --seed 123
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import usbyte.torch as ub
from _ranks import run_ranks
from _soak import random_plan
from usbyte import _core

WIDTH, WORDS = 8, 20
ENV = {"USBYTE_LEARNING_STEPS": "2", "USBYTE_STALL_LIMIT_S": "60", "USBYTE_CHECK_STEPS": "3"}
OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9, nesterov=True), torch.optim.Adagrad,
    partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-3), torch.optim.Adam, torch.optim.NAdam,
    partial(torch.optim.AdamW, weight_decay=0.1, amsgrad=True),
    partial(torch.optim.RMSprop, momentum=0.5, centered=True),
]  # fmt: skip


class Block(nn.Module):
    """A residual block of a random kind and dtype."""

    def __init__(self, rng: random.Random, sharded: bool) -> None:
        super().__init__()
        linear = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7)
        if rng.random() < 0.2:
            linear.weight = nn.Parameter(linear.weight.detach().t())  # column-major
        self.norm = rng.choice([nn.LayerNorm(WIDTH), nn.Identity(), nn.Dropout(0.2)])
        self.inner = rng.choice([
            linear, nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
            nn.Conv1d(5, 5, 3, padding=1), nn.GRU(WIDTH, WIDTH, batch_first=True),
            nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
        ])  # fmt: skip
        # Torch rounds a half by its place in a vector, which shards change.
        halves = [torch.bfloat16] * (not sharded)
        self.dtype = rng.choice([torch.float32] * 6 + [torch.float64] * 2 + halves)
        self.inner.to(self.dtype)
        self.checkpointed = rng.random() < 0.2
        if rng.random() < 0.2:
            next(self.inner.parameters()).register_hook(lambda grad: grad * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed and self.training:
            return x + checkpoint(self._run, x, use_reentrant=False)
        return x + self._run(x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(self.norm(x).to(self.dtype))
        return torch.tanh(out[0] if isinstance(out, tuple) else out).float()


class Model(nn.Module):
    """Blocks in random order, one of them twice, between layers that may be tied or unused."""

    def __init__(self, rng: random.Random, sharded: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(rng, sharded) for _ in range(rng.randint(1, 5)))
        indices = range(len(self.blocks))
        self.order = [*rng.sample(indices, len(indices)), rng.choice(indices)]
        self.scale = nn.Parameter(torch.ones([WIDTH] if sharded or rng.random() < 0.5 else []))
        self.later = nn.Linear(WIDTH, WIDTH).requires_grad_(False)  # for add_param_group
        if rng.random() < 0.4:
            self.head.weight = self.embed.weight
        if rng.random() < 0.3:
            self.unused = nn.Linear(3, 3)
        if rng.random() < 0.1:
            self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens: torch.Tensor, left_out: int = -1) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for i in self.order:
            x = x if i == left_out else self.blocks[i](x)
        return self.head(x + torch.tanh(self.later(x)))


class Reference:
    """Averages gradients as DDP does, by one collective for each parameter."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.syncs, self.unsent = inner, True, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        yield
        self.syncs = True

    def after_backward(self) -> None:
        self.unsent = True
        if self.syncs:
            self.synchronize()

    def synchronize(self) -> None:
        params = [p for group in self.inner.param_groups for p in group["params"]]
        for p in params if self.unsent else []:
            used = torch.tensor(p.grad is not None, dtype=torch.int32)
            dist.all_reduce(used)
            if used:
                mean = torch.zeros_like(p) if p.grad is None else p.grad / dist.get_world_size()
                dist.all_reduce(mean)
                p.grad = mean if p.grad is None else p.grad.copy_(mean)
        self.unsent = False

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.synchronize()
        self.inner.step(closure)

    def close(self) -> None: ...


class Program:
    """A training; what it notes must not depend on the mode.

    Args:
        seed: Of the program.
        rank: This rank.
        mode: "reference", or how usbyte overlaps: "backward", "forward", "auto" or "sharded".
        sharded: Does only what a sharded optimizer can do.
    """

    def __init__(self, seed: int, rank: int, mode: str, sharded: bool) -> None:
        self.rng, self.own = random.Random(seed), random.Random(f"{seed}, {rank}")
        self.plans = random.Random(f"{seed}, {mode}")
        self.rank, self.mode, self.sharded = rank, mode, sharded
        torch.manual_seed(seed)
        self.data = torch.Generator().manual_seed(10 * seed + rank)
        self.model = Model(self.rng, sharded)
        groups: list[list[nn.Parameter]] = [[], [], []]
        for name, param in self.model.named_parameters():
            if not name.startswith("later"):
                self.rng.choice(groups).append(param)
        self.inner = self.rng.choice(OPTIMIZERS)(
            [{"params": g, "lr": 0.01 * (i + 1)} for i, g in enumerate(groups) if g],
            foreach=self.rng.choice([None, True, False]),
        )
        self.passes, self.counts_passes = self.rng.choice([1, 1, 2, 3]), self.chance(0.3)
        self.seldom = self.chance(0.5)  # some ranks leave out a block in some steps
        scales = self.chance(0.2) and not sharded
        self.scaler = torch.amp.GradScaler("cpu", 256.0, growth_interval=3, enabled=scales)
        self.notes: list[tuple[str, list[torch.Tensor]]] = []
        self.step, self.opt = -1, self.wrapped()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def wrapped(self) -> Any:
        if self.mode == "reference":
            return Reference(self.inner)
        draw = self.plans
        if self.sharded:
            policy, chosen = draw.choice(_core.sharding_policies()), {"shard_optimizer": True}
        else:
            own = random_plan(np.random.default_rng(draw.randrange(1 << 31)))
            policy = draw.choice([own] * 8 + _core.policies())
            chosen = {"overlap": self.mode, "bucket_bytes": draw.choice([256, 1024, 25 << 20])}
            if policy == "auto":
                chosen["tune_steps"] = draw.choice([0, 2])
        passes = self.passes if self.counts_passes else 1
        return ub.DistributedOptimizer(
            self.inner, self.model.named_parameters(), policy=policy, partition_bytes=512,
            backward_passes_per_step=passes, **chosen,
        )  # fmt: skip

    def note(self, what: str, *tensors: torch.Tensor) -> None:
        self.notes.append((f"{what} in step {self.step}", [t.detach().clone() for t in tensors]))

    def backward(self, overflows: bool = False) -> torch.Tensor:
        tokens = torch.randint(0, WORDS, (3, 5), generator=self.data)
        left_out = self.own.choice([-1, *self.model.order]) if self.seldom else -1
        logits = self.model(tokens, left_out).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens.flatten())
        self.note("loss", loss)
        self.scaler.scale(loss * torch.inf if overflows and self.rank == 0 else loss).backward()
        if self.mode == "reference":
            self.opt.after_backward()
        return loss

    def read(self) -> None:
        kind, params = self.rng.randrange(5), list(self.model.parameters())
        if kind == 0:
            self.note("state_dict", *self.model.state_dict().values())
        elif kind == 1:
            self.note("copy", *copy.deepcopy(self.model).parameters())
        elif kind == 2:
            self.note("vector", torch.cat([p.flatten() for p in params]))
        elif kind == 3:
            self.note("parameter", self.rng.choice(params))
        else:
            self.model.eval()
            with torch.no_grad():
                self.note("evaluation", self.model(torch.arange(WORDS).view(4, 5)))
            self.model.train()

    def change_gradients(self) -> None:
        kind, params = self.rng.randrange(7), [self.model.scale]
        if kind < 3 or self.chance(0.5):
            self.opt.synchronize()  # else what no rank used shows a gradient until it is read
            params = [p for p in self.model.parameters() if p.grad is not None]
        if kind == 0:
            self.note("gradients", *(p.grad for p in params))
        elif kind == 1:  # a norm whose value does not depend on where gradients lie
            nn.utils.clip_grad_norm_(params, 0.1, norm_type=torch.inf)
        elif kind == 2:
            nn.utils.clip_grad_value_(params, 0.05)
        for p in params if kind > 2 else []:
            if kind == 3:
                p.grad.mul_(0.5)
            elif kind == 4:
                p.grad.add_(p.detach(), alpha=0.01)
            elif kind == 5:
                p.grad = p.grad * 0.5
            elif p is self.model.scale:
                p.grad = None

    def reset_gradients(self) -> None:
        resets, by_model, to_none = self.chance(0.85), self.chance(0.3), self.chance(0.6)
        if self.sharded and self.mode == "reference" and (by_model or not resets):
            self.inner.zero_grad()  # a sharded step has used them up
        elif resets:
            (self.model if by_model else self.opt).zero_grad(set_to_none=to_none)

    def train_step(self) -> None:
        scaled, opt = self.scaler.is_enabled(), self.opt
        if not scaled and self.passes == 1 and self.chance(0.1):
            opt.step(lambda: (opt.zero_grad(), self.backward())[1])
            return
        overflows, all_apart = scaled and self.chance(0.2), self.chance(0.1)
        by_count = self.counts_passes and not all_apart and self.mode != "reference"
        for i in range(self.passes):
            apart = (all_apart or i < self.passes - 1) and not by_count
            with opt.no_sync() if apart else contextlib.nullcontext():
                self.backward(overflows)
        if self.chance(0.1):
            self.read()
        if scaled and self.mode == "reference":
            opt.synchronize()
        if scaled and self.chance(0.3):
            self.scaler.unscale_(opt)
        if not self.sharded and not all_apart and self.chance(0.3):
            self.change_gradients()
        if not scaled and self.chance(0.1):
            opt.zero_grad()  # leaves the step out
            return
        self.scaler.step(opt)
        self.scaler.update()
        self.note("scale", torch.tensor(self.scaler.get_scale()))

    def run(self) -> list[tuple[str, list[torch.Tensor]]]:
        model, on_wrapper = self.model, self.chance(0.5)
        base = self.opt if on_wrapper and self.mode != "reference" else self.inner
        scheduler = torch.optim.lr_scheduler.ExponentialLR(base, self.rng.choice([0.9, 1.0]))
        frozen = saved = None
        for step in range(self.rng.randint(4, 13)):
            self.step = step
            if self.chance(0.1):
                block = frozen or self.rng.choice(model.blocks)
                frozen = None if frozen else block
                block.requires_grad_(frozen is None)
            if frozen is None and not on_wrapper and self.chance(0.06):
                self.opt.close()
                self.opt = self.wrapped()
            if frozen is None and not model.later.weight.requires_grad and self.chance(0.06):
                saved = None
                model.later.requires_grad_(True)
                self.opt.add_param_group({"params": list(model.later.parameters()), "lr": 0.03})
            self.reset_gradients()
            if self.chance(0.2):
                self.read()
            self.train_step()
            if self.chance(0.2):
                self.read()
            if self.chance(0.1):
                with torch.no_grad():
                    for p in model.parameters():
                        p.clamp_(-0.5, 0.5)
            scheduler.step()
            if self.chance(0.1):
                self.opt.param_groups[0]["lr"] *= 0.5
            if self.chance(0.1):
                saved = copy.deepcopy((model.state_dict(), self.opt.state_dict()))
            if saved is not None and self.chance(0.1):
                model.load_state_dict(saved[0])
                self.opt.load_state_dict(copy.deepcopy(saved[1]))
        self.note("parameters", *model.state_dict().values())
        for i, state in sorted(self.opt.state_dict()["state"].items()):
            self.note(
                f"{sorted(state)} of {i}", *(torch.as_tensor(state[k]) for k in sorted(state))
            )
        self.opt.close()
        return self.notes


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether both have the same numbers, and NaN in the same places."""
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and bool(((a == b) | (a.isnan() & b.isnan())).all())


def differences(seed: int, rank: int) -> list[str]:
    """Returns, for each mode that differs from the reference, where it does first."""
    kind, found = random.Random(f"{seed}").random(), []
    modes = ["sharded"] if kind < 0.3 else ["backward", "forward", "auto"][: 2 + (kind < 0.5)]
    print(f"program {seed}", flush=True)
    expected = Program(seed, rank, "reference", kind < 0.3).run()
    for mode in modes:
        print(f"program {seed}: {mode}", flush=True)
        got = Program(seed, rank, mode, kind < 0.3).run()
        for (what, mine), (other, its) in itertools.zip_longest(got, expected, fillvalue=("", [])):
            if what != other or len(mine) != len(its) or not all(map(equal, mine, its)):
                found.append(f"program {seed}, rank {rank}: {mode} has other {what or other}")
                break
    return found


def fuzz(rank: int, size: int, seed: int, count: int, seconds: float) -> tuple[int, list[str]]:
    """Runs up to `count` programs from `seed` on, for `seconds` at most."""
    ub.init()
    found: list[str] = []
    end, ran = time.monotonic() + seconds, 0
    while ran < count and ub.broadcast_object(time.monotonic() < end):
        found += differences(seed + ran, rank)
        ran += 1
    ub.shutdown()
    return ran, found


def main() -> int:
    """Runs one program, or fresh ones; returns 1 if any failed. An exception ends the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="run this program alone")
    parser.add_argument("--seconds", type=float, default=300.0)
    given = parser.parse_args()
    seed, count = (random.randrange(1 << 30), 1 << 30) if given.seed is None else (given.seed, 1)
    results = run_ranks(2, fuzz, seed, count, given.seconds, timeout=given.seconds + 60, env=ENV)
    failed = [text for _, found in results for text in found]
    print(*failed, f"{results[0][0]} programs, {len(failed)} failures", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

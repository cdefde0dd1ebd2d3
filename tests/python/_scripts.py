# SPDX-License-Identifier: Apache-2.0
"""What training scripts do: each function trains a small model and returns what to compare.

`wrap(model, optimizer)` gives what to call and what to step, under DDP or usbyte; `rank` makes the
data differ. All scripts take `STEPS` steps.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

STEPS = 9

Wrap = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]


def mlp(*sizes: int, **options: Any) -> nn.Sequential:
    sizes = sizes or (6, 12, 12, 4)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, **options), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    data = torch.Generator().manual_seed(7 + rank)
    for _ in range(STEPS):
        yield torch.randn(*(shape or (5, 6)), generator=data).to(dtype)


def fit(net: nn.Module, opt: Any, inputs: Iterable[torch.Tensor]) -> None:
    for x in inputs:
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()


class Branched(nn.Module):
    """Uses one of its layers only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = mlp(6, 8), mlp(8, 8), mlp(8, 4)

    def forward(self, x: torch.Tensor, use_sometimes: bool) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.sometimes(x) if use_sometimes else x)


def plain(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    fit(net, opt, batches(rank))
    return model


def clips(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    norms = []
    for x in batches(rank):
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        opt.step()
    return model, norms


def scales(wrap: Wrap, rank: int, unscale: bool = False) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    seen = []
    for k, x in enumerate(batches(rank)):
        opt.zero_grad()
        # One rank's overflow skips the step on all.
        loss = net(x).pow(2).mean() * (float("inf") if (k, rank) == (6, 1) else 1.0)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(opt)
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).nan_to_num(-1))
        scaler.step(opt)
        scaler.update()
        seen.append(torch.tensor(scaler.get_scale()))
    return model, seen


def scales_and_unscales(wrap: Wrap, rank: int) -> Any:
    return scales(wrap, rank, unscale=True)


def logs(wrap: Wrap, rank: int, every: int = 1) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    seen = []
    for k, x in enumerate(batches(rank)):
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        if k % every == 0:
            seen += [p.grad.norm() for p in model.parameters() if p.grad is not None]
        opt.step()
        if k % every == 0:
            seen += [p.detach().norm() for p in model.parameters()]
            seen += [p.grad.abs().max() for p in model.parameters() if p.grad is not None]
    return model, seen


def logs_seldom(wrap: Wrap, rank: int) -> Any:
    return logs(wrap, rank, every=4)


def averages(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    mean = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for x in batches(rank):
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()
        mean.update_parameters(model)
    return model, mean.module


def snapshots(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    seen = []
    with ThreadPoolExecutor(1) as pool:
        for x in batches(rank):
            opt.zero_grad()
            net(x).pow(2).mean().backward()
            opt.step()
            seen += pool.submit(lambda: [p.detach().clone() for p in model.parameters()]).result()
    return model, seen


class Tied(nn.Module):
    """One weight, used by its own module and then past it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.body = mlp(6, 8, 6)
        self.gain = nn.Parameter(torch.tensor(1.5))  # of no dimensions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.body(self.emb(tokens)) * self.gain, self.emb.weight)


class ReadElsewhere(nn.Module):
    """A weight whose own module is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 8, 6)
        self.emb = nn.Embedding(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.body(x), self.emb.weight)


def ties(wrap: Wrap, rank: int) -> Any:
    model = Tied()
    net, opt = wrap(model, sgd(model))
    data = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        opt.zero_grad()
        tokens = torch.randint(0, 11, (4, 3), generator=data)
        F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
        opt.step()
    return model


def reads_elsewhere(wrap: Wrap, rank: int) -> Any:
    model = ReadElsewhere()
    net, opt = wrap(model, sgd(model))
    fit(net, opt, batches(rank))
    return model


def penalises(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    for x in batches(rank):
        opt.zero_grad()
        loss = net(x).pow(2).mean()
        (loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())).backward()
        opt.step()
    return model


def penalises_gradients(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    for x in batches(rank):
        opt.zero_grad()
        x.requires_grad_(True)
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.pow(2).mean() + (slope.norm() - 1).pow(2)).backward()
        opt.step()
    return model


def lbfgs(wrap: Wrap, rank: int) -> Any:
    model = mlp(6, 5, 2)
    net, opt = wrap(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4))
    losses = []
    for x in batches(0):  # its decisions depend on the loss, which must be alike

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            opt.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            return loss

        losses.append(opt.step(closure).detach())
    return model, losses


def closures(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    for x in batches(rank):

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            opt.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            return loss

        opt.step(closure)
    return model


def gan(wrap: Wrap, rank: int) -> Any:
    generator, critic = mlp(3, 8, 6), mlp(6, 8, 1)
    g_net, g_opt = wrap(generator, torch.optim.Adam(generator.parameters(), lr=1e-2))
    d_net, d_opt = wrap(critic, torch.optim.Adam(critic.parameters(), lr=1e-2))
    noise = torch.Generator().manual_seed(rank)
    for x in batches(rank):
        critic.zero_grad()  # and not the optimizer's
        real = F.softplus(-d_net(x)).mean()
        real.backward()
        fake = g_net(torch.randn(5, 3, generator=noise))
        F.softplus(d_net(fake.detach())).mean().backward()
        d_opt.step()
        generator.zero_grad()
        F.softplus(-d_net(fake)).mean().backward()  # gives the critic gradients too
        g_opt.step()
    return generator, critic


def two_optimizers(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    first, second = list(model[0].parameters()), [*model[2].parameters(), *model[4].parameters()]
    net, opt = wrap(model, torch.optim.SGD(first, lr=0.1))
    _, other = wrap(model, torch.optim.Adam(second, lr=1e-2))
    for x in batches(rank):
        opt.zero_grad()
        other.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()
        other.step()
    return model


def freezes(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    for k, x in enumerate(batches(rank)):
        model[2].requires_grad_(not 4 <= k < 7)
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()
    return model


def adds_a_group(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    opt: Any
    net, opt = wrap(model, torch.optim.SGD(model[2:].parameters(), lr=0.1, momentum=0.9))
    for k, x in enumerate(batches(rank)):
        if k == 5:
            opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
        opt.zero_grad()
        model.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()
    return model


class Branches(nn.Module):
    """Layers that only some ranks use in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = mlp(6, 6), mlp(6, 6), mlp(6, 6)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        x = self.a(x) if which % 2 else x
        return self.b(x) if which % 3 else x + 0 * self.a(x)


def branches(wrap: Wrap, rank: int) -> Any:
    model = Branches()
    net, opt = wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    for k, x in enumerate(batches(rank)):
        opt.zero_grad()
        net(x, k + rank).pow(2).mean().backward()
        opt.step()
    return model


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([mlp(6, 6, 6) for _ in range(3)])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def checkpoints(wrap: Wrap, rank: int, reentrant: bool = False) -> Any:
    model = Checkpointed(reentrant)
    net, opt = wrap(model, sgd(model))
    for x in batches(rank):
        opt.zero_grad()
        net(x.requires_grad_(True)).pow(2).mean().backward()
        opt.step()
    return model


def checkpoints_reentrant(wrap: Wrap, rank: int) -> Any:
    return checkpoints(wrap, rank, reentrant=True)


def evaluates(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    seen = []
    for x in batches(rank):
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()
        model.eval()
        with torch.inference_mode():
            seen.append(net(x).sum().item())
        model.train()
    return model, [torch.tensor(seen)]


def parametrizes(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.orthogonal(model[2])
    nn.utils.parametrizations.spectral_norm(model[4])  # which changes whenever it is looked at
    net, opt = wrap(model, sgd(model))
    fit(net, opt, batches(rank))
    return model


def channels_last(wrap: Wrap, rank: int) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model = model.to(memory_format=torch.channels_last)
    net, opt = wrap(model, sgd(model))
    for x in batches(rank, 2, 3, 8, 8):
        opt.zero_grad()
        net(x.to(memory_format=torch.channels_last)).pow(2).mean().backward()
        opt.step()
    return model


class Odd(nn.Module):
    """Parameters of no dimensions, and of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.body = mlp(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale + self.empty.sum()


def odd_shapes(wrap: Wrap, rank: int) -> Any:
    model = Odd()
    net, opt = wrap(model, sgd(model))
    fit(net, opt, batches(rank))
    return model


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
        self.layers = nn.ModuleList([mlp(6, 6, dtype=dtype) for dtype in dtypes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer[0].weight.dtype))
        return x.float()


def mixes_dtypes(wrap: Wrap, rank: int) -> Any:
    model = Mixed()
    net, opt = wrap(model, sgd(model))
    fit(net, opt, batches(rank))
    return model


def half(wrap: Wrap, rank: int) -> Any:
    model = mlp(dtype=torch.bfloat16)
    net, opt = wrap(model, sgd(model))
    fit(net, opt, batches(rank, dtype=torch.bfloat16))
    return model


def autocasts(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for x in batches(rank):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).pow(2).mean()
        loss.backward()
        opt.step()
    return model


def scales_by_hooks(wrap: Wrap, rank: int) -> Any:
    """The user's hooks were there first."""
    model = mlp()

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    for param in model.parameters():
        param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        param.register_post_accumulate_grad_hook(halve)
    net, opt = wrap(model, sgd(model))
    fit(net, opt, batches(rank))
    return model


def transforms(wrap: Wrap, rank: int) -> Any:
    """The model is differentiated by functions before it trains on."""
    model = mlp()
    net, opt = wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).pow(2).mean()

    found: list[torch.Tensor] = []
    for k, x in enumerate(batches(rank)):
        if k % 4 == 0:
            params = dict(model.named_parameters())
            found += torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x).values()
        elif k % 4 == 1:
            found += torch.func.grad(loss)(dict(model.named_parameters()), x).values()
        elif k % 4 == 2:
            found += torch.func.jvp(model, (x,), (torch.ones_like(x),))
        else:
            found.append(torch.func.grad(lambda x: model(x).sum())(x))
        fit(net, opt, [x])
    return model, [t.detach() for t in found]


def traces(wrap: Wrap, rank: int) -> Any:
    """The model's first pass after a step is one that is recorded, or that computes nothing."""
    model = mlp()
    net, opt = wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = []
    for k, x in enumerate(batches(rank)):
        if k % 4 == 0:
            found.append(make_fx(model)(x)(x))
        elif k % 4 == 1:
            found.append(torch.jit.trace(model, x)(x))
        elif k % 4 == 2:
            with FakeTensorMode(allow_non_fake_inputs=True) as fake:
                model(fake.from_tensor(x))
        else:
            with FlopCounterMode(display=False) as counter:
                model(x)
            found.append(torch.tensor(counter.get_total_flops()))
        fit(net, opt, [x])
    return model, [t.detach() for t in found]


def scripts_a_block(wrap: Wrap, rank: int) -> Any:
    """One whose parameters Python reads too, and which is also called by itself."""
    block = torch.jit.script(mlp(6, 8, 4))
    model = nn.Sequential(nn.Linear(6, 6), block)
    net, opt = wrap(model, sgd(model))
    found = []
    with torch.jit.optimized_execution(False):  # which rounds as it likes
        for x in batches(rank):
            opt.zero_grad()
            penalty = sum(p.square().sum() for p in model.parameters())
            (net(x).pow(2).mean() + 1e-2 * penalty).backward()
            opt.step()
            with torch.no_grad():
                found.append(block(x))
    return model, found


def accumulates(wrap: Wrap, rank: int) -> Any:
    """Two micro-batches a step; the last cycle is short."""
    model = mlp()
    net, opt = wrap(model, sgd(model))
    held = net if isinstance(net, nn.parallel.DistributedDataParallel) else opt
    opt.zero_grad()
    for k, x in enumerate(batches(rank)):
        last = k % 2 == 1 or k == STEPS - 1
        with contextlib.nullcontext() if last else held.no_sync():
            (net(x).pow(2).mean() / 2).backward()
        if last:
            opt.step()
            opt.zero_grad()
    return model


def compiles_blocks(wrap: Wrap, rank: int) -> Any:
    model = nn.Sequential(*[torch.compile(mlp(6, 6), backend="aot_eager") for _ in range(2)])
    net, opt = wrap(model, sgd(model))
    fit(net, opt, batches(rank))
    return model


def compiles_in_place(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    model[2].compile(backend="aot_eager")
    net, opt = wrap(model, sgd(model))
    fit(net, opt, batches(rank))
    return model


def compiles_whole(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    net = torch.compile(net, backend="aot_eager")
    fit(net, opt, batches(rank))
    return model


def compiles_a_function(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))

    @torch.compile(backend="aot_eager")
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return net(x).pow(2).mean()

    for x in batches(rank):
        opt.zero_grad()
        loss_of(x).backward()
        opt.step()
    return model


def compiles_anew(wrap: Wrap, rank: int) -> Any:
    """One rank alone comes upon a layer that is yet to be compiled, and whose update waits."""
    model = Branched().double()
    # Torch computes its factors in other precisions while something is compiled.
    net, opt = wrap(model, torch.optim.NAdam(model.parameters(), lr=0.1))

    @torch.compile(backend="eager")
    def output_of(x: torch.Tensor, use_sometimes: bool) -> torch.Tensor:
        return net(x, use_sometimes)

    for step, x in enumerate(batches(rank, dtype=torch.float64)):
        opt.zero_grad()
        output_of(x, rank == 0 or step >= 6).pow(2).mean().backward()
        opt.step()
    return model


def compiles_around(wrap: Wrap, rank: int) -> Any:
    """What reads a parameter runs uncompiled, and what it calls may be compiled again."""
    model = mlp()
    net, opt = wrap(model, sgd(model))

    @torch.compiler.disable(recursive=False)
    def penalty() -> torch.Tensor:
        return model[0].weight.square().sum()

    @torch.compile(backend="aot_eager")
    def weighted(x: torch.Tensor) -> torch.Tensor:
        return penalty() * x.pow(2).mean()

    for x in batches(rank):
        opt.zero_grad()
        loss = weighted(x) + net(x).pow(2).mean()
        loss.backward()
        opt.step()
    return model


def compiles_the_update(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))
    update = torch.compile(lambda: opt.step(), backend="aot_eager")
    for x in batches(rank):
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        update()
    return model


def compiles_the_step(wrap: Wrap, rank: int) -> Any:
    model = mlp()
    net, opt = wrap(model, sgd(model))

    @torch.compile(backend="aot_eager")
    def step(x: torch.Tensor) -> None:
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()

    for x in batches(rank):
        step(x)
    return model

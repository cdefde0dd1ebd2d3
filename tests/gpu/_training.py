# SPDX-License-Identifier: Apache-2.0
"""Training runs that the tests compare, and delays on the GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from _models import OPTIMIZERS, Awkward, groups
from usbyte.planning.cost_fit import Measured

SHARDED = "sharded"  # besides usbyte's overlap modes


def prepare():
    """Same kernels in every run, and no probes: what plans cost is not what is asked here."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    for flavour in ("flash", "mem_efficient", "cudnn"):  # their backward adds in any order
        getattr(torch.backends.cuda, f"enable_{flavour}_sdp", lambda on: None)(False)
    transport = importlib.import_module("usbyte.torch.optimizer.gradients.plan_executor")
    assert hasattr(transport, "measure")
    transport.measure = _made_up


def _made_up(_context, _communicator, largest_bytes, **_how):
    """A network of 100 us and 1 GB/s; probing it takes minutes where ranks share a GPU."""
    return [
        Measured(kind, window, size, 1e-4 + 1e-9 * size)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
        for window in (1, 2)
        for size in (1024, largest_bytes)
    ]


def wrap(mode, model, optimizer, transport, **options):
    """The model that is called and the optimizer that steps, under "ddp" or an overlap mode."""
    if mode == "ddp":
        group = dist.new_group(backend=transport.backend)
        net = DistributedDataParallel(model, find_unused_parameters=True, process_group=group)
        return net, optimizer
    sharded = mode == SHARDED
    wrapped = ub.DistributedOptimizer(
        optimizer, model.named_parameters(), overlap="forward" if sharded else mode,
        shard_optimizer=sharded, **options,
    )  # fmt: skip
    return model, wrapped


def train(
    mode, transport, optimizer, rank, *, steps=12, mixed=False, dtype=None, autocast=None,
    scale=None, accumulate=1, **options,
):  # fmt: skip
    """Trains `Awkward` and returns its state_dict.

    Every mode sees the same data and starts from the same parameters.

    Args:
        mode: "ddp", "forward", "backward" or SHARDED.
        transport: The ranks'.
        optimizer: A name in `OPTIMIZERS`.
        rank: This one; decides about the data.
        steps: How many.
        mixed: Some layers are of float64.
        dtype: Of all parameters, by name; None for as they are.
        autocast: The dtype of the forward pass, by name; None for without.
        scale: What a GradScaler begins with; None for without.
        accumulate: Backward passes for each step.
        options: For usbyte.
    """
    torch.manual_seed(3)
    model = Awkward(mixed).to(transport.device)
    if dtype is not None:
        model.to(getattr(torch, dtype))
    net, opt = wrap(mode, model, OPTIMIZERS[optimizer](groups(model)), transport, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    scaler = torch.amp.GradScaler(
        transport.device, init_scale=scale or 1.0, growth_interval=4, enabled=scale is not None
    )
    start = model.scale.detach().clone()
    data = torch.Generator().manual_seed(100 + rank)

    def backward(used):
        tokens = torch.randint(0, 40, (4, 6), generator=data).to(transport.device)
        with _cast(transport.device, autocast):
            logits = net(tokens, used).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens.flatten())
        scaler.scale(loss).backward()

    for step in range(steps):
        opt.zero_grad()
        used = step % 3 == 0 or (step % 3 == 1 and rank == 0)
        for _ in range(accumulate - 1):
            with net.no_sync() if mode == "ddp" else opt.no_sync():
                backward(used)
        backward(used)
        scaler.step(opt)
        scaler.update()
        scheduler.step()
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    if mode != "ddp":
        opt.close()
    assert not torch.equal(state["scale"], start), "nothing was trained"
    return state


def _cast(device, dtype):
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=getattr(torch, dtype))


def wrong(state, expected, tolerance=0.0):
    """Names of tensors that differ by more than `tolerance`, relative to their largest value."""
    assert state.keys() == expected.keys()
    found = []
    for name, value in expected.items():
        assert value.isfinite().all(), name
        differs = (state[name].double() - value.double()).abs().max()
        # Not the other way round: what is not a number is wrong.
        if not differs <= tolerance * value.double().abs().max():
            found.append(name)
    return found


@functools.cache
def _cycles_per_s():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(100_000_000)
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return 100_000_000 / (begin.elapsed_time(end) * 1e-3)


def sleep(device, seconds):
    """Keeps the current stream busy for about so long; the host goes on."""
    if device == "cuda":
        torch.cuda._sleep(int(seconds * _cycles_per_s()))


class Late(torch.autograd.Function):
    """Passes on what it gets; its backward keeps the stream busy first."""

    @staticmethod
    def forward(ctx, x, device, seconds):
        ctx.args = device, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        sleep(*ctx.args)
        return grad, None, None


class Deep(nn.Module):
    """Dense layers, of which gradients come late if `late_s` is set.

    Attributes:
        late_s: Seconds by which each layer's gradients come late.
        side: Every other layer runs on this stream; None for all on the current one.
    """

    def __init__(self, layers=6, width=96, dtype=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(layers))
        self.late_s = 0.0
        self.side = None

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if self.late_s:
                x = Late.apply(x, x.device.type, self.late_s)
            on_side = self.side is not None and i % 2 == 1
            x = self._aside(layer, x) if on_side else torch.tanh(layer(x))
        return x

    def _aside(self, layer, x):
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            y = torch.tanh(layer(x))
        main.wait_stream(self.side)
        x.record_stream(self.side)
        y.record_stream(main)
        return y

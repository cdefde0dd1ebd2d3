# SPDX-License-Identifier: Apache-2.0
"""`param.grad` is the tensor that torch would have there, and keeps the values it would keep."""

import copy
import logging

import torch
import torch.distributed as dist
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks

_MODES = ("backward", "forward", "auto")
_STEPS = 8  # beyond the first plan, so that the flat buffer has moved


class _Model(nn.Module):
    """Three layers, of which a rank may leave out the one in the middle."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, skips=False):
        """The output."""
        x = self.first(x).tanh()
        return self.last(x if skips else self.second(x).tanh())


def _batches(rank):
    generator = torch.Generator().manual_seed(7 + rank)
    return [torch.randn(5, 6, generator=generator) for _ in range(_STEPS)]


def _keep_tasks(of):
    """Gradients of two tasks are kept as `of` takes them from `param.grad`, then added."""

    def script(net, opt, params, batches):
        for x in batches:
            kept = []
            for task in range(2):
                opt.zero_grad()
                net(x)[:, task].pow(2).mean().mul(task + 1).backward()
                kept.append([of(p.grad) for p in params])
            for p, a, b in zip(params, *kept, strict=True):
                p.grad = (a + b).view_as(p)
            opt.step()

    return script


def _keep_one_late(net, opt, params, batches):
    """From the fifth step on, a script compares a gradient with that of the step before."""
    before = None
    for k, x in enumerate(batches):
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        if before is not None:
            params[2].grad.mul_(1 + (before * params[2].grad).sum())
        if k > 3:
            before = params[2].grad
        opt.step()


def _list_taken_once(net, opt, params, batches):
    """A list of gradients made after the first backward pass stays that of `param.grad`."""
    net(batches[0]).pow(2).mean().backward()
    grads = [p.grad for p in params]
    for x in batches:
        opt.zero_grad(set_to_none=False)
        assert all(not g.any() for g in grads)
        net(x).pow(2).mean().backward()
        assert all(p.grad is g for p, g in zip(params, grads, strict=True))
        torch._foreach_mul_(grads, 0.5)
        opt.step()
        assert all(p.grad is g for p, g in zip(params, grads, strict=True))


def _flat_buffer(make):
    """Gradients are parts of a flat buffer, by which they are clipped."""

    def script(net, opt, params, batches):
        flat = torch.zeros(sum(p.numel() for p in params))
        for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = make(part).view_as(p)
        for x in batches:
            flat.zero_()
            net(x).pow(2).mean().backward()
            flat.mul_(0.1 / flat.norm())
            opt.step()
            flat.zero_()

    return script


def _leave_out_on_a_rank(net, opt, params, batches):
    """One rank does not use a parameter whose earlier gradient all have kept."""
    kept = []
    for x in batches:
        opt.zero_grad()
        net(x, skips=dist.get_rank() == 1).pow(2).mean().backward()
        for p, before in zip(params, kept, strict=False):
            p.grad.add_(before.mean(), alpha=0.01)
        kept = [p.grad for p in params]
        opt.step()


class _KeepsGradients(torch.optim.SGD):
    """Keeps each gradient for the next step, by reference."""

    @torch.no_grad()
    def step(self, closure=None):
        """Steps by the gradient and half of the one before."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                before = state.get("before", torch.zeros_like(param))
                param.add_(param.grad + 0.5 * before, alpha=-group["lr"])
                state["before"] = param.grad


def _keep_on_a_rank(net, opt, params, batches):
    """One rank alone keeps gradients, and looks at them a step later."""
    kept = []
    for x in batches:
        before = [g.clone() for g in kept]
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        assert all(map(torch.equal, before, kept))
        if dist.get_rank() == 1:
            kept = [p.grad for p in params]
        opt.step()


def _plain(net, opt, params, batches):
    for x in batches:
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()


_SCRIPTS = {
    "the tensor": _keep_tasks(lambda g: g),
    "detach()": _keep_tasks(lambda g: g.detach()),
    "data": _keep_tasks(lambda g: g.data),
    "a view": _keep_tasks(lambda g: g.view(-1)),
    "one, late": _keep_one_late,
    "a list": _list_taken_once,
    "on a rank": _keep_on_a_rank,
    "a flat buffer": _flat_buffer(lambda part: part),
    "a flat buffer's data": _flat_buffer(lambda part: part.data),
    "unused on a rank": _leave_out_on_a_rank,
    "an optimizer that keeps gradients": _plain,
}


def _differing(rank, size):
    """Names of scripts and modes after which parameters are not DDP's, bit for bit.

    Also those that wait for all gradients under overlap="forward" without a warning, or that are
    warned of in vain.
    """
    ub.init()
    found = []
    warned = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("usbyte").addHandler(handler)
    for name, script in _SCRIPTS.items():
        model = _Model()
        net = nn.parallel.DistributedDataParallel(
            copy.deepcopy(model), find_unused_parameters=name == "unused on a rank"
        )
        params = list(net.parameters())
        kind = _KeepsGradients if script is _plain else torch.optim.SGD
        sgd = kind(params, lr=0.1)
        script(net, sgd, params, _batches(rank))
        del net
        for mode in _MODES:
            mine = copy.deepcopy(model)
            opt = ub.DistributedOptimizer(
                kind(mine.parameters(), lr=0.1), mine.named_parameters(), overlap=mode
            )
            script(mine, opt, list(mine.parameters()), _batches(rank))
            opt.synchronize()
            if not all(torch.equal(a, b) for a, b in zip(params, mine.parameters(), strict=True)):
                found.append(f"{name}, {mode}")
            waits = any("share memory with other tensors of the script, so" in w for w in warned)
            if waits != (mode == "forward" and name.startswith("a flat buffer")):
                found.append(f"{name}, {mode}: warnings {warned}")
            warned.clear()
            opt.close()
    return found


def test_gradients_are_those_that_torch_would_give():
    """Scripts that keep gradients, views of them or buffers under them train as with DDP."""
    for found in run_ranks(2, _differing, env={"USBYTE_LEARNING_STEPS": "3"}, timeout=120):
        assert not found

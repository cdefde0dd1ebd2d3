"""What would train on wrong numbers is an error instead."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _models import short_probes
from _ranks import run_ranks
from usbyte.errors import Error, MismatchError, UsageError


def _warmed(overlap="forward", steps=8, model=None, **options):
    short_probes()
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        overlap=overlap,
        **options,
    )
    for _ in range(steps):
        opt.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
    return model, opt


def end(opt):
    """Ends an optimizer that has raised; what it still held is lost, and it says so again."""
    with contextlib.suppress(Error):
        opt.close()


def misuse(rank, size):
    ub.init()
    # A gradient changed in flight, in three ways.
    for change in (
        lambda p: p.grad.mul_(2),
        lambda p: setattr(p, "grad", p.grad * 2),
        lambda p: setattr(p, "grad", None),
    ):
        model, opt = _warmed()
        opt.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        change(model[1].weight)
        with pytest.raises(Error, match=r"gradient of '1\.weight' was .* after backward"):
            opt.step()
        end(opt)
    # Zeroed in flight behind the optimizer's back.
    model, opt = _warmed()
    model.zero_grad(set_to_none=False)
    with pytest.raises(Error, match=r"gradient of '0\.(weight|bias)' was modified"):
        model(torch.ones(1, 4))
    end(opt)
    # After synchronize() it may be changed.
    model, opt = _warmed()
    opt.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    opt.synchronize()
    before = model[0].weight.detach().clone()
    model[0].weight.grad.zero_()
    opt.step()
    assert torch.equal(model[0].weight, before)
    # Backward again before step().
    model, opt = _warmed()
    opt.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(UsageError, match="before step"):
        model(torch.ones(1, 4)).sum().backward()
    end(opt)
    # A parameter read before its update in a way the first steps did not show.
    model, opt = _warmed()
    opt.zero_grad()
    out = torch.nn.functional.linear(torch.ones(1, 4), model[0].weight)
    with pytest.raises(Error, match=r"'0\.weight' was used in the forward pass before"):
        out.sum().backward()
    end(opt)


def test_what_would_be_silently_wrong_is_an_error():
    run_ranks(2, misuse, timeout=90)


def more_misuse(rank, size):
    ub.init()
    x = torch.ones(1, 4)
    # A closure, from the first step on.
    model, opt = _warmed(steps=0)
    with pytest.raises(UsageError, match="closure"):
        opt.step(lambda: 0.0)
    # A parameter written to while its update is pending.
    model, opt = _warmed()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    with pytest.raises(Error, match=r"'0\.weight' was written to between step"):
        model(x)
    end(opt)
    # A closed optimizer, and parameters wrapped twice.
    model, opt = _warmed()
    with pytest.raises(UsageError, match=r"'0\.weight' is already wrapped"):
        _warmed(model=model)
    opt.close()
    with pytest.raises(UsageError, match="closed"):
        opt.step()
    _warmed(model=model)[1].close()
    # Sums are not summed again.
    model, opt = _warmed("backward", op=ub.Sum)
    with pytest.raises(UsageError, match="summed again"):
        model(x).sum().backward()
    end(opt)
    # A gradient changed by a hook that runs after usbyte's.
    model, opt = _warmed("backward")

    def double(param):
        param.grad.mul_(2)

    model[0].weight.register_post_accumulate_grad_hook(double)
    opt.zero_grad()
    with pytest.raises(Error, match=r"'0\.weight' was modified after backward"):
        model(x).sum().backward()
    end(opt)


def test_more_of_what_would_be_silently_wrong_is_an_error():
    run_ranks(2, more_misuse, timeout=90)


def interrupted(rank, size):
    ub.init()
    x = torch.ones(1, 4)
    # Only the second parameter with a gradient was read too early.
    model, opt = _warmed()
    opt.zero_grad()
    stale = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
    with pytest.raises(Error, match=r"'0\.(weight|bias)' was used in the forward pass before"):
        model[1](stale).sum().backward()
    with pytest.raises(Error, match="did not end"):
        opt.step()
    end(opt)


def test_an_interrupted_backward_is_final():
    run_ranks(2, interrupted, timeout=60)


def loads(rank, size):
    ub.init()
    model, opt = _warmed()
    zeros = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    opt.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    model.load_state_dict(zeros)  # the pending update must come before, not after
    opt.synchronize()
    assert all(not v.any() for v in model.state_dict().values())


def test_load_state_dict_applies_pending_updates_first():
    run_ranks(2, loads, timeout=60)


def differs(rank, size):
    ub.init()
    for model, text in [
        (nn.Linear(4, 4 + rank), r"'weight' has shape \[4, 4\] on rank 0 but \[5, 4\] on rank 1"),
        (nn.Linear(4, 4, bias=rank == 0), "only rank 0 has 'bias'"),
        (nn.Linear(4, 4, dtype=torch.float64 if rank else None), "'weight' has dtype float32"),
    ]:
        with pytest.raises(MismatchError, match=text):
            ub.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1), model.named_parameters()
            )


def settings_differ(rank, size):
    ub.init()
    for options, text in [
        ({"op": ub.Sum if rank else ub.Average}, "op is Average on rank 0 but Sum on rank 1"),
        ({"bucket_bytes": 1 << (20 + rank)}, "bucket_bytes is 1048576 on rank 0 but 2097152 on"),
        ({"overlap": "forward" if rank else "backward"}, "overlap is backward on rank 0 but forw"),
    ]:
        model = nn.Linear(4, 4)
        with pytest.raises(MismatchError, match=text):
            ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), **options)


def test_arguments_that_differ_are_the_same_error_on_every_rank():
    run_ranks(2, settings_differ, timeout=60)


def test_parameters_that_differ_are_the_same_error_on_every_rank():
    run_ranks(2, differs, timeout=60)


def test_bad_arguments(single):
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(UsageError, match="named_parameters lacks 1"):
        ub.DistributedOptimizer(opt, [("weight", model.weight)])
    with pytest.raises(UsageError, match="two parameters named 'w'"):
        ub.DistributedOptimizer(opt, [("w", model.weight), ("w", model.bias)])
    with pytest.raises(UsageError, match="pairs"):
        ub.DistributedOptimizer(opt, model.parameters())
    with pytest.raises(UsageError, match="overlap"):
        ub.DistributedOptimizer(opt, overlap="sideways")
    with pytest.raises(UsageError, match="bucket_bytes must be positive, not 0"):
        ub.DistributedOptimizer(opt, bucket_bytes=0)
    with pytest.raises(UsageError, match=r"unknown policy 'fast'.*bytescheduler"):
        ub.DistributedOptimizer(opt, policy="fast")

# SPDX-License-Identifier: Apache-2.0
"""What would train on wrong numbers is an error instead."""

from __future__ import annotations

import contextlib
import copy
import io
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import usbyte.torch as ub
from _models import difference, warnings_from_now_on
from _ranks import run_ranks
from usbyte.errors import Error, MismatchError, UsageError


def _warmed(overlap="forward", steps=8, model=None, **options):
    torch.manual_seed(0)
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


def _plain(steps=8):
    """What `_warmed` is without other ranks, which have the same data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        opt.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
    return model, opt


def replace(model, opt):
    model[1].weight.grad = model[1].weight.grad * 2


def remove(model, opt):
    model[1].weight.grad = None


def clip_by_hand(model, opt):
    for p in model.parameters():
        p.grad.clamp_(-0.01, 0.01)


def zero_all(model, opt):
    model.zero_grad(set_to_none=False)


BETWEEN = {
    "changed": lambda model, opt: model[1].weight.grad.mul_(2),
    "replaced": replace,
    "removed": remove,
    "clipped": lambda model, opt: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clipped by value": lambda model, opt: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "clipped by hand": clip_by_hand,
    "zeroed": zero_all,
    "removed with the model's": lambda model, opt: model.zero_grad(),
}


def misuse(rank, size):
    ub.init()
    x = torch.ones(1, 4)
    # Gradients in flight are fetched for whoever looks at them.
    for name, change in BETWEEN.items():
        states, norms = [], []
        for make in (_plain, _warmed):
            model, opt = make()
            opt.zero_grad()
            model(x).sum().backward()
            norms.append([p.grad.norm() for p in model[0].parameters()])
            change(model, opt)
            opt.step()
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()
            states.append({k: v.clone() for k, v in model.state_dict().items()})
        opt.close()
        assert torch.equal(torch.stack(norms[0]), torch.stack(norms[1])), name
        assert difference(states[1], states[0]) == 0, name
    # So are updates that are pending, for whoever looks at, or changes, a parameter or gradient.
    for name, change in AFTER.items():
        states, seen = [], []
        for make in (_plain, _warmed):
            model, opt = make()
            seen.append(change(model, opt))
            model(x).sum().backward()
            opt.step()
            states.append({k: v.clone() for k, v in model.state_dict().items()})
        opt.close()
        assert seen[0] is None or torch.equal(*seen), name
        assert difference(states[1], states[0]) == 0, name
    # Backward again before step(), without another forward pass: gradients become final at once.
    states = []
    for make in (_plain, _warmed):
        model, opt = make()
        opt.zero_grad()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        opt.step()
        states.append({k: v.clone() for k, v in model.state_dict().items()})
    opt.close()
    assert difference(states[1], states[0]) == 0


def fill(model, opt):
    with torch.no_grad():
        model[0].weight.fill_(1.0)


def assign(model, opt):
    model[0].weight.data = torch.ones(8, 4)


def average(model, opt):
    means = [torch.zeros_like(p) for p in model.parameters()]
    torch._foreach_lerp_(means, list(model.parameters()), 0.5)
    return torch.cat([m.flatten() for m in means])


def copied(model, opt):
    twin = copy.deepcopy(model)
    other = io.BytesIO()
    torch.save(model, other)
    other.seek(0)
    loaded = torch.load(other, weights_only=False)
    loaded(torch.ones(1, 4)).sum().backward()  # of which nothing is sent
    return torch.cat([p.detach().flatten() for m in (twin, loaded) for p in m.parameters()])


AFTER = {
    "written to": fill,
    "given other memory": assign,
    "averaged": average,
    "as a vector": lambda model, opt: nn.utils.parameters_to_vector(model.parameters()).detach(),
    "copied": copied,
    "used past its module": lambda model, opt: nn.functional.linear(
        torch.ones(1, 4), model[0].weight, model[0].bias
    ).detach(),
    "printed": lambda model, opt: print(model[0].weight),
    "its gradient": lambda model, opt: model[1].weight.grad.clone(),
    "gradients zeroed": zero_all,
}


def test_what_is_in_flight_is_fetched_for_whoever_uses_it():
    run_ranks(2, misuse, timeout=90)


class PastPython(torch.autograd.Function):
    """Looks at its weight without torch's knowledge."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(8, 4), torch.ones(8)


def more_misuse(rank, size):
    ub.init()
    x = torch.ones(1, 4)
    # A closure that may be called again, from the first step on.
    model = nn.Linear(4, 4)
    opt = ub.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), overlap="forward")
    with pytest.raises(UsageError, match="closure several times"):
        opt.step(lambda: 0.0)
    opt.close()
    # A view of an earlier gradient has nothing to do with later ones.
    model, opt = _warmed()
    view = model[1].weight.grad.view(-1)
    opt.zero_grad()
    model(x).sum().backward()
    before = model[1].weight.grad.clone()
    view.mul_(2)
    assert torch.equal(model[1].weight.grad, before)
    opt.step()
    opt.close()
    # Other tensors over a parameter's memory write to what is up to date.
    model, opt = _warmed()
    view = model[0].weight.detach()
    opt.zero_grad()
    model(x).sum().backward()
    opt.step()
    view.fill_(1.0)
    model(x)
    assert (model[0].weight == 1.0).all()
    opt.close()
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
    # One that such a hook replaces, or resets as an update inside backward does.
    for overlap in ("backward", "forward"):
        for what, change in [("replaced", lambda p: p.grad * 2), ("reset", lambda p: None)]:
            model, opt = _warmed(overlap)
            model[0].weight.register_post_accumulate_grad_hook(
                lambda p, change=change: setattr(p, "grad", change(p))
            )
            opt.zero_grad()
            with pytest.raises(UsageError, match=rf"'0\.weight' was {what} inside backward"):
                model(x).sum().backward()
            end(opt)
    # And one that was reset by a hook that ran before.
    model = nn.Sequential(nn.Linear(x.shape[1], 4))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
    )
    with pytest.raises(UsageError, match=r"'0\.weight' was reset by a hook of its parameter"):
        model(x).sum().backward()
    end(opt)


def test_more_of_what_would_be_silently_wrong_is_an_error():
    run_ranks(2, more_misuse, timeout=90)


def sets_by_hand(rank, size):
    ub.init()
    logged = warnings_from_now_on()
    x = torch.ones(1, 4)
    for overlap in ("backward", "forward"):
        for steps in (0, 8):  # while learning, and after
            model, opt = _warmed(overlap, steps)
            opt.zero_grad()
            opt.step()  # of nothing, which is nothing to tell of
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            opt.step()  # as torch.distributed.checkpoint does, to have state made
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()
            assert not logged
            params = list(model.parameters())
            for _ in range(2):
                opt.zero_grad()
                grads = torch.autograd.grad(model(x).sum(), params)
                for p, grad in zip(params, grads, strict=True):
                    p.grad = grad
                opt.step()
            assert len(logged) == 1, logged
            assert "gradient of '0.weight' was assigned" in logged.pop()
            opt.close()


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def halved(model):
    """As scripts of long ago do."""
    for p in model.parameters():
        p.grad.data = p.grad.data * 0.5


def channels_last(model):
    """With the gradients that the parameters have."""
    model.to(memory_format=torch.channels_last)


def there_and_back(model):
    model.double().float()


def moves_gradients(rank, size):
    ub.init()

    def trained(model, opt, change, by_hand=False):
        data = torch.Generator().manual_seed(rank)
        for step in range(10):
            opt.zero_grad()
            model(torch.randn(2, 2, 6, 6, generator=data)).square().mean().backward()
            for p in model.parameters() if by_hand else ():
                p.grad = ub.allreduce(p.grad)
            if step in (1, 6):
                change(model)
            opt.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    for change in (halved, channels_last, there_and_back):
        model = Conv()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        # DDP does not get over other strides.
        want = trained(model, inner, change, by_hand=True)
        for overlap in ("backward", "forward"):
            model = Conv()
            inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            opt = ub.DistributedOptimizer(inner, model.named_parameters(), overlap=overlap)
            got = trained(model, opt, change)
            assert all(torch.equal(got[name], want[name]) for name in want), (change, overlap)
            opt.close()
    model = Conv()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = ub.DistributedOptimizer(inner, model.named_parameters())
    with pytest.raises(UsageError, match=r"of torch\.float64, and was of torch\.float32 when the"):
        model.double()(torch.ones(2, 2, 6, 6).double()).sum().backward()


def test_gradients_may_be_given_other_memory():
    run_ranks(2, moves_gradients, timeout=90, env={"USBYTE_LEARNING_STEPS": "3"})


def test_gradients_that_nobody_sends_are_told_of():
    run_ranks(2, sets_by_hand, timeout=90)


LATE = r"'0\.(weight|bias)' was used in the forward pass before"


def stale_loss(model):
    """Only the second parameter with a gradient was read too early."""
    stale = PastPython.apply(torch.ones(1, 8, requires_grad=True), *model[0].parameters())
    return model[1](stale).sum()


def interrupted(rank, size, policy, resets_between):
    ub.init()
    model, opt = _warmed(policy=policy)
    if not resets_between:
        opt.zero_grad()
    loss = stale_loss(model)
    if resets_between:
        opt.zero_grad()
    with pytest.raises(Error, match=LATE):
        loss.backward()
    with pytest.raises(UsageError, match=r"earlier backward\(\) has failed, restart"):
        model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(Error, match="did not end"):
        opt.step()
    end(opt)


def repeats(model, x, reentrant):
    for _ in range(2):
        x = checkpoint(model[0], x, use_reentrant=reentrant)
    return model[1](x).pow(2).mean()


def repeats_checkpoints(rank, size):
    ub.init()
    x = torch.full((2, 4), 1.0 + rank, requires_grad=True)
    weights = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        model, opt = _warmed(model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        opt.zero_grad()
        with opt.no_sync() if reentrant else contextlib.nullcontext():
            repeats(model, x, reentrant).backward()
        opt.step()
        weights.append(model[0].weight.detach().clone())
        if reentrant:
            opt.zero_grad()
            with pytest.raises(UsageError, match=r"second gradient of '0\..*use_reentrant=False"):
                repeats(model, x, reentrant).backward()
        end(opt)
    assert torch.equal(*weights)


def test_a_second_gradient_in_one_backward_pass_is_an_error():
    run_ranks(2, repeats_checkpoints, timeout=60)


def accumulates_stale(rank, size):
    ub.init()
    model, opt = _warmed()
    with opt.no_sync():
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
        loss = stale_loss(model)
        with pytest.raises(Error, match=LATE):
            loss.backward()
    end(opt)


def test_micro_batches_do_not_use_parameters_before_their_updates():
    run_ranks(2, accumulates_stale, timeout=60)


def zero_twice(rank, size):
    """Resetting gradients in either way, twice, before updates have been applied."""
    ub.init()
    results = {}
    ways = [*product((True, False), repeat=2), *product((True, False), repeat=1)]
    for overlap, way in product(("backward", "forward"), ways):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        opt = ub.DistributedOptimizer(opt, model.named_parameters(), overlap=overlap, policy="wfbp")
        for step in range(7):
            for to_none in way:
                opt.zero_grad(set_to_none=to_none)
            x = torch.full((2, 4), 1.0 + rank + step)
            # One rank skips a layer, all skip it, none does.
            y = model[0](x) if step == 4 or (step == 5 and rank == 0) else model(x)
            y.pow(2).mean().mul(0.1).backward()
            opt.step()
        opt.drain()
        results[overlap, way] = torch.cat([p.detach().flatten() for p in model.parameters()])
        opt.close()
    for way in ways:
        assert torch.equal(results["forward", way], results["backward", way]), way


def test_gradients_can_be_reset_in_either_way_again_and_again():
    run_ranks(2, zero_twice, env={"USBYTE_LEARNING_STEPS": "2"})


@pytest.mark.parametrize(
    ("policy", "resets_between"),
    # With buckets the first parameter to be used brings the updates of all.
    [("wfbp", False), ("ddp", False), ("ddp", True)],
)
def test_an_interrupted_backward_is_final(policy, resets_between):
    run_ranks(2, interrupted, policy, resets_between, timeout=60)


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
        ({"shard_optimizer": rank == 0}, "shard_optimizer is True on rank 0 but False on rank 1"),
    ]:
        model = nn.Linear(4, 4)
        with pytest.raises(MismatchError, match=text):
            ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), **options)


def test_arguments_that_differ_are_the_same_error_on_every_rank():
    run_ranks(2, settings_differ, timeout=60)


def test_parameters_that_differ_are_the_same_error_on_every_rank():
    run_ranks(2, differs, timeout=60)


def numpy_sizes(_rank, _size):
    ub.init()
    sizes = {"bucket_bytes": np.int64(1024), "backward_passes_per_step": np.int32(1)}
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1)
    ub.DistributedOptimizer(inner, policy="ddp", **sizes).close()
    clips = {"shard_optimizer": True, "max_grad_norm": np.float32(1)}
    ub.DistributedOptimizer(inner, policy="dear", **clips).close()


def test_numbers_may_be_of_any_type():
    run_ranks(2, numpy_sizes)


def test_bad_arguments(single):
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(UsageError, match="op must be Average or Sum, not 'Average'"):
        ub.DistributedOptimizer(opt, op="Average")
    for factor in [0, float("nan"), float("inf"), None, "2", torch.ones(2)]:
        with pytest.raises(UsageError, match="gradient_predivide_factor must be a positive number"):
            ub.DistributedOptimizer(opt, model=model, gradient_predivide_factor=factor)
    for norm in [0, -1.0, float("nan"), "1", torch.ones(2), np.ones(2), 10**400]:
        with pytest.raises(UsageError, match="max_grad_norm must be a positive number"):
            ub.DistributedOptimizer(opt, shard_optimizer=True, max_grad_norm=norm)
    with pytest.raises(UsageError, match="named_parameters lacks 1"):
        ub.DistributedOptimizer(opt, [("weight", model.weight)])
    with pytest.raises(UsageError, match=r"two parameters named 'w': .*prefix="):
        ub.DistributedOptimizer(opt, [("w", model.weight), ("w", model.bias)])
    with pytest.raises(UsageError, match="pairs"):
        ub.DistributedOptimizer(opt, model.parameters())
    with pytest.raises(UsageError, match="overlap"):
        ub.DistributedOptimizer(opt, overlap="sideways")
    with pytest.raises(UsageError, match="bucket_bytes must be positive, not 0"):
        ub.DistributedOptimizer(opt, bucket_bytes=0)
    for name in ("partition_bytes", "tune_steps", "backward_passes_per_step"):
        with pytest.raises(UsageError, match=f"{name} must be a whole number, not 8000000.0"):
            ub.DistributedOptimizer(opt, **{name: 8e6})
    with pytest.raises(UsageError, match=r"policy must be the name of one, .*, not \['auto'\]"):
        ub.DistributedOptimizer(opt, policy=["auto"])
    with pytest.raises(UsageError, match=r"unknown policy 'fast'; known are .*bytescheduler"):
        ub.DistributedOptimizer(opt, policy="fast")
    with pytest.raises(UsageError, match=r"unknown policy 'atuo': did you mean 'auto'\?"):
        ub.DistributedOptimizer(opt, policy="atuo")
    with pytest.raises(UsageError, match=r"not Linear: make one first, as in .*SGD\(model\.param"):
        ub.DistributedOptimizer(model, model.named_parameters())

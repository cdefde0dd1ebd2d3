# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer against DDP and the bare optimizer: the same numbers."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _models import OPTIMIZERS, Awkward, difference, train
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch import testing


def equals_ddp(rank, size, optimizers, modes, tolerance, double):
    ub.init()
    for optimizer in optimizers:
        expected = train("ddp", optimizer, rank, size, double=double)
        for mode, policy in modes:
            got = train(
                mode, optimizer, rank, size, policy=policy, partition_bytes=2048, double=double
            )
            worst = difference(got, expected)
            assert worst <= tolerance, (optimizer, mode, policy, worst)


def test_two_ranks_equal_ddp_bit_for_bit():
    modes = [
        ("backward", None),
        ("forward", None),
        ("forward", "wfbp"),
        ("forward", "bytescheduler"),
    ]
    run_ranks(2, equals_ddp, list(OPTIMIZERS), modes, 0.0, False, timeout=120)


def test_four_ranks_equal_ddp_closely():
    # Four ranks sum in another order. Adam divides noise by noise where a gradient is zero but for
    # rounding (the bias of attention's keys), so that its runs can only be compared where rounding
    # stays far below its epsilon.
    modes = [("backward", None), ("forward", None)]
    run_ranks(4, equals_ddp, ["nesterov"], modes, 1e-6, False, timeout=120)
    run_ranks(4, equals_ddp, ["adamw"], modes, 1e-6, True, timeout=120)


def equals_ddp_variants(rank, size):
    ub.init()
    for variant in [
        {"set_to_none": False},
        {"accumulate": 3},
        {"accumulate": 2, "set_to_none": False},
        {"mixed": True},
    ]:
        expected = train("ddp", "adamw", rank, size, 12, **variant)
        for mode in ("backward", "forward"):
            worst = difference(train(mode, "adamw", rank, size, 12, **variant), expected)
            assert worst == 0, (variant, mode, worst)


def test_zero_grad_accumulation_and_mixed_dtypes_equal_ddp():
    run_ranks(2, equals_ddp_variants, timeout=120)


def reads_outside(rank, size):
    ub.init()
    expected, states = [], []

    def read_ddp(step, model, opt):
        expected.append(({k: v.clone() for k, v in model.state_dict().items()},
                         copy.deepcopy(opt.state_dict())))  # fmt: skip

    def read_forward(step, model, opt):
        # Alternate which of the two is asked first: each must drain by itself.
        first = [model.state_dict, opt.state_dict][step % 2]()
        pair = (model.state_dict(), opt.state_dict())
        assert set(first) == set(pair[step % 2])
        states.append(({k: v.clone() for k, v in pair[0].items()}, copy.deepcopy(pair[1])))

    train("ddp", "adam", rank, size, 10, on_step=read_ddp)
    train("forward", "adam", rank, size, 10, on_step=read_forward)
    for (model_a, opt_a), (model_b, opt_b) in zip(expected, states, strict=True):
        assert difference(model_b, model_a) == 0
        assert opt_a["param_groups"] == opt_b["param_groups"]
        assert opt_a["state"].keys() == opt_b["state"].keys()
        for key, entry in opt_a["state"].items():
            for field, value in entry.items():
                assert torch.equal(value, opt_b["state"][key][field])


def test_state_dicts_are_up_to_date_in_every_step():
    run_ranks(2, reads_outside, timeout=90)


def evaluates(rank, size):
    ub.init()
    outputs = {"ddp": [], "forward": []}
    for mode, rows in outputs.items():

        def look(step, model, opt, rows=rows):
            model.eval()
            with torch.no_grad():
                rows.append(model(torch.arange(6)[None]).clone())
            model.train()

        train(mode, "sgd", rank, size, 8, on_step=look)
    for a, b in zip(*outputs.values(), strict=True):
        assert torch.equal(a, b)


def test_evaluation_between_steps_sees_updated_parameters():
    run_ranks(2, evaluates, timeout=90)


class Prototypes(nn.Module):
    """Reads one layer's weight outside any forward, and uses another in one micro-batch only."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.prototypes = nn.Linear(4, 3, bias=False)
        self.first = nn.Linear(4, 4)

    def forward(self, x, first):
        return self.first(self.body(x)) if first else self.body(x)


def micro_batches(rank, size):
    ub.init()
    results = []
    for mode in ("ddp", "backward", "forward"):
        torch.manual_seed(0)
        model = Prototypes()
        net = model
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if mode == "ddp":
            net = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        else:
            opt = ub.DistributedOptimizer(opt, model.named_parameters(), overlap=mode)
        for step in range(8):
            opt.zero_grad()
            x = torch.full((2, 4), 0.1 * (rank + step))
            with (net if mode == "ddp" else opt).no_sync():
                with (net if mode == "ddp" else opt).no_sync():
                    pass
                net(x, first=rank == 0).pow(2).sum().backward()
            features = net(x, first=False)
            if mode != "ddp":  # DDP does not see a read outside forward, so it is left out there
                features = features + 0 * (features @ model.prototypes.weight.T).sum()
            features.pow(2).sum().backward()
            opt.step()
        results.append({k: v.clone() for k, v in model.state_dict().items()})
        if mode != "ddp":
            opt.close()
    for got in results[1:]:
        assert difference(got, results[0]) == 0


def test_micro_batches_that_use_different_layers_equal_ddp():
    run_ranks(2, micro_batches, timeout=60)


def scaled(rank, size):
    ub.init()
    for overlap in ("backward", "forward"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        start = model.weight.detach().clone()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        opt = ub.DistributedOptimizer(inner, model.named_parameters(), overlap=overlap)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for _ in range(5):
            opt.zero_grad()
            scaler.scale(model(torch.ones(1, 4)).sum()).backward()
            scaler.step(opt)
            scaler.update()
        opt.synchronize()
        assert torch.allclose(start - model.weight.detach(), torch.full((4, 4), 0.5))
        opt.close()


def test_fused_optimizers_get_the_scale_of_a_grad_scaler():
    run_ranks(2, scaled, timeout=60)


def overflows_unsent(rank, size, kept, unscale, fused):
    """Rank 1's own gradients are infinite in a step, sent by its last pass or at its end."""
    ub.init()
    ends = []
    for keep in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        passes = (1 if kept == "no_sync" else 3) if keep else 2
        opt = ub.DistributedOptimizer(
            inner, model.named_parameters(), backward_passes_per_step=passes
        )
        accumulates = opt.no_sync if passes == 1 else contextlib.nullcontext
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(9):
            opt.zero_grad()
            x = torch.full((2, 4), math.inf if (rank, step) == (1, 3) else float(step + rank))
            with accumulates():
                for part in x:
                    scaler.scale(model(part).sum()).backward()
            if unscale:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
        assert scaler.get_scale() == 32.0
        ends.append({k: v.clone() for k, v in model.state_dict().items()})
        with opt.no_sync():
            model(x).sum().backward()
        torch.amp.GradScaler("cpu", enabled=False).unscale_(opt)  # looks at nothing
        assert testing.has_accumulated(opt)
        opt.close()
    assert difference(*ends) == 0


@pytest.mark.parametrize(
    ("kept", "unscale", "fused"), [("no_sync", True, False), ("passes", False, True)]
)
def test_a_scaler_looks_at_averages_where_nothing_was_sent_before(kept, unscale, fused):
    run_ranks(2, overflows_unsent, kept, unscale, fused, env={"USBYTE_LEARNING_STEPS": "2"})


class Negated(torch.autograd.Function):
    """Whose gradient of ones is there as a view that negates them."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return torch._neg_view(torch.ones(3))


def negated(rank, size):
    ub.init()
    for overlap in ("backward", "forward"):
        param = nn.Parameter(torch.zeros(3))
        opt = ub.DistributedOptimizer(torch.optim.SGD([param], lr=0.5), overlap=overlap)
        for step in range(4):
            opt.zero_grad()
            Negated.apply(param).backward()
            assert torch.equal(param.grad, torch.full((3,), -1.0))
            opt.step()
            assert torch.equal(param.detach(), torch.full((3,), 0.5 * (step + 1)))
        opt.close()


def test_gradients_that_are_negating_views_are_their_values():
    run_ranks(2, negated, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


class Mixed(nn.Module):
    """Two layers of another dtype than the others."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.narrow = nn.ModuleList(nn.Linear(6, 6, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x, used):
        x = self.first(x)
        for layer in self.narrow[:used]:
            x = x + layer(x.bfloat16()).float()
        return self.last(x)


def mixes(rank, size):
    ub.init()
    states = []
    for overlap in ("backward", "forward"):
        torch.manual_seed(0)
        model = Mixed()
        opt = ub.DistributedOptimizer(
            torch.optim.Adafactor(model.parameters()), overlap=overlap, policy="wfbp"
        )
        data = torch.Generator().manual_seed(rank)
        for step in range(6):
            opt.zero_grad()
            used = 1 if (step, rank) == (5, 1) else 2
            x = torch.randn(4, 6, generator=data)

            def closure(model=model, x=x, used=used):
                loss = model(x, used).square().mean()
                loss.backward()
                return loss

            if step < 3:
                closure()
                opt.step()
            else:
                opt.step(closure)
        states.append({k: v.clone() for k, v in model.state_dict().items()})
        opt.close()
    assert difference(*states) == 0


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="torch has none before 2.5")
def test_optimizers_that_look_across_dtypes_take_whole_steps():
    run_ranks(2, mixes, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def hooked(rank, size):
    ub.init()
    for overlap in ("backward", "forward"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        opt = ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), overlap=overlap, tune_steps=0
        )
        has_hooks = []
        for step in range(8):
            if step == 4:
                testing.request_plan(opt)
            model(torch.ones(1, 4)).sum().backward()
            opt.step()
            has_hooks.append([bool(m._forward_pre_hooks) for m in model.modules()])
        learned = [overlap == "forward"] * 3
        # Asked for in step 4, agreed on in the next one, learned in two.
        assert has_hooks == [[True] * 3, *[learned] * 4, *[[True] * 3] * 2, learned], has_hooks
        opt.close()
        assert not model._forward_pre_hooks


def test_modules_have_hooks_only_while_they_learn_or_updates_wait():
    run_ranks(2, hooked, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def two_optimizers(rank, size):
    ub.init()
    torch.manual_seed(1)
    results = []
    for overlap in ("backward", "forward"):
        torch.manual_seed(1)
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        opts = [
            ub.DistributedOptimizer(torch.optim.Adam(m.parameters()), overlap=overlap)
            for m in (a, b)
        ]
        for step in range(8):
            x = torch.full((2, 4), float(rank + step))
            for opt in opts:
                opt.zero_grad()
            b(a(x)).pow(2).sum().backward()
            for opt in opts:
                opt.step()
        opts[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        results.append(
            [p.detach().clone() for p in itertools.chain(a.parameters(), b.parameters())]
        )
        opts[0].synchronize()
        opts[1].synchronize()
        results[-1] = [p.detach().clone() for p in itertools.chain(a.parameters(), b.parameters())]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_two_optimizers_in_one_process():
    run_ranks(2, two_optimizers, timeout=60)


def broadcasts(rank, size):
    ub.init()
    torch.manual_seed(rank)
    model = Awkward()
    opt = torch.optim.Adam(model.parameters())
    if rank == 1:  # only the root has a state, as after loading a checkpoint
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        opt.param_groups[0]["lr"] = 0.5
    ub.broadcast_parameters(model.state_dict(), root_rank=1)
    ub.broadcast_optimizer_state(opt, root_rank=1)
    assert opt.param_groups[0]["lr"] == 0.5
    assert opt.param_groups[0]["betas"] == (0.9, 0.999)
    assert isinstance(opt.param_groups[0]["betas"], tuple)
    check = [*model.parameters(), *(s["exp_avg"] for s in opt.state.values())]
    assert len(check) == 2 * len(list(model.parameters()))
    total = torch.stack([t.detach().double().sum() for t in check])
    assert torch.equal(ub.allreduce(total, op=ub.Max), ub.allreduce(total, op=ub.Min))
    thing = {"a": [1, (2.5, None)], 3: torch.arange(4), "s": "text", "nan": float("inf")}
    got = ub.broadcast_object(thing if rank == 0 else None)
    assert got["a"] == [1, (2.5, None)]
    assert torch.equal(got[3], torch.arange(4))
    with pytest.raises(UsageError, match=r"object\['f'\] is a function"):
        ub.broadcast_object({"f": broadcasts}, root_rank=1)


def test_broadcast_of_parameters_state_and_objects():
    run_ranks(2, broadcasts, timeout=60)


def test_one_process_is_the_bare_optimizer(single):
    def run(wrap):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        if wrap:
            opt = ub.DistributedOptimizer(opt, model.named_parameters(), overlap="forward")
            assert isinstance(opt, torch.optim.Optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10)
        for _ in range(10):
            opt.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            opt.step()
            scheduler.step()
        return model.weight.detach()

    assert torch.equal(run(True), run(False))


def test_policies_are_what_the_core_has():
    assert {"bytescheduler", "ddp", "wfbp"} <= set(_core.policies())


def names_a_policy(rank, size, policy):
    ub.init()
    model = nn.Linear(3, 2)
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), overlap="backward", policy=policy
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return optimizer.plan.policy


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_the_former_name_of_a_policy_is_accepted_and_never_shown(given):
    policy, env = ("usbyte", {}) if given == "argument" else (None, {"USBYTE_POLICY": "usbyte"})
    env["USBYTE_LEARNING_STEPS"] = "1"
    assert run_ranks(2, names_a_policy, policy, env=env) == ["us-byte"] * 2


def hooks_come_late(rank, size, when):
    """How many parameters a hook sees in each step, that comes between a step and its updates."""
    ub.init()
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), overlap="forward", policy="wfbp"
    )
    seen = []
    for k in range(6):
        opt.zero_grad()
        model(torch.ones(1, 16)).square().mean().backward()
        opt.step()
        if k == 4:
            register = getattr(opt, f"register_step_{when}_hook")
            register(lambda opt, *_: seen.append(len(opt.param_groups[0]["params"])))
    return seen


@pytest.mark.parametrize("when", ["pre", "post"])
def test_step_hooks_see_whole_steps_from_the_next_one_on(when):
    told = run_ranks(2, hooks_come_late, when, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})
    assert told == [[8], [8]]

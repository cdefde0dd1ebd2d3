# SPDX-License-Identifier: Apache-2.0
"""Sharded updates against whole ones: the same numbers, state and checkpoints."""

from __future__ import annotations

import copy
import logging
import time
from itertools import product

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _models import OPTIMIZERS, difference, train
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import Error, MismatchError, UsageError
from usbyte.torch import testing
from usbyte.torch.plan.plan_chooser import flags_apart

ELEMENTWISE = {
    **OPTIMIZERS,
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
}


def equals_ddp(rank, size, names, tolerance, double):
    ub.init()
    OPTIMIZERS.update(ELEMENTWISE)
    for name in names:
        expected = train("ddp", name, rank, size, steps=14, double=double)
        for policy in _core.sharding_policies():
            got = train(
                "forward", name, rank, size, steps=14, double=double, policy=policy,
                shard_optimizer=True,
            )  # fmt: skip
            assert difference(got, expected) <= tolerance, (name, policy, difference(got, expected))


def test_two_ranks_equal_ddp_bit_for_bit():
    names = list(ELEMENTWISE)
    run_ranks(2, equals_ddp, names, 0.0, False, timeout=200, env={"USBYTE_LEARNING_STEPS": "2"})


def test_four_ranks_equal_ddp_closely():
    names = ["sgd", "adamw"]
    run_ranks(4, equals_ddp, names, 1e-6, True, timeout=200, env={"USBYTE_LEARNING_STEPS": "2"})


def variants(rank, size):
    ub.init()
    for options in [{"mixed": True}, {"accumulate": 3}, {"set_to_none": False}]:
        expected = train("ddp", "adam", rank, size, steps=12, **options)
        got = train("forward", "adam", rank, size, steps=12, shard_optimizer=True, **options)
        assert difference(got, expected) == 0, options

    def replan(step, _model, opt):
        if step == 5 and rank == 1:  # the first step that learns anew leaves a layer out
            testing.simulate_step_time_change(opt)

    for options in [{}, {"set_to_none": False}]:
        expected = train("ddp", "adam", rank, size, steps=16, **options)
        got = train(
            "forward", "adam", rank, size, 16, shard_optimizer=True, on_step=replan, **options
        )
        assert difference(got, expected) == 0, options


def test_variants_and_a_new_plan_equal_ddp():
    run_ranks(2, variants, timeout=120, env={"USBYTE_LEARNING_STEPS": "2"})


def small(shard, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    if shard:
        options["shard_optimizer"] = True
    return model, ub.DistributedOptimizer(
        opt, model.named_parameters(), overlap="forward", **options
    )


def run(model, opt, steps, rank, seed=0):
    data = torch.Generator().manual_seed(seed * 100 + rank)
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(4, 30, generator=data)).square().sum().backward()
        opt.step()


def same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, dict):
            same(value, b[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, b[key]), key
        else:
            assert value == b[key], key


def adds_a_layer(rank, size):
    """Also once the state is in shards."""
    ub.init()
    states = []
    for shard in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))
        opt = ub.DistributedOptimizer(
            torch.optim.Adam(model[0].parameters(), lr=1e-2),
            model.named_parameters(),
            shard_optimizer=shard,
        )
        run(model, opt, 4, rank)
        opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
        run(model, opt, 4, rank, seed=1)
        states.append(({k: v.clone() for k, v in model.state_dict().items()}, opt.state_dict()))
        opt.close()
    same(states[0][0], states[1][0])
    same(states[0][1]["state"], states[1][1]["state"])


def test_parameters_can_be_added_to_what_is_in_shards():
    run_ranks(2, adds_a_layer, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def reinits(rank, size):
    ub.init()
    model, opt = small(shard=True)
    run(model, opt, 4, rank)
    inner = opt._inner
    ub.shutdown()
    ub.init()
    with pytest.raises(UsageError, match="shards of its state from before a shutdown"):
        ub.DistributedOptimizer(inner, model.named_parameters())


def test_state_that_shutdown_left_in_shards_is_an_error():
    run_ranks(2, reinits, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def checkpoints(rank, size, path):
    ub.init()
    model, opt = small(shard=False)
    run(model, opt, 8, rank)
    sharded_model, sharded = small(shard=True)
    run(sharded_model, sharded, 8, rank)
    kept = sum(
        v.numel() for state in sharded._inner.state.values() for v in state.values() if v.dim()
    )
    whole = 2 * sum(p.numel() for p in model.parameters())
    assert kept <= whole / size + 2 * 2 * 8  # two moments, at most a chunk more for each block
    same(sharded.state_dict(), opt.state_dict())
    if rank == 0:
        torch.save([sharded_model.state_dict(), sharded.state_dict()], f"{path}/{size}.pt")
    else:
        sharded.state_dict()  # collective
    # Loading puts the old state back, wherever training has gone meanwhile.
    before, weights = (
        sharded.state_dict(),
        {k: v.clone() for k, v in sharded_model.state_dict().items()},
    )
    run(sharded_model, sharded, 3, rank, seed=1)
    sharded.load_state_dict(before)
    sharded_model.load_state_dict(weights)
    same(sharded.state_dict(), opt.state_dict())
    run(model, opt, 4, rank, seed=2)
    run(sharded_model, sharded, 4, rank, seed=2)
    same(sharded.state_dict(), opt.state_dict())
    same(dict(sharded_model.state_dict()), dict(model.state_dict()))
    # Closing gives the wrapped optimizer its whole state back.
    expected = sharded.state_dict()
    sharded.close()
    same(sharded._inner.state_dict(), expected)


def resumes(rank, size, path):
    ub.init()
    weights, state = torch.load(f"{path}/2.pt")
    results = []
    for shard in (False, True):
        model, opt = small(shard)
        run(model, opt, 4, rank, seed=3)
        model.load_state_dict(weights)
        opt.load_state_dict(copy.deepcopy(state))  # torch does not copy what it loads
        run(model, opt, 4, rank, seed=4)
        results.append(dict(model.state_dict()))
    for key, value in results[0].items():
        error = (value - results[1][key]).abs().max()
        assert torch.allclose(value, results[1][key], rtol=1e-5, atol=1e-7), (key, error)


def test_checkpoints_are_whole_and_fit_another_number_of_ranks(tmp_path):
    env = {"USBYTE_LEARNING_STEPS": "2"}
    run_ranks(2, checkpoints, str(tmp_path), timeout=90, env=env)
    run_ranks(3, resumes, str(tmp_path), timeout=90, env=env)


def keeps_dtypes(rank, size):
    ub.init()
    torch.set_default_dtype(torch.float64)
    states = []
    for shard in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(30, 3)
        opt = ub.DistributedOptimizer(
            torch.optim.NAdam(model.parameters()), model.named_parameters(), shard_optimizer=shard
        )
        run(model, opt, 4, rank)
        opt.load_state_dict(opt.state_dict())
        run(model, opt, 2, rank, seed=1)
        states.append(opt.state_dict()["state"])
        opt.close()
    for i, state in states[0].items():
        for key, value in state.items():
            torch.testing.assert_close(states[1][i][key], value, rtol=1e-12, atol=1e-14)


def test_scalars_of_the_state_keep_their_dtypes():
    run_ranks(2, keeps_dtypes, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def clips(rank, size):
    ub.init()
    weights = []
    for shard in (True, False):
        model, opt = small(shard, **({"max_grad_norm": 0.05} if shard else {}))
        data = torch.Generator().manual_seed(rank)
        for _ in range(10):
            opt.zero_grad()
            model(torch.randn(4, 30, generator=data)).square().sum().backward()
            if not shard:
                opt.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            opt.step()
        weights.append(dict(model.state_dict()))
    for key, value in weights[0].items():
        assert torch.allclose(value, weights[1][key], rtol=1e-5, atol=1e-7)


def test_the_norm_is_clipped_over_all_shards():
    run_ranks(2, clips, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def updates_late(rank, size):
    ub.init()
    model, opt = small(True, policy="dear")
    run(model, opt, 8, rank)
    opt.drain()
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("usbyte").addHandler(handler)
    if rank == 1:
        opt.step, step = lambda: (time.sleep(6), step()), opt.step
    run(model, opt, 1, rank)
    opt.drain()
    ub.shutdown()
    return lines


def test_a_rank_that_comes_late_to_its_update_is_named():
    told = run_ranks(2, updates_late, env={"USBYTE_STALL_WARNING_S": "2"})[0]
    assert any(line.endswith("rank 1 has not updated its shards in step 9") for line in told), told


def drop_by_optimizer(model, opt):
    opt.zero_grad()


def drop_by_model(model, opt):
    model.zero_grad()


def drop_in_step(model, opt):
    model.zero_grad()
    opt.step()


def drop_later(model, opt):
    """What one rank does alone in between waits for no other."""
    opt.param_groups[0]["lr"] *= 0.9
    if torch.distributed.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(1, 30))
    torch.distributed.barrier()
    opt.state_dict()
    model.zero_grad()


def drops(rank, size):
    ub.init()

    def train(shard, drop):
        """Every third batch is not good enough for a step."""
        options = {"max_grad_norm": 1e9} if shard and drop is drop_later else {}
        model, opt = small(shard, **options)
        data = torch.Generator().manual_seed(rank)
        for step in range(14):
            model(torch.randn(4, 30, generator=data)).square().sum().backward()
            if step == 9 and rank == 1 and shard:
                testing.simulate_step_time_change(opt)  # a plan ends with what is dropped
            if step % 3 == 2:
                drop(model, opt)
            else:
                opt.step()
                opt.zero_grad()
        return dict(model.state_dict()) | {"state": opt.state_dict()}

    for drop in (drop_by_optimizer, drop_by_model, drop_in_step, drop_later):
        same(train(True, drop), train(False, drop))


def test_gradients_may_be_dropped():
    run_ranks(2, drops, timeout=90, env={"USBYTE_LEARNING_STEPS": "2"})


def leaves_gradients(rank, size):
    ub.init()

    def train(shard):
        """A game, in which the discriminator gets gradients that are not for it."""
        torch.manual_seed(0)
        nets = [nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))]
        generates, judges = (
            ub.DistributedOptimizer(
                torch.optim.Adam(net.parameters(), lr=1e-2),
                net.named_parameters(),
                overlap="forward",
                model=net,
                shard_optimizer=shard,
            )
            for net in nets
        )
        generator, judge = nets
        data = torch.Generator().manual_seed(rank)
        for _ in range(12):
            noise, real = torch.randn(2, 5, 6, generator=data)
            judge.zero_grad()
            (judge(generator(noise).detach()).mean() - judge(real).mean()).backward()
            judges.step()
            generator.zero_grad()
            (-judge(generator(noise)).mean()).backward()
            generates.step()
        return dict(generator.state_dict()) | {f"d.{k}": v for k, v in judge.state_dict().items()}

    same(train(True), train(False))


def test_gradients_that_are_for_another_model_are_dropped():
    run_ranks(2, leaves_gradients, timeout=90, env={"USBYTE_LEARNING_STEPS": "2"})


def forgets_the_step(rank, size):
    """Of a single parameter, whose hook is the first and the last at once."""
    ub.init()
    model = nn.Linear(30, 3, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    opt = ub.DistributedOptimizer(opt, model.named_parameters(), shard_optimizer=True)
    run(model, opt, 4, rank)
    opt.zero_grad()
    model(torch.ones(1, 30)).sum().backward()
    with pytest.raises(UsageError, match="ran again before step"):
        model(torch.ones(1, 30)).sum().backward()


def test_a_step_that_is_forgotten_is_no_drop():
    run_ranks(2, forgets_the_step, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def drops_a_first_use(rank, size):
    """A parameter that only a dropped batch has used keeps zeros, where gradients are zeroed."""
    ub.init()

    def train(shard):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(30, 3), nn.Linear(30, 3)])
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        opt = ub.DistributedOptimizer(
            opt, model.named_parameters(), overlap="forward", model=model, shard_optimizer=shard
        )
        x = torch.ones(4, 30) * (rank + 1)
        for step in range(12):
            late = model[1](x).sum() if step in (7, 10) else 0.0
            (model[0](x).square().sum() + late).backward()
            if step != 7:
                opt.step()
            opt.zero_grad(set_to_none=False)
        return dict(model.state_dict())

    same(train(True), train(False))


def test_what_a_dropped_batch_has_used_counts_as_used():
    run_ranks(2, drops_a_first_use, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def uses_what_is_gone(rank, size):
    """Where gradients have been, parameters are on their way then."""
    ub.init()
    model, opt = small(shard=True)
    run(model, opt, 4, rank)
    for drops in (True, False):
        opt.zero_grad()
        model(torch.ones(1, 30)).sum().backward()
        grads = [param.grad for param in model.parameters()]
        if drops:
            opt.zero_grad()
        else:
            opt.step()
        for grad in grads:
            with pytest.raises(UsageError, match="no rank has whole gradients"):
                grad.norm()
    opt.zero_grad()
    model(torch.ones(1, 30)).sum().backward()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert opt.param_groups[0]["lr"] == 1e-2
    with pytest.raises(UsageError, match="do not replace or remove"):
        opt.step()


def test_gradients_that_are_used_up_cannot_be_read():
    run_ranks(2, uses_what_is_gone, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def drops_alone(rank, size):
    ub.init()
    model, opt = small(shard=True)
    run(model, opt, 4, rank)
    opt.zero_grad()
    model(torch.ones(1, 30)).sum().backward()
    if rank == 1:
        with pytest.raises(MismatchError, match=r"another rank has updated .* reset here"):
            opt.zero_grad()
        with pytest.raises(Error, match="are not those of any step"):
            opt.state_dict()
    else:
        opt.step()


def test_a_rank_that_drops_gradients_alone_gets_an_error():
    run_ranks(2, drops_alone, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def misuse(rank, size):
    ub.init()
    model, opt = small(shard=True)
    run(model, opt, 4, rank)
    opt.zero_grad()
    model(torch.ones(1, 30)).sum().backward()
    with pytest.raises(UsageError, match="no rank has whole gradients"):
        opt.synchronize()
    opt.step()
    with pytest.raises(UsageError, match="again without backward"):
        opt.step()
    opt.zero_grad(set_to_none=False)
    with pytest.raises(UsageError, match="again without backward"):
        opt.step()
    opt.zero_grad()
    opt.step()  # which does nothing, as without shards
    model[0].weight.grad = torch.ones(20, 30)
    with pytest.raises(UsageError, match=r"gradient of '0\.weight' was assigned"):
        opt.step()
    opt.zero_grad()
    model, opt = small(shard=True, policy=lambda p, n: _core.make_plan("ddp", p, n))
    with pytest.raises(UsageError, match="plans all_reduces"):
        run(model, opt, 4, rank)
    opt.close()
    model, opt = small(shard=True)
    run(model, opt, 4, rank)
    opt.synchronize()
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(Error, match=r"'0\.weight' was given other memory"):
        run(model, opt, 1, rank)


def test_what_shards_cannot_do_is_an_error():
    run_ranks(2, misuse, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def test_unsupported_optimizers_and_modes_are_errors(single):
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(UsageError, match=r"LBFGS is not known to.*AdamW"):
        ub.DistributedOptimizer(torch.optim.LBFGS(params), shard_optimizer=True, overlap="forward")
    with pytest.raises(UsageError, match='remove overlap="backward"'):
        ub.DistributedOptimizer(
            torch.optim.SGD(params, lr=1), shard_optimizer=True, overlap="backward"
        )
    with pytest.raises(UsageError, match="'wfbp' does not support shard_optimizer=True; use"):
        ub.DistributedOptimizer(
            torch.optim.SGD(params, lr=1), shard_optimizer=True, overlap="forward", policy="wfbp"
        )
    with pytest.raises(UsageError, match="max_grad_norm needs shard_optimizer"):
        ub.DistributedOptimizer(torch.optim.SGD(params, lr=1), max_grad_norm=1.0)


def test_flags_travel_apart():
    tensors = [_core.TensorSpec("usbyte.used", 3, "float32", 0), _core.TensorSpec("a", 5, offset=3)]
    plan = _core.Plan(
        "dear",
        tensors,
        [
            _core.Op("reduce_scatter", [(0, 4)], 16),
            _core.Op("reduce_scatter", [(4, 8)], 16),
            _core.Op("all_gather", [(0, 4)], 16),
            _core.Op("all_gather", [(4, 8)], 16),
        ],
    )
    ops = [(op.kind, op.blocks) for op in flags_apart(plan).ops]
    assert ops == [
        ("reduce_scatter", [(3, 4)]),
        ("reduce_scatter", [(4, 8)]),
        ("all_reduce", [(0, 3)]),
        ("all_gather", [(3, 4)]),
        ("all_gather", [(4, 8)]),
    ]


def reset_twice(rank, size):
    """A gradient that was reset to None stays so, which weight decay tells from zeros."""
    ub.init()
    for ways in product((True, False), repeat=2):
        results = []
        for shard in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            inner = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
            opt = ub.DistributedOptimizer(inner, model.named_parameters(), shard_optimizer=shard)
            for step in range(8):
                for to_none in ways:
                    opt.zero_grad(set_to_none=to_none)
                x = torch.full((2, 4), 1.0 + rank + step)
                y = model[2](model[0](x)) if step in (4, 5, 7) else model(x)
                y.pow(2).mean().backward()
                opt.step()
            opt.drain()
            results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            opt.close()
        assert torch.equal(*results), ways


def test_gradients_can_be_reset_in_either_way_again():
    run_ranks(2, reset_twice, env={"USBYTE_LEARNING_STEPS": "2"})


def leaves_out_resets(rank, size):
    """A step uses its gradients up, before there are shards too."""
    ub.init()
    expected, opt = small(shard=True)
    run(expected, opt, 8, rank)
    opt.close()
    model, opt = small(shard=True)
    opt.zero_grad = lambda: None
    run(model, opt, 8, rank)
    assert all(param.grad is None for param in model.parameters())
    same(model.state_dict(), expected.state_dict())
    opt.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_use_gradients_up_while_a_plan_is_learned_too(ranks):
    run_ranks(ranks, leaves_out_resets, timeout=60, env={"USBYTE_LEARNING_STEPS": "4"})


def trains_in_parts(rank, size, shard):
    """A layer that is left out of a step moves on by its momentum, as its gradient is zero."""
    ub.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    if shard:
        opt = ub.DistributedOptimizer(opt, model.named_parameters(), shard_optimizer=True)
    for k in range(8):
        opt.zero_grad(set_to_none=False)
        used = model if k % 2 == 0 else model[0]
        used(torch.ones(2, 3)).sum().backward()
        opt.step()
    return [param.tolist() for param in model.parameters()]


def test_gradients_that_were_used_up_can_be_zeros():
    expected = run_ranks(1, trains_in_parts, False)[0]
    for ranks in (1, 2):
        for found in run_ranks(ranks, trains_in_parts, True, env={"USBYTE_LEARNING_STEPS": "3"}):
            for mine, its in zip(found, expected, strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(its))

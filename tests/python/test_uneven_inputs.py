# SPDX-License-Identifier: Apache-2.0
"""Ranks with unequal numbers of batches, and micro-batches: DDP's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import _scripts
import usbyte.torch as ub
from _models import difference
from _ranks import run_ranks
from usbyte.errors import FaultError, MismatchError, UsageError

SHARDED = {"shard_optimizer": True, "policy": "dear"}


def batches(rank, count):
    data = torch.Generator().manual_seed(rank)
    return [torch.randn(5, 6, generator=data) for _ in range(count)]


def state(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def uneven(rank, size, counts):
    ub.init()

    def make():
        torch.manual_seed(0)
        model = _scripts.mlp()
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    def falling(opt):  # which ranks that have joined do not see fall
        return torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.8)

    model, opt = make()
    scheduler = falling(opt)
    net = nn.parallel.DistributedDataParallel(model)
    with Join([net]):
        for x in batches(rank, counts[rank]):
            opt.zero_grad()
            net(x).pow(2).mean().backward()
            opt.step()
            scheduler.step()
    want = state(model)
    for options in ({"overlap": "backward"}, {"overlap": "forward"}, {"policy": "wfbp"}, SHARDED):
        model, opt = make()
        opt = ub.DistributedOptimizer(opt, model.named_parameters(), **options)
        scheduler = falling(opt)
        for k, x in enumerate(batches(rank, counts[rank])):
            opt.zero_grad()
            model(x).pow(2).mean().backward()
            opt.step()
            scheduler.step()
            there = ub.allreduce(torch.ones(1), op=ub.Sum)  # which ranks that have joined answer
            assert there.item() == sum(count > k for count in counts)
        last = ub.join()
        assert counts[last] == max(counts)
        assert last == ub.broadcast_object(last)
        assert difference(state(model), want) <= (0 if size == 2 else 1e-6), options
        # All ranks go on alike.
        for x in batches(rank, 2):
            opt.zero_grad()
            model(x).pow(2).mean().backward()
            opt.step()
        sums = torch.stack([p.double().sum() for p in model.state_dict().values()])
        assert torch.equal(ub.allreduce(sums, op=ub.Max), ub.allreduce(sums, op=ub.Min)), options
        opt.close()


def test_ranks_that_run_out_of_data_join():
    env = {"USBYTE_LEARNING_STEPS": "4"}
    run_ranks(2, uneven, [9, 2], timeout=90, env=env)  # one joins while the other still learns
    run_ranks(3, uneven, [6, 0, 8], timeout=90, env=env)


def steps_without_a_batch(rank, size):
    """As some that are left out do; those who have joined do not see them."""
    ub.init()
    torch.manual_seed(0)
    model = _scripts.mlp()
    opt = ub.DistributedOptimizer(_scripts.sgd(model), model.named_parameters(), **SHARDED)
    for x in batches(rank, 6 - 6 * rank):
        opt.zero_grad()
        model(x).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
        opt.step()
    assert ub.join() == 0
    sums = torch.stack([p.double().sum() for p in model.state_dict().values()])
    assert torch.equal(ub.allreduce(sums, op=ub.Max), ub.allreduce(sums, op=ub.Min))
    opt.close()


def test_who_has_data_may_step_without_a_batch():
    run_ranks(2, steps_without_a_batch, timeout=60, env={"USBYTE_LEARNING_STEPS": "3"})


def leaves_a_batch_out(rank, size, reset):
    """Those who have joined take its step all the same."""
    ub.init()
    torch.manual_seed(0)
    model = _scripts.mlp()
    opt = ub.DistributedOptimizer(_scripts.sgd(model), model.named_parameters(), **SHARDED)
    x = batches(0, 1)[0]
    for _ in range(5):
        opt.zero_grad()
        model(x).pow(2).mean().backward()
        opt.step()
    opt.zero_grad()
    if rank == 1:
        with pytest.raises(FaultError):  # rank 0 has ended
            ub.join()
        return None
    learns = opt._session.controller.shards is None
    wrong, why = MismatchError, "another rank has updated"
    if learns:
        wrong, why = UsageError, r"no step\(\) has followed"

    def leave_out():
        (opt if reset == "optimizer" else model).zero_grad()
        model(x).pow(2).mean().backward()

    model(x).pow(2).mean().backward()
    with pytest.raises(wrong, match=why):
        leave_out()
    return learns


@pytest.mark.parametrize(("steps", "reset"), [(3, "optimizer"), (3, "model"), (20, "model")])
def test_who_leaves_a_batch_out_while_others_have_joined_gets_an_error(steps, reset):
    env = {"USBYTE_LEARNING_STEPS": str(steps), "USBYTE_STALL_LIMIT_S": "10"}
    assert run_ranks(2, leaves_a_batch_out, reset, timeout=60, env=env)[0] == (steps == 20)


def micro_batches(rank, size):
    ub.init()
    count = 11  # of micro-batches, two to a step: the last step has one

    def make():
        torch.manual_seed(0)
        model = _scripts.mlp()
        return model, _scripts.sgd(model)

    model, opt = make()
    net = nn.parallel.DistributedDataParallel(model)
    for k, x in enumerate(batches(rank, count)):
        if k % 2 == 0 and k < count - 1:
            with net.no_sync():
                net(x).pow(2).mean().backward()
            continue
        net(x).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        opt.step()
        opt.zero_grad()
    want = state(model)

    def by_passes(opt, model, k, x):
        model(x).pow(2).mean().backward()

    def by_no_sync(opt, model, k, x):  # with nothing outside: step() sends
        with opt.no_sync():
            model(x).pow(2).mean().backward()

    for overlap in ("backward", "forward", "auto"):
        for how, options in ((by_passes, {"backward_passes_per_step": 2}), (by_no_sync, {})):
            model, opt = make()
            opt = ub.DistributedOptimizer(
                opt, model.named_parameters(), overlap=overlap, policy="wfbp", **options
            )
            for k, x in enumerate(batches(rank, count)):
                how(opt, model, k, x)
                if k % 2 == 0 and k < count - 1:
                    continue
                if how is by_passes:  # as in Horovod
                    opt.synchronize()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
                    with opt.skip_synchronize():
                        opt.step()
                else:
                    opt.step()
                opt.zero_grad()
            if how is by_passes:
                assert difference(state(model), want) == 0, overlap
            else:
                sums = torch.stack([p.double().sum() for p in model.state_dict().values()])
                assert torch.equal(ub.allreduce(sums, op=ub.Max), ub.allreduce(sums, op=ub.Min))
            opt.close()


def test_micro_batches_and_a_short_last_cycle_equal_ddp():
    run_ranks(2, micro_batches, timeout=90, env={"USBYTE_LEARNING_STEPS": "3"})


def adds_between_micro_batches(rank, size):
    """What was accumulated before parameters are added is sent by step() all the same."""
    ub.init()
    for options in ({"overlap": "backward"}, {"overlap": "forward"}, SHARDED):
        torch.manual_seed(0)
        model = _scripts.mlp()
        inner = torch.optim.SGD(model[:4].parameters(), lr=0.1)
        opt = ub.DistributedOptimizer(inner, model.named_parameters(), **options)
        for k, x in enumerate(batches(rank, 6)):
            opt.zero_grad()
            if k == 4:
                model[4].zero_grad()
            with opt.no_sync():
                model(x).pow(2).mean().backward()
            if k == 4:
                opt.add_param_group({"params": list(model[4].parameters())})
            opt.step()
        flat = nn.utils.parameters_to_vector(model.parameters())
        assert torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min)), options
        torch.manual_seed(0)
        alone = _scripts.mlp()
        for k in range(6):
            alone.zero_grad()
            for each in range(size):
                (alone(batches(each, 6)[k]).pow(2).mean() / size).backward()
            with torch.no_grad():
                for p in alone.parameters() if k >= 4 else alone[:4].parameters():
                    p -= 0.1 * p.grad
        assert difference(state(model), state(alone)) <= 1e-5, options
        opt.close()


def test_parameters_may_be_added_between_micro_batches():
    run_ranks(2, adds_between_micro_batches, timeout=60, env={"USBYTE_LEARNING_STEPS": "2"})


def steps_apart(rank, size, how, options):
    """Ranks that have joined take a step with whatever is sent, the others do not."""
    ub.init()
    torch.manual_seed(0)
    model = _scripts.mlp()
    opt = ub.DistributedOptimizer(_scripts.sgd(model), model.named_parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=how == "overflows")
    for k, x in enumerate(batches(rank, 2 if rank else 14)):
        opt.zero_grad()
        loss = model(x).pow(2).mean()
        apart = k in (3, 5, 6, 9)
        scaler.scale(loss * torch.inf if apart and how == "overflows" else loss).backward()
        if apart and how == "runs backward again":
            model(x).pow(2).mean().backward()
        if not (apart and how == "leaves a batch out"):
            scaler.step(opt)
            scaler.update()
    assert ub.join() == 0
    flat = nn.utils.parameters_to_vector(model.parameters())
    assert flat.isfinite().all()
    assert torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min))
    for x in batches(rank, 12):  # what is learned and tried goes on
        opt.zero_grad()
        model(x).pow(2).mean().backward()
        opt.step()
    assert opt.decision is not None
    flat = nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min))
    opt.close()


@pytest.mark.parametrize("how", ["overflows", "leaves a batch out", "runs backward again"])
def test_who_has_data_may_send_without_a_step_while_others_have_joined(how):
    env = {"USBYTE_LEARNING_STEPS": "4", "USBYTE_STALL_LIMIT_S": "10"}
    options = {"overlap": "backward", "policy": "wfbp"}
    run_ranks(2, steps_apart, how, options, timeout=60, env=env)
    env["USBYTE_LEARNING_STEPS"] = "1"  # one joins while plans are tried
    options = {"overlap": "backward", "policy": "tune:bytescheduler", "tune_steps": 2}
    run_ranks(2, steps_apart, how, options, timeout=60, env=env)


def refused(rank, size):
    ub.init()
    assert ub.join() in range(size)  # of no optimizer
    models = [_scripts.mlp(), _scripts.mlp()]
    made = [ub.DistributedOptimizer(_scripts.sgd(m), m.named_parameters()) for m in models]
    with pytest.raises(UsageError, match="a single DistributedOptimizer"):
        ub.join()
    made[0].close()
    ub.join()
    with pytest.raises(UsageError, match="backward_passes_per_step must be 1 at least, not 0"):
        ub.DistributedOptimizer(_scripts.sgd(models[0]), backward_passes_per_step=0)
    with pytest.raises(UsageError, match="gradient_predivide_factor needs op=Average"):
        ub.DistributedOptimizer(_scripts.sgd(models[0]), op=ub.Sum, gradient_predivide_factor=2.0)
    made[1].close()
    mine = ub.DistributedOptimizer(_scripts.sgd(models[0]), process_set=[rank])
    assert mine._session.rank_group.size == 1
    ub.join()  # what is not sent to others does not count
    mine.close()
    opt = _scripts.sgd(models[0])
    ub.DistributedOptimizer(opt, process_set=ub.global_process_set, num_groups=2).close()


def test_what_join_cannot_do_is_refused():
    run_ranks(2, refused, timeout=60)

# SPDX-License-Identifier: Apache-2.0
"""DasoOptimizer against its algorithm in numpy, and how it ends. Real processes."""

from __future__ import annotations

import copy
import gc
import io
import logging
import os
import re
import signal
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _hosts import on_hosts
from _models import Awkward, difference
from _ranks import run_ranks
from usbyte.errors import Error, FaultError, MismatchError, UsageError
from usbyte.torch.daso.schedule import DasoSchedule
from usbyte.torch.world.world import current

NUMEL, LR, MOMENTUM = 5, 0.1, 0.5


def target(rank, step):
    """What a rank's loss pulls the parameters to in a step."""
    return np.random.default_rng(1000 * rank + step).normal(size=NUMEL)


class Point(nn.Module):
    """Whose gradient is its parameters less a target."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(NUMEL, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, y):
        return (self.x - y).square().sum() / 2


def wrapped(model, named=True, **options):
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    options = {"warmup_epochs": 0, "cooldown_epochs": 0, "total_epochs": 99} | options
    return ub.DasoOptimizer(inner, model.named_parameters() if named else None, **options)


def train(opt, model, rank, steps):
    """The parameters after each of the steps, as they are on this rank."""
    rows = []
    for step in steps:
        opt.zero_grad()
        model(torch.from_numpy(target(rank, step))).backward()
        opt.step()
        rows.append(model.x.tolist())
    return rows


def start(rank, slots):
    on_hosts(rank, slots)
    ub.init()


def reference(nodes, slots, steps, every, wait):
    """The parameters of each node after each step, by the formula."""
    x, momentum = np.zeros((nodes, NUMEL)), np.zeros((nodes, NUMEL))
    rows, sent, used_at, since = [], None, -1, 0
    for step in range(steps):
        for node in range(nodes):
            ranks = range(node * slots, (node + 1) * slots)
            grad = np.mean([x[node] - target(r, step) for r in ranks], axis=0)
            momentum[node] = MOMENTUM * momentum[node] + grad
        x = x - LR * momentum
        since += 1
        if sent is not None and step == used_at:
            x = (2 * wait * x + sent) / (2 * wait + nodes)
            sent = None
        if sent is None and since >= every:
            sent, used_at, since = x.sum(axis=0), step + wait, 0
            if wait == 0:
                x, sent = np.repeat(sent[None] / nodes, nodes, axis=0), None
        rows.append(x)
    return rows


def parameters_after(rank, closes):
    model = Point()
    opt = wrapped(model, exchange_every=3, exchange_wait=1)

    def loss():
        opt.zero_grad()
        found = model(torch.from_numpy(target(rank, len(losses))))
        found.backward()
        losses.append(found.item())
        return found

    losses: list[float] = []
    for _ in range(9):
        if closes:
            opt.step(loss)
        else:
            loss()
            opt.step()
    opt.synchronize_nodes()
    opt.close()
    return model.x.tolist()


def counts_closures_once(rank, size):
    start(rank, 1)
    rows = [parameters_after(rank, closes) for closes in (False, True)]
    ub.shutdown()
    return rows


def test_a_step_with_a_closure_counts_once():
    for plain, closed in run_ranks(2, counts_closures_once):
        assert plain == closed


CASES = [(4, 1), (3, 2), (1, 1)]


def follows(rank, size, slots, as_topology):
    if as_topology:
        on_hosts(rank, size)
        ub.init()
    else:
        start(rank, slots)
    results, turns = [], []
    for every, wait in CASES:
        model = Point()
        topology = [slots, size // slots] if as_topology else None
        opt = wrapped(model, exchange_every=every, exchange_wait=wait, topology=topology)
        begin = opt._averaging.averager.start

        def noted(vectors, number, begin=begin):
            exchange = begin(vectors, number)
            turns.append(exchange.turn)
            return exchange

        opt._averaging.averager.start = noted
        results.append(train(opt, model, rank, range(12)))
        opt.synchronize_nodes()
        results[-1].append(model.x.tolist())
        opt.close()
    ub.shutdown()
    return results, turns


@pytest.mark.parametrize(("nodes", "slots"), [(2, 2), (4, 1)])
def test_parameters_follow_the_formula(nodes, slots):
    ranks = run_ranks(nodes * slots, follows, slots, nodes == 4)
    for k, (every, wait) in enumerate(CASES):
        expected = reference(nodes, slots, 12, every, wait)
        for rank, (results, _) in enumerate(ranks):
            got = results[k]
            for row, x in zip(got[:-1], expected, strict=True):
                np.testing.assert_allclose(row, x[rank // slots], rtol=1e-12)
            # Bit for bit, inside a node in each step and everywhere at the end.
            assert got == ranks[rank - rank % slots][0][k]
            assert got[-1] == ranks[0][0][k][-1]
        assert len({str(ranks[node * slots][0][k][-2]) for node in range(nodes)}) == nodes
    turns = ranks[0][1]
    assert turns[:4] == [k % slots for k in range(4)]  # three exchanges, and the last average


def goes_on_without_the_wrapper(rank, size):
    """As with schedulers, which may be all that refers to it."""
    start(rank, size)
    model = Point()
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    ub.DasoOptimizer(inner, model.named_parameters(), total_epochs=9)
    gc.collect()
    sending = [each.sends for each in current().participants]
    model(torch.from_numpy(target(rank, 0))).backward()
    inner.step()
    ub.shutdown()
    return sending, model.x.tolist()


def test_an_optimizer_that_nobody_refers_to_stays_in_the_world():
    first, second = run_ranks(2, goes_on_without_the_wrapper)
    assert first == second
    assert first[0] == [True]


def one_node(rank, size):
    start(rank, size)
    model = Point()
    opt = wrapped(model)
    rows = train(opt, model, rank, range(6))
    mean = opt.end_epoch(float(rank))
    opt.synchronize_nodes()
    opt.load_state_dict(opt.state_dict())
    ub.shutdown()
    return rows, mean


def test_one_node_averages_gradients_and_no_more():
    expected = [x[0] for x in reference(1, 4, 6, 99, 1)]
    for rows, mean in run_ranks(4, one_node):
        np.testing.assert_allclose(rows, expected, rtol=1e-12)
        assert mean == 1.5


def phases(rank, size):
    start(rank, 2)
    results = []
    for daso in (False, True):
        torch.manual_seed(0)
        model = Awkward()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        if daso:
            opt = ub.DasoOptimizer(
                inner, model.named_parameters(), total_epochs=3, warmup_epochs=1, cooldown_epochs=1,
                exchange_every=2, exchange_wait=2,
            )  # fmt: skip
        else:
            opt = ub.DistributedOptimizer(inner, model.named_parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        assert isinstance(opt, torch.optim.Optimizer)
        data = torch.Generator().manual_seed(rank)

        def epoch(steps=7, model=model, opt=opt, scheduler=scheduler, data=data):
            for _ in range(steps):
                opt.zero_grad()
                tokens = torch.randint(0, 40, (4, 6), generator=data)
                nn.functional.cross_entropy(
                    model(tokens).flatten(0, 1), tokens.flatten()
                ).backward()
                opt.step()
                scheduler.step()

        epoch()
        results.append({k: v.clone() for k, v in model.state_dict().items()})
    assert opt.phase == "warm-up"
    opt.end_epoch(3.0)
    assert opt.phase == "cycling"
    epoch()
    assert opt._averaging.in_flight is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.end_epoch(torch.tensor(2.0, requires_grad=True))
    assert opt.phase == "cool-down"
    assert opt._averaging.in_flight is None  # used at once
    epoch(1)
    flat = nn.utils.parameters_to_vector(model.parameters()).double()
    assert torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min))
    ub.shutdown()
    return difference(results[1], results[0])


def test_the_warm_up_is_synchronous_and_the_cool_down_ends_alike():
    assert max(run_ranks(4, phases)) < 1e-5


def schedule(**options):
    defaults = {
        "every": 8, "wait": 2, "total_epochs": 20, "warmup_epochs": 2, "cooldown_epochs": 2,
        "stability": 0.05, "patience": 2,
    }  # fmt: skip
    return DasoSchedule(**(defaults | options))


def test_a_stable_loss_halves_the_waits_and_starts_them_anew():
    plan = schedule()
    found = []
    for loss in [4.0, 2.0, 1.0, *[0.99] * 10, 0.5, 0.49, 0.48]:
        plan.end_epoch(loss)
        found.append((plan.every, plan.wait))
    # Two epochs of warm-up and one that improves; then two stable ones for each change.
    assert found[:3] == [(8, 2)] * 3
    assert found[3:13:2] == [(8, 2), (4, 1), (2, 1), (1, 1), (8, 2)]
    assert found[4:13:2] == [(4, 1), (2, 1), (1, 1), (8, 2), (4, 1)]
    assert found[13:] == [(4, 1), (4, 1), (2, 1)]
    assert plan.epoch == 16
    assert plan.phase == "cycling"
    again = schedule()
    again.load(plan.state())
    assert again.state() == plan.state()
    for _ in range(2):
        again.end_epoch(0.1)
    assert again.phase == "cool-down"
    again.reset()
    assert again.state() == schedule().state()


def test_exchanges_begin_every_few_batches():
    plan = schedule(every=3, wait=1, warmup_epochs=0)
    begun = [plan.end_batch(busy=False) for _ in range(7)]
    assert [k for k, start in enumerate(begun) if start] == [2, 5]
    assert begun[5] == (1, 1)
    assert plan.end_batch(busy=False) is None
    assert plan.end_batch(busy=True) is None  # the one before is still in flight
    assert plan.end_batch(busy=False) == (2, 1)
    assert schedule().end_batch(busy=False) == (0, 0)  # the warm-up waits


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wait": 0}, "from 1 to exchange_every, not 0 of 8"),
        ({"wait": 9}, "one exchange ends before the next begins"),
        ({"warmup_epochs": 19}, "19 warmup_epochs and 2 cooldown_epochs do not fit into 20"),
        ({"total_epochs": 0}, "total_epochs must be positive"),
        ({"patience": 0}, "patience positive"),
    ],
)
def test_numbers_that_make_no_schedule(options, said):
    with pytest.raises(UsageError, match=said):
        schedule(**options)


def test_numbers_may_be_of_any_type(single):
    numbers = {"total_epochs": np.int64(9), "exchange_every": np.int32(4), "patience": np.int8(1)}
    wrapped(Point(), **numbers, stability=np.float32(0.5), topology=np.array([1, 1])).close()
    with pytest.raises(UsageError, match=r"exchange_every must be a whole number, not 8\.0"):
        wrapped(Point(), exchange_every=8.0)
    with pytest.raises(UsageError, match="topology must be sizes such as"):
        wrapped(Point(), topology="1x1")


def resumes(rank, size):
    start(rank, 2)
    model = Point()
    opt = wrapped(model, exchange_every=4, exchange_wait=3)
    train(opt, model, rank, range(5))
    assert opt._averaging.in_flight.left == 2
    buffer = io.BytesIO()
    torch.save([model.state_dict(), opt.state_dict()], buffer)
    rows = train(opt, model, rank, range(5, 14))
    other = Point()
    anew = wrapped(other, exchange_every=8, exchange_wait=1)
    train(anew, other, rank, range(20, 28))
    assert anew._averaging.in_flight is not None  # which loading forgets
    buffer.seek(0)
    model_state, state = torch.load(buffer, weights_only=True)
    other.load_state_dict(model_state)
    anew.load_state_dict(copy.deepcopy(state))
    assert anew.exchange_every == 4
    assert train(anew, other, rank, range(5, 14)) == rows
    # From one rank to all, as after a checkpoint of rank 0.
    opt.load_state_dict(state)
    ub.broadcast_parameters(model.state_dict())
    ub.broadcast_optimizer_state(opt)
    sums = opt.state_dict()["usbyte.daso"]["in_flight"]["sums"]
    assert torch.equal(sums[0], state["usbyte.daso"]["in_flight"]["sums"][0])
    state["usbyte.daso"]["in_flight"]["nodes"] = 3
    with pytest.raises(UsageError, match="between 3 nodes, and there are 2 here"):
        opt.load_state_dict(state)
    opt.load_state_dict(torch.optim.SGD(Point().parameters(), lr=LR).state_dict())
    assert opt._schedule.state() == schedule(every=4, wait=3).state()
    ub.shutdown()


def test_a_state_dict_holds_what_is_in_flight():
    run_ranks(4, resumes)


def refuses(rank, size):
    start(rank, 1)
    model = Point()
    with pytest.raises(MismatchError, match="exchange_every is 8 on rank 0 but 4 on rank 1"):
        wrapped(model, exchange_every=4 if rank else 8, exchange_wait=1)
    with pytest.raises(MismatchError, match=r"topology is None on rank 0 but \[1, 2\] on rank 1"):
        wrapped(model, topology=[1, 2] if rank else None)
    with pytest.raises(UsageError, match="exchange_wait must be from 1 to exchange_every"):
        wrapped(model, exchange_wait=9 if rank else 1)
    other = Point()
    other.x = nn.Parameter(torch.zeros(7 if rank else NUMEL, dtype=torch.float64))
    with pytest.raises(MismatchError, match=r"'x' has shape \[5\] on rank 0 but \[7\] on rank 1"):
        wrapped(other)
    with pytest.raises(UsageError, match="sizes 2x2 is not one of this job's 2 ranks"):
        wrapped(model, topology=[2, 2])
    with pytest.raises(UsageError, match="tries plans"):
        wrapped(model, policy="tune:dear")
    opt = wrapped(model)
    with pytest.raises(UsageError, match="already wrapped"):
        wrapped(model)
    with pytest.raises(Error, match="the loss of rank 1 is nan in epoch 1"):
        opt.end_epoch(float("nan") if rank else 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.zeros(NUMEL))).backward()
    with pytest.raises(UsageError, match="use bfloat16"):
        scaler.step(opt)
    ub.shutdown()
    for call in (opt.step, opt.zero_grad, opt.synchronize_nodes, lambda: opt.end_epoch(1.0)):
        with pytest.raises(UsageError, match="closed"):
            call()


def trains_more(rank, size):
    """Parameters that nodes of one rank would train, each for itself, without exchanging them."""
    start(rank, 1)
    model = Point()
    opt = wrapped(model, exchange_every=1, exchange_wait=1)
    train(opt, model, rank, range(2))
    before = model.x.tolist()
    with pytest.raises(UsageError, match=r"join\(\) needs a single DistributedOptimizer, of all"):
        ub.join()
    model.frozen.requires_grad_()
    with pytest.raises(UsageError, match=r"shape \(3,\) was frozen when the optimizer was wrapped"):
        train(opt, model, rank, [2])
    model.frozen.requires_grad_(False)
    opt.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
    with pytest.raises(UsageError, match=r"shape \(2,\) that was added without add_param_group"):
        train(opt, model, rank, [2])
    assert model.x.tolist() == before
    del opt.param_groups[0]["params"][-1]
    train(opt, model, rank, [2])
    opt.synchronize_nodes()
    after = model.x.tolist()
    opt.close()
    ub.join()  # of no optimizer that sends
    return after


def test_nodes_of_one_rank_train_nothing_that_they_do_not_exchange():
    after, other = run_ranks(2, trains_more, timeout=60)
    assert after == other


def test_what_cannot_be_is_an_error_on_every_rank():
    run_ranks(2, refuses)


def unequal(rank, size):
    on_hosts(rank, 2)
    if rank == 2:
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    ub.init()
    with pytest.raises(UsageError, match=r"'host0'.*'host1'.*as many on each"):
        wrapped(Point())
    ub.shutdown()


def test_hosts_must_have_equal_numbers_of_ranks():
    run_ranks(3, unequal)


def ends_in_flight(rank, size, how):
    start(rank, 2)
    model = Point()
    opt = wrapped(model, exchange_every=4, exchange_wait=3)
    train(opt, model, rank, range(4))
    if how == "shutdown":
        ub.shutdown()
    else:
        opt.close()
        opt = wrapped(model, named=False, exchange_every=4, exchange_wait=3)  # another may follow
        train(opt, model, rank, range(4))
        more = nn.Parameter(torch.full((2,), float(rank // 2)))
        opt.add_param_group({"params": [more]})
        assert opt._averaging.in_flight is None
        opt.synchronize_nodes()
        assert more.tolist() == [0.5, 0.5]
    return model.x.tolist()


def test_what_is_in_flight_is_used_at_the_end():
    x = reference(2, 2, 4, 99, 1)[-1]
    x = (2 * 3 * x + x.sum(axis=0)) / (2 * 3 + 2)
    for rank, got in enumerate(run_ranks(4, ends_in_flight, "shutdown")):
        np.testing.assert_allclose(got, x[rank // 2], rtol=1e-12)
    run_ranks(4, ends_in_flight, "close")


def faults(rank, size, slots, how):
    start(rank, slots)
    model = Point()
    opt = wrapped(model, exchange_every=2, exchange_wait=1)
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("usbyte").addHandler(handler)
    began = time.monotonic()
    try:
        for step in range(1000):
            if rank == 1 and step == 9:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "sleep":
                    time.sleep(100)
            train(opt, model, rank, [step])
    except FaultError as error:
        seconds = time.monotonic() - began
        try:
            model.x.sum()
            return [str(error), seconds, "", lines]
        except FaultError as dirty:
            return [str(error), seconds, str(dirty), lines]
    return None


@pytest.mark.parametrize(
    ("slots", "how", "said"),
    [
        (2, "kill", "rank 1 .* is gone or frozen"),
        (1, "kill", "rank 1 .* is gone or frozen"),
        (
            1,
            "sleep",
            "rank 1 has not begun node averaging 4.*: node averaging 4 has been waited",
        ),
    ],
)
def test_a_lost_rank_is_a_fault_on_every_rank(slots, how, said):
    # Short only where the limit is what ends the job: ranks of a busy machine are slow too.
    limit_s = 8 if how == "sleep" else 20
    env = {"USBYTE_STALL_LIMIT_S": str(limit_s), "USBYTE_STALL_WARNING_S": "3"}
    size = 4 if slots == 2 else 3
    results = run_ranks(size, faults, slots, how, env=env, dies=[1], timeout=60)
    texts = [r[0] for r in results if r is not None]
    assert len(texts) == len(results) - 1
    warned = [line for r in results if r is not None for line in r[3]]
    if how == "sleep":  # by the one that asks first
        late = "lost: rank 1 (has not begun node averaging 4|.* does not answer)"
        assert any(re.search(late, line) for line in warned), warned
    for text, seconds, left, _ in (r for r in results if r is not None):
        assert re.search(said, text), text
        assert seconds < limit_s + 20
        if slots == 1:  # the step's own update is done, but other nodes' parameters are missing
            assert "was applied to some of the parameters" in left

# SPDX-License-Identifier: Apache-2.0
"""Gradients on a device: everything but torch's own kernels, over an emulated one."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _coded import CODECS
from _emulated import EmulatedDevice, emulate
from _models import OPTIMIZERS, difference, train
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import Error, FaultError, UsageError
from usbyte.torch import testing
from usbyte.torch.profiler.recorder import Recorder
from usbyte.torch.runtime.device import Device, device_of, passed


def equals_ddp(rank, size, optimizers, tolerance, double):
    ub.init()
    expected = {
        optimizer: train("ddp", optimizer, rank, size, 10, double=double)
        for optimizer in optimizers
    }
    device = emulate()
    for optimizer in optimizers:
        for mode, policy in [("backward", "ddp"), ("forward", None), ("forward", "bytescheduler")]:
            got = train(
                mode, optimizer, rank, size, 10, policy=policy, partition_bytes=2048, double=double
            )
            worst = difference(got, expected[optimizer])
            assert worst <= tolerance, (optimizer, mode, policy, worst)
    return device.cuda.live


def test_two_ranks_equal_ddp_bit_for_bit():
    live = run_ranks(2, equals_ddp, ["nesterov", "adamw"], 0.0, False, timeout=120)
    assert max(live) < 100  # the clock's; those of closed engines are gone


def test_four_ranks_equal_ddp_closely():
    run_ranks(4, equals_ddp, ["sgd"], 1e-6, True, timeout=120)


def equals_ddp_variants(rank, size):
    ub.init()
    variants = [
        {"set_to_none": False},
        {"accumulate": 2},
        {"mixed": True},
        {"accumulate": 2, "set_to_none": False},
    ]
    expected = [train("ddp", "adamw", rank, size, 10, **variant) for variant in variants]
    emulate()
    for variant, want in zip(variants, expected, strict=True):
        for mode in ("backward", "forward"):
            worst = difference(train(mode, "adamw", rank, size, 10, **variant), want)
            assert worst == 0, (variant, mode, worst)


def test_zero_grad_accumulation_and_mixed_dtypes_equal_ddp():
    run_ranks(2, equals_ddp_variants, timeout=120)


def replaces(rank, size):
    """A gradient that a hook replaces or resets before the engine has packed it."""
    ub.init()
    emulate()
    for what, change in [("replaced", lambda p: p.grad * 2), ("reset", lambda p: None)]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        opt = ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        model[1].weight.register_post_accumulate_grad_hook(
            lambda p, change=change: setattr(p, "grad", change(p))
        )
        with pytest.raises(UsageError, match=rf"'1\.weight' was {what} inside backward"):
            model(torch.ones(1, 4)).sum().backward()
        with contextlib.suppress(Error):  # of the step that did not end
            opt.close()


def test_gradients_that_hooks_replace_are_an_error():
    run_ranks(2, replaces, timeout=60)


def shards(rank, size):
    ub.init()
    expected = train("forward", "adamw", rank, size, 12, shard_optimizer=True)
    emulate()
    got = train("forward", "adamw", rank, size, 12, shard_optimizer=True)
    assert difference(got, expected) == 0


def test_sharded_updates_are_the_hosts():
    run_ranks(2, shards, timeout=120)


def compresses(rank, size):
    ub.init()
    # Plans that depend on no measured time, so that all cut alike.
    options = {"steps": 6, "mixed": True, "policy": "ddp"}

    def trained(codec):
        kind = "adam" if codec.startswith(("dgc", "signum")) else "sgd"
        return train("forward", kind, rank, size, compression=codec, **options)

    expected = {codec.spec: trained(codec.spec) for codec in CODECS}
    ub.shutdown()
    ub.init()  # optimizers have the same names again, from which random numbers come
    emulate()
    for spec, want in expected.items():
        assert difference(trained(spec), want) == 0, spec


def test_compressed_gradients_are_the_hosts():
    run_ranks(2, compresses, timeout=120, env={"USBYTE_LEARNING_STEPS": "1000"})


def layers(rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    optimizer = ub.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), overlap="forward",
        policy="dear",
    )  # fmt: skip
    data = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def timelines(rank, size, folder):
    ub.init()
    emulate()
    _, optimizer, step = layers(rank)
    for _ in range(6):
        step()
    ub.start_timeline(f"{folder}/%r.json")
    for _ in range(3):
        step()
    ub.stop_timeline()
    with open(f"{folder}/{rank}.json") as file:
        events = [event for event in json.load(file) if event["ph"] == "X"]
    ops = [e for e in events if e["cat"] == "communication"]
    assert len(ops) >= 2 * len(optimizer.plan.ops)
    assert all(e["dur"] > 0 for e in ops)
    updates = [e for e in events if e["cat"] == "update"]
    assert {"0.weight", "5.weight"} <= {name for e in updates for name in e["name"].split(", ")}
    passes = [e for e in events if e["cat"] == "compute"]
    assert [e["name"] for e in passes] == 2 * ["forward", "backward"]  # the last is in flight
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(passes))
    # An update comes behind the ops that bring its gradients.
    by_step = {e["args"]["step"] for e in updates}
    for k in by_step:
        ends = [e["ts"] + e["dur"] for e in ops if e["args"]["step"] == k]
        begins = [e["ts"] for e in updates if e["args"]["step"] == k]
        assert min(begins) > min(ends)


def test_timeline_holds_the_devices_times(tmp_path):
    run_ranks(2, timelines, str(tmp_path), timeout=60)


def decided(rank, size):
    ub.init()
    emulate()
    _, optimizer, step = layers(rank)
    for _ in range(8):
        step()
    decision = optimizer.decision
    optimizer.close()
    profile, network = decision.profile, decision.network
    # Ready in the order of backward, needed in that of forward, each time told by the device.
    weights = [i for i, t in enumerate(profile.tensors) if t.name.endswith("weight")]
    assert [profile.tensors[i].name for i in weights] == [f"{k}.weight" for k in range(6)]
    ready = [profile.ready_s[i] for i in weights]
    assert ready == sorted(ready, reverse=True)
    assert network.all_reduce[0].alpha_s > 0
    assert network.ranks == size


def test_learns_from_the_devices_times():
    run_ranks(2, decided, timeout=60)


def test_one_ranks_vote_for_a_new_plan_reaches_all_in_the_same_step():
    assert run_ranks(2, votes, timeout=60) == [10, 10]


def votes(rank, size):
    ub.init()
    emulate()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = ub.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), tune_steps=0
    )

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    for _ in range(7):
        step()
    assert optimizer.plan.policy != "learning"
    if rank == 1:
        testing.simulate_step_time_change(optimizer)
    steps = 0
    while optimizer.plan.policy != "learning":
        step()
        steps += 1
        assert steps < 20
    return steps


def captures(rank, size):
    """A forward pass is captured while the job is learned; later on, a backward pass."""
    ub.init()
    device = emulate()
    model, optimizer, step = layers(rank)
    seen = model[0]
    device.cuda.set_capturing(0, True)
    seen(torch.zeros(1, 64))
    device.cuda.set_capturing(0, False)
    while optimizer.decision is None:
        step()
    names = [n for n, _ in model.named_parameters()]
    unhooked = optimizer._session.controller.overlap.unhooked_params
    assert [names[i] for i in unhooked] == ["0.weight", "0.bias"]
    optimizer.synchronize()
    loss = model(torch.zeros(1, 64)).sum()
    device.cuda.set_capturing(0, True)
    with optimizer.no_sync(), pytest.raises(UsageError, match="captured into a CUDA graph"):
        loss.backward()
    device.cuda.set_capturing(0, False)


def test_what_is_captured_is_known_to_be_replayed_unseen():
    run_ranks(2, captures, timeout=60)


def records_a_capture(rank, size):
    device = emulate()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(list(model.parameters()), 0, 2)
    optimizer.register_step_pre_hook(recorder.before_step)
    device.cuda.set_capturing(0, True)
    with pytest.raises(UsageError, match=r"captures backward\(\)"):
        model(torch.ones(1, 2)).sum().backward()
    device.cuda.set_capturing(0, False)
    model(torch.ones(1, 2)).sum().backward()
    device.cuda.set_capturing(0, True)
    with pytest.raises(UsageError, match=r"captures step\(\)"):
        optimizer.step()
    device.cuda.set_capturing(0, False)
    recorder.close()


def test_a_job_that_is_captured_cannot_be_recorded():
    run_ranks(1, records_a_capture)


def dies(rank, size):
    ub.init()
    emulate()
    _, _, step = layers(rank)
    for k in range(20):
        if k == 8 and rank == 1:
            raise RuntimeError("out of luck")
        step()


def test_a_rank_that_dies_ends_the_others():
    with pytest.raises(AssertionError) as error:
        run_ranks(2, dies, timeout=60)
    text = str(error.value)
    assert "out of luck" in text
    assert "FaultError" in text.split("--- rank 1")[0]


def test_a_model_is_on_one_device_that_usbyte_knows():
    host = torch.zeros(1)
    assert device_of(["a", "b"], [host, host]).core is None
    with pytest.raises(UsageError, match=r"'a' is on cpu and 'b' on meta|'b' is on meta"):
        device_of(["a", "b"], [host, torch.zeros(1, device="meta")])


def test_marks_of_the_host_are_numbers():
    before = _core.now_s()
    mark = Device().now()
    assert passed(mark)
    assert before <= float(mark) <= _core.now_s()


def test_marks_of_a_device_wait_only_when_they_are_read():
    device = EmulatedDevice()
    stream = device.cuda.create_stream()
    device.stream = lambda: stream
    start = _core.now_s()
    device.cuda.delay(stream, 3)
    mark = device.now()
    device.cuda.delay(stream, 0.1)
    later = device.now()
    assert not passed(mark)
    assert later - mark >= 0.09
    assert passed(later)
    assert float(mark) >= start + 2.99
    assert later - start == float(later) - start
    device.cuda.destroy_stream(stream)


def test_a_device_that_fails_says_so():
    device = EmulatedDevice()
    device.cuda.poison("illegal address")
    with pytest.raises(FaultError, match="illegal address"):
        device.now()

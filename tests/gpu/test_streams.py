# SPDX-License-Identifier: Apache-2.0
"""Work that comes late on the device is waited for there: nothing overtakes it.

Each run has delays in other places: before gradients, before the collectives (the other rank comes
late, so that copies and collectives that are already enqueued wait), on a second stream, between
backward and step. Meanwhile memory is freed, taken anew and overwritten. All runs must end with the
numbers of the one without delays, bit for bit.
"""

from __future__ import annotations

import pytest
import torch

import usbyte.torch as ub
from _training import SHARDED, Deep, prepare, sleep, wrap, wrong
from _transport import everywhere, for_ranks

STEPS = 10
LATE_S = 0.02
DELAYS = ("gradients", "peer", "side stream", "update", "forward", "memory")


def run(transport, rank, mode, delay):
    """The state after training with delays of one kind ("": none)."""
    device = transport.device
    torch.manual_seed(5)
    model = Deep().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    small = {"policy": "bytescheduler", "partition_bytes": 8192}
    options = {} if mode in ("ddp", SHARDED) else small
    net, opt = wrap(mode, model, optimizer, transport, **options)
    model.late_s = LATE_S / 4 if delay in ("gradients", "memory") else 0.0
    if delay == "side stream" and device == "cuda":
        model.side = torch.cuda.Stream()
    for step, x in enumerate(batches(device, rank)):
        opt.zero_grad()
        if delay == "forward":
            sleep(device, LATE_S)
        if model.side is not None:
            with torch.cuda.stream(model.side):
                sleep(device, LATE_S)
        loss = net(x).square().sum()
        if delay == "peer" and step % 2 == rank:
            sleep(device, 2 * LATE_S)
        loss.backward()
        if delay == "memory":
            churn(device)
        if delay == "update":
            sleep(device, LATE_S)
        opt.step()
        if delay == "memory":
            opt.zero_grad()
            churn(device)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    if mode != "ddp":
        opt.close()
    return state


def batches(device, rank):
    """All of them at once: a copy in between would let the host wait for the device."""
    data = torch.Generator().manual_seed(rank)
    return torch.randn(STEPS, 32, 96, generator=data).to(device)


def churn(device):
    """Takes whatever memory of the gradients' sizes is free, on two streams, and spoils it."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()] if device == "cuda" else [None]
    for stream in streams:
        with torch.cuda.stream(stream) if stream else torch.no_grad():
            taken = [
                torch.full(shape, float("nan"), device=device)
                for shape in [(96, 96), (96,), (32, 96), (6 * 96 * 97,)]
                for _ in range(8)
            ]
        del taken


def delayed(transport, rank, size, modes):
    ub.init()
    prepare()
    expected = run(transport, rank, "ddp", "")
    for mode in modes:
        for delay in ("", *DELAYS):
            bad = wrong(run(transport, rank, mode, delay), expected)
            assert not bad, (mode, delay, bad)


@pytest.mark.parametrize("mode", ["backward", "forward", SHARDED])
def test_delays_change_nothing(mode, transports, record_property):
    usable = for_ranks(transports, 2)
    record_property("over", ", ".join(t.name for t in usable))
    everywhere(usable, 2, delayed, [mode], timeout=100)
    record_property("late by", f"{LATE_S * 1e3:.0f} ms at {len(DELAYS)} places")


def by_other_streams(transport, rank, size):
    """The whole loop on a stream of the user's, which changes in the middle."""
    ub.init()
    prepare()
    results = []
    for streams in ([None], [torch.cuda.Stream(), torch.cuda.Stream()]):
        torch.manual_seed(7)
        model = Deep().cuda()
        opt = ub.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-2), model.named_parameters(),
            overlap="forward",
        )  # fmt: skip
        for step, x in enumerate(batches("cuda", rank)):
            stream = streams[step % len(streams)] or torch.cuda.current_stream()
            stream.wait_stream(streams[step % len(streams) - 1] or stream)
            with torch.cuda.stream(stream):
                sleep("cuda", 0.005)
                opt.zero_grad()
                model(x).square().sum().backward()
                opt.step()
        torch.cuda.synchronize()
        results.append({k: v.detach().clone() for k, v in model.state_dict().items()})
        opt.close()
    bad = wrong(results[1], results[0])
    assert not bad, bad


@pytest.mark.cuda
def test_steps_on_streams_of_the_user(transports):
    everywhere(for_ranks(transports, 2), 2, by_other_streams, timeout=90)


def two_towers(transport, rank, size):
    """The update of both comes on the stream of the first one to be used, and late."""
    ub.init()
    prepare()
    results = []
    for overlap in ("backward", "forward"):
        torch.manual_seed(9)
        model = torch.nn.ModuleList([torch.nn.Linear(96, 96), torch.nn.Linear(96, 96)]).cuda()
        opt = ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
            overlap=overlap, policy="ddp",
        )  # fmt: skip
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        for x in batches("cuda", rank):
            opt.zero_grad()
            side.wait_stream(main)
            sleep("cuda", LATE_S)
            y = model[0](x)
            with torch.cuda.stream(side):
                z = model[1](x)
            main.wait_stream(side)
            (y + z).square().mean().backward()
            opt.step()
        opt.synchronize()
        torch.cuda.synchronize()
        results.append({k: v.detach().clone() for k, v in model.state_dict().items()})
        opt.close()
    bad = wrong(results[1], results[0])
    assert not bad, bad


@pytest.mark.cuda
def test_towers_on_two_streams(transports):
    everywhere(for_ranks(transports, 2), 2, two_towers, timeout=90)

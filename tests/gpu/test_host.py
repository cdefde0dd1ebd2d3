# SPDX-License-Identifier: Apache-2.0
"""The host enqueues a step and goes on; it never waits for the GPU inside forward or backward."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
import torch.distributed as dist

import usbyte.torch as ub
from _training import Deep, prepare, sleep
from _transport import for_ranks
from usbyte.errors import Error, UsageError

pytestmark = pytest.mark.cuda

ASLEEP_S = 1.0
# The host is done before this share of the GPU's sleep is over. Enqueueing two steps takes
# milliseconds; one wait for the stream takes all of it.
SHARE = 0.4


def settled(overlap):
    """A model whose plan is made, its optimizer and a batch."""
    prepare()
    torch.use_deterministic_algorithms(False)  # else what is empty is filled, by more kernels
    torch.manual_seed(5)
    model = Deep().cuda()
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=True), model.named_parameters(),
        overlap=overlap, policy="bytescheduler", partition_bytes=8192,
    )  # fmt: skip
    x = torch.randn(32, 96, device="cuda")
    while not opt.settled:
        train(model, opt, x)
    for _ in range(4):  # what is allocated once
        train(model, opt, x)
    sleep("cuda", 1e-3)  # which measures the clock
    torch.cuda.synchronize()
    dist.barrier()
    return model, opt, x


def train(model, opt, x):
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()


def asleep(transport, rank, size, overlap):
    """Seconds that the GPU slept, and when the host was done with each part meanwhile."""
    ub.init()
    model, opt, x = settled(overlap)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = {}
    begin.record()
    sleep("cuda", ASLEEP_S)
    end.record()
    start = time.perf_counter()
    opt.zero_grad()
    loss = model(x).square().mean()
    times["forward"] = time.perf_counter() - start
    loss.backward()
    times["backward"] = time.perf_counter() - start
    opt.step()
    times["step"] = time.perf_counter() - start
    if transport.backend == "nccl":
        train(model, opt, x)
        times["next step"] = time.perf_counter() - start
    torch.cuda.synchronize()
    opt.synchronize()
    return begin.elapsed_time(end) * 1e-3, times


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_host_does_not_wait_for_a_sleeping_gpu(overlap, transports, record_property):
    # Over Gloo the host has its part in the collectives: what needs their results waits for them.
    usable = [t for t in for_ranks(transports, 2) if t.backend == "nccl" or overlap == "forward"]
    if not usable:
        pytest.skip("over Gloo, gradients that are final after backward take the host")
    for transport in usable:
        for slept, times in transport.run(2, asleep, overlap, timeout=60):
            shown = ", ".join(f"{part} {took * 1e3:.1f} ms" for part, took in times.items())
            record_property(transport.name, f"asleep {slept:.2f} s; host done with {shown}")
            assert slept > ASLEEP_S / 2
            late = {part: took for part, took in times.items() if took > SHARE * slept}
            assert not late, (transport.name, slept, times)


def unsynchronised(transport, rank, size):
    ub.init()
    for overlap in ("backward", "forward"):
        model, opt, x = settled(overlap)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                train(model, opt, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        opt.close()


def test_torch_sees_no_synchronisation(transports):
    for transport in for_ranks(transports, 2):
        transport.run(2, unsynchronised, timeout=60)


def captures(transport, rank, size, overlap):
    """What a captured training step ends with: "works", or the error's text."""
    ub.init()
    model, opt, x = settled(overlap)
    error = None
    graph = torch.cuda.CUDAGraph()
    # Ending a capture that was broken off is an error of its own.
    with contextlib.suppress(RuntimeError), torch.cuda.graph(graph):
        try:
            train(model, opt, x)
        except Exception as raised:
            error = raised
    if error is not None:
        assert isinstance(error, Error), f"{type(error).__name__}: {error}"
        return str(error)
    before = [p.detach().clone() for p in model.parameters()]
    graph.replay()
    torch.cuda.synchronize()
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    return "works"


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_a_captured_step_works_or_is_refused(overlap, transports, record_property):
    for transport in for_ranks(transports, 2):
        for told in transport.run(2, captures, overlap, timeout=60):
            record_property(transport.name, told)
            assert told == "works" or "graph" in told.lower() or "captur" in told.lower(), told


def captures_backward(transport, rank, size):
    """What the captured backward pass of a micro-batch ends with."""
    ub.init()
    model, opt, x = settled("backward")
    told = ""
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        try:
            with opt.no_sync():
                model(x).square().mean().backward()
        except UsageError as raised:
            told = str(raised)
    return told


def test_a_captured_micro_batch_is_refused(transports):
    for transport in for_ranks(transports, 2):
        for told in transport.run(2, captures_backward, timeout=60):
            assert "replay" in told, told


def captures_evaluation(transport, rank, size):
    """Updates that came before are no part of what is captured."""
    ub.init()
    model, opt, x = settled("forward")
    train(model, opt, x)
    opt.drain()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        expected = model(x).clone()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = model(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


def test_evaluation_can_be_captured(transports):
    for transport in for_ranks(transports, 2):
        transport.run(2, captures_evaluation, timeout=60)

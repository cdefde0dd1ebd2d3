# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients: the numbers of one process, whatever is late, and a host that does not wait."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _training import Late, prepare, sleep, wrong
from _transport import everywhere, for_ranks

ROWS, WIDTH, STEPS = 500, 24, 10
LATE_S = 0.02
ASLEEP_S = 1.0
SHARE = 0.4  # of the GPU's sleep, before which the host is done


class Words(nn.Module):
    """Two sparse layers, one of which few batches use, and one that is not.

    Attributes:
        late_s: Seconds by which gradients come late.
    """

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(3)
        make = {"sparse": True, "dtype": torch.float64}
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", **make)
        self.seldom = nn.Embedding(7, WIDTH, **make)
        self.out = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.late_s = 0.0
        self.to(device)

    def forward(self, words, seldom=False):
        hidden = self.bag(words)
        if seldom:
            hidden = hidden + self.seldom(words[:, 0] % 7)
        if self.late_s:
            hidden = Late.apply(hidden, hidden.device.type, self.late_s)
        return self.out(hidden).square().mean()


def batches(device, rank):
    """Words that are there often, all batches at once."""
    data = torch.Generator().manual_seed(100 + rank)
    draws = torch.rand(STEPS, 32, 5, generator=data, dtype=torch.float64)
    return (draws**4 * ROWS).long().to(device)


def is_seldom(step, rank):
    return step % 3 == 2 or (step % 3 == 1 and rank == 0)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def run(transport, rank, mode, delay):
    """The state after training with delays of one kind ("": none)."""
    device = transport.device
    model = Words(device)
    model.late_s = LATE_S if delay in ("gradients", "memory") else 0.0
    opt = ub.DistributedOptimizer(
        adagrad(model), model.named_parameters(), overlap=mode, tune_steps=2
    )
    for step, words in enumerate(batches(device, rank)):
        opt.zero_grad()
        loss = model(words, is_seldom(step, rank))
        if delay == "peer" and step % 2 == rank:
            sleep(device, 2 * LATE_S)
        loss.backward()
        if delay == "memory":
            churn(device)
        opt.step()
        if delay == "update":
            sleep(device, LATE_S)
    opt.synchronize()
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    opt.close()
    return state


def churn(device):
    """Takes whatever memory of rows' sizes is free, and spoils it."""
    taken = [torch.full((160, WIDTH), 7.0, dtype=torch.float64, device=device) for _ in range(8)]
    taken += [torch.full((160,), 3, dtype=torch.int64, device=device) for _ in range(8)]
    del taken


def alone(device, size):
    """What all ranks together come to, by one process."""
    model = Words(device)
    opt = adagrad(model)
    sources = [batches(device, rank) for rank in range(size)]
    for step in range(STEPS):
        opt.zero_grad()
        for rank in range(size):
            (model(sources[rank][step], is_seldom(step, rank)) / size).backward()
        opt.step()
    return model.state_dict()


def delayed(transport, rank, size):
    ub.init()
    prepare()
    expected = alone(transport.device, size)
    for mode in ("backward", "forward"):
        first = run(transport, rank, mode, "")
        bad = wrong(first, expected, 1e-9)
        assert not bad, (mode, bad)
        for delay in ("gradients", "peer", "update", "memory"):
            bad = wrong(run(transport, rank, mode, delay), first)
            assert not bad, (mode, delay, bad)


def test_numbers_are_one_processes_and_delays_change_nothing(transports, record_property):
    usable = for_ranks(transports, 2)
    record_property("over", ", ".join(t.name for t in usable))
    everywhere(usable, 2, delayed, timeout=100)


def asleep(transport, rank, size):
    """Seconds that the GPU slept, and when the host was done with backward and step meanwhile."""
    ub.init()
    prepare()
    torch.use_deterministic_algorithms(False)  # else what is empty is filled, by more kernels
    model = Words("cuda")
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), overlap="forward",
        tune_steps=0,
    )  # fmt: skip
    words = batches("cuda", rank)[0]

    def backward():
        opt.zero_grad()
        loss = model(words, True)
        torch.cuda.set_sync_debug_mode("error")
        loss.backward()
        torch.cuda.set_sync_debug_mode("default")

    for _ in range(8):
        backward()
        opt.step()
    opt.synchronize()
    sleep("cuda", 1e-3)  # which measures the clock
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    sleep("cuda", ASLEEP_S)
    end.record()
    start = time.perf_counter()
    backward()
    opt.step()
    took = time.perf_counter() - start
    opt.synchronize()
    opt.close()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3, took


@pytest.mark.cuda
def test_host_does_not_wait_inside_backward(transports, record_property):
    for transport in for_ranks(transports, 2):
        for slept, took in transport.run(2, asleep, timeout=60):
            record_property(
                transport.name, f"asleep {slept:.2f} s; host done in {took * 1e3:.1f} ms"
            )
            assert slept > ASLEEP_S / 2
            assert took < SHARE * slept, (transport.name, slept, took)

# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients on a device: the host's numbers, over an emulated one."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import test_sparse
import usbyte.torch as ub
from _emulated import EmulatedDevice, emulate
from _ranks import run_ranks
from test_sparse import Words, batches, difference, is_seldom, make_optimizer, train
from usbyte.errors import UsageError
from usbyte.torch.plan.sparse import Rows

MODES = ("backward", "forward")


def equals_the_host(rank, size, kinds, variants):
    ub.init()
    cases = [(mode, kind, v) for kind in kinds for v in variants for mode in MODES]
    expected = [train(mode, kind, rank, **variant)[0] for mode, kind, variant in cases]
    device = emulate()
    for (mode, kind, variant), want in zip(cases, expected, strict=True):
        got, ops = train(mode, kind, rank, **variant)
        assert ops.count("sparse_all_reduce") == (0 if "sparse_as_dense" in variant else 3)
        assert difference(got, want) == 0, (kind, mode, variant)
    return device.cuda.live


def test_two_ranks_equal_the_host_bit_for_bit():
    live = run_ranks(2, equals_the_host, ["sgd", "adagrad", "sparse_adam"], [{}], timeout=120)
    assert max(live) < 100  # the clock's; those of closed engines are gone


def test_accumulated_kept_and_dense_gradients():
    variants = [
        {"accumulate": 3, "steps": 15},
        {"accumulate": 2, "set_to_none": False},
        {"sparse_as_dense": True},
    ]
    run_ranks(2, equals_the_host, ["sgd"], variants, timeout=120)


def train_bare(rank, mode, dtype):
    """Batches of any length, none too, by words that are there often."""
    torch.manual_seed(1)
    model = nn.Embedding(20, 3, sparse=True, dtype=dtype)
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), overlap=mode
    )
    for step, words in enumerate(batches(rank, 14)):
        optimizer.zero_grad()
        length = 0 if step % 4 == 3 or step % 4 == rank else 5 * step
        model(words.flatten()[:length] % 20).square().sum().backward()
        optimizer.step()
    optimizer.synchronize()
    state = model.state_dict()
    optimizer.close()
    return state


def has_empty_batches(rank, size):
    ub.init()
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    cases = [(mode, dtype) for dtype in dtypes for mode in MODES]
    expected = [train_bare(rank, *case) for case in cases]
    emulate()
    for case, want in zip(cases, expected, strict=True):
        got = train_bare(rank, *case)["weight"]
        assert torch.equal(got, want["weight"]), case


def test_empty_batches_and_halves():
    run_ranks(2, has_empty_batches, timeout=120)


def emulated(rank, size, name):
    emulate()
    getattr(test_sparse, name)(rank, size)


@pytest.mark.parametrize("name", ["hooked", "reuses_its_batch", "keeps_sparse_gradients"])
def test_what_holds_on_the_host(name):
    run_ranks(2, emulated, name, timeout=120)


def timelines(rank, size, folder):
    ub.init()
    emulate()
    model = Words()
    optimizer = ub.DistributedOptimizer(
        make_optimizer("sgd", model), model.named_parameters(), overlap="forward", tune_steps=0
    )
    for step, words in enumerate(batches(rank, 14)):
        if optimizer.plan.policy != "learning" and step == 10:
            ub.start_timeline(f"{folder}/%r.json")
        optimizer.zero_grad()
        model(words, is_seldom(step, rank)).backward()
        optimizer.step()
    profile = optimizer.decision.profile
    ub.stop_timeline()
    optimizer.close()
    with open(f"{folder}/{rank}.json") as file:
        events = [event for event in json.load(file) if event["ph"] == "X"]
    sums = [e for e in events if e["cat"] == "communication" and "sum_rows" in e["args"]]
    assert len(sums) >= 9
    assert all(e["dur"] > 0 for e in sums)
    assert any(e["args"]["sum_rows"] > e["args"]["rows"] > 0 for e in sums)
    ready = {t.name: s for t, s in zip(profile.tensors, profile.ready_s, strict=True)}
    assert ready["word.weight"] >= ready["out.weight"] > 0
    assert [t.rows for t in profile.tensors if t.name == "word.weight"] == [test_sparse.ROWS]


def test_is_learned_and_in_the_timeline(tmp_path):
    run_ranks(2, timelines, str(tmp_path), timeout=60)


def dies(rank, size):
    ub.init()
    emulate()
    model = Words()
    optimizer = ub.DistributedOptimizer(
        make_optimizer("sgd", model), model.named_parameters(), overlap="forward"
    )
    for step, words in enumerate(batches(rank, 20)):
        optimizer.zero_grad()
        loss = model(words, is_seldom(step, rank))
        if step == 8 and rank == 1:
            raise RuntimeError("out of luck")
        loss.backward()
        optimizer.step()


def test_a_rank_that_dies_ends_the_others():
    with pytest.raises(AssertionError) as error:
        run_ranks(2, dies, timeout=60)
    text = str(error.value)
    assert "out of luck" in text
    assert "FaultError" in text.split("--- rank 1")[0]


def test_rows_are_coalesced_by_the_device_alone():
    device = EmulatedDevice()
    before = device.cuda.host_waits
    param = nn.Parameter(torch.zeros(9, 2))
    grad = torch.sparse_coo_tensor(
        torch.tensor([[7, 2, 7, 0, 2, 7]]),
        torch.arange(12.0).view(6, 2),
        (9, 2),
        check_invariants=False,
    )
    rows = Rows("words", grad, param, device)
    assert rows.count is not None
    assert rows.count.tolist() == [3]
    assert rows.ids[:3].tolist() == [0, 2, 7]
    want = grad.coalesce()
    assert torch.equal(rows.values[:3], want.values())
    assert device.cuda.host_waits == before


def refuses(rank, size):
    ub.init()
    emulate()
    model = nn.Embedding(9, 3, sparse=True)
    with pytest.raises(UsageError, match=r"'weight' is sparse, .* fused_update=True"):
        ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), fused_update=True
        )


def test_what_cannot_be_is_an_error():
    run_ranks(2, refuses, timeout=60)

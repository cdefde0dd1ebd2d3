# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients: the same numbers as one process's, and errors where they cannot be.

None is compared with plain DDP: its sparse sums over Gloo break torch's heap (see docs/sparse.md).
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from _models import warnings_from_now_on
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import MismatchError, UsageError
from usbyte.torch import testing
from usbyte.torch.plan.sparse import (
    Counts,
    DensityMonitor,
    RowCounts,
    choose_scheme,
    potential_gain_s,
    renormalized_parameters,
    sparse_parameters,
)

ROWS, WIDTH = 300, 5


class Words(nn.Module):
    """A bag of words and a word, and a layer that is not sparse."""

    def __init__(self, dense: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum", dtype=dtype)
        self.word = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)
        self.seldom = nn.Embedding(7, WIDTH, sparse=True, dtype=dtype)
        self.none = nn.Embedding(0, WIDTH, sparse=True, dtype=dtype)
        self.out = nn.Linear(WIDTH, 3, dtype=dtype) if dense else None

    def forward(self, words: torch.Tensor, seldom: bool) -> torch.Tensor:
        hidden = self.bag(words) * self.word(words[:, 0]) + self.none(words[0, :0]).sum()
        if seldom:
            hidden = hidden + self.seldom(words[:, 0] % 7)
        return hidden.square().mean() if self.out is None else self.out(hidden).square().mean()


def make_optimizer(kind, model):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=0.1)
    return torch.optim.SparseAdam(list(model.parameters()), lr=0.1)


def batches(rank, steps, skewed=True):
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        draws = torch.rand(16, 4, generator=generator, dtype=torch.float64)
        yield ((draws**4 if skewed else draws) * ROWS).long()


def is_seldom(step, rank):
    """Whether `seldom` is used: by nobody, by one rank, or by all."""
    return step % 3 == 2 or (step % 3 == 1 and rank == 0)


def train(mode, kind, rank, steps=14, accumulate=1, set_to_none=True, **options):
    model = Words(dense=kind != "sparse_adam")
    optimizer = ub.DistributedOptimizer(
        make_optimizer(kind, model), model.named_parameters(), overlap=mode, **options
    )
    for step, words in enumerate(batches(rank, steps)):
        if step % accumulate == 0:
            optimizer.zero_grad(set_to_none=set_to_none)
        with nullcontext() if (step + 1) % accumulate == 0 else optimizer.no_sync():
            model(words, is_seldom(step, rank)).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            if mode == "backward":
                assert model.word.weight.grad.is_sparse != bool(options.get("sparse_as_dense"))
    optimizer.synchronize()
    ops = [op.kind for op in optimizer.plan.ops]
    chosen = [op.sparse for op in optimizer.plan.ops if op.sparse]
    assert not chosen or max(way.bytes for way in chosen) > 0
    made = optimizer.decision
    predicted = _core.simulate(optimizer.plan, made.profile, made.network, mode)
    assert predicted.step_s == pytest.approx(made.predicted_s)
    optimizer.close()
    return model.state_dict(), ops


def train_alone(kind, ranks, steps=14, accumulate=1, set_to_none=True, seldom=True):
    """What all ranks together come to, by one process."""
    model = Words(dense=kind != "sparse_adam")
    optimizer = make_optimizer(kind, model)
    sources = [list(batches(rank, steps)) for rank in range(ranks)]
    for step in range(steps):
        if step % accumulate == 0:
            optimizer.zero_grad(set_to_none=set_to_none)
        for rank in range(ranks):
            (model(sources[rank][step], seldom and is_seldom(step, rank)) / ranks).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
    return model.state_dict()


def difference(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a if a[name].numel())


def equals_one_process(rank, size, kinds, variants):
    ub.init()
    for kind in kinds:
        for variant in variants:
            expected = train_alone(kind, size, **variant)
            for mode in ("backward", "forward"):
                got, ops = train(mode, kind, rank, **variant)
                assert ops.count("sparse_all_reduce") == 3, ops
                assert difference(got, expected) < 1e-12, (kind, variant, mode)


class Twins(nn.Module):
    """Two tables alike, so that their gradients go together."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = (nn.Embedding(50, 3, sparse=True, dtype=torch.float64) for _ in "ab")

    def forward(self, words):
        return (self.a(words) * self.b(words).cos()).square().sum()


def changes_sparse_gradients(rank, size):
    """Both are read in one operation between backward() and step(), and changed where they are."""
    ub.init()

    def run(overlap):
        model = Twins()
        optimizer = ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            overlap=overlap,
            policy="ddp",
        )
        sums = []
        for words in batches(rank, 14):
            optimizer.zero_grad()
            model(words[:, 0] % 50).backward()
            a, b = model.a.weight.grad, model.b.weight.grad
            sums.append(torch.stack([a, b]).to_dense().square().sum().item())
            a.mul_(0.5)
            optimizer.step()
        optimizer.close()
        return model.state_dict(), sums

    (backward, expected), (forward, sums) = run("backward"), run("forward")
    assert sums == expected
    assert difference(forward, backward) == 0


def test_sparse_gradients_read_together_and_changed_are_sums():
    run_ranks(2, changes_sparse_gradients, timeout=120)


def reuses_its_batch(rank, size):
    """A buffer for batches that is filled anew as soon as step() has returned."""
    ub.init()
    model, batch = Words(), torch.empty(16, 4, dtype=torch.int64)
    optimizer = ub.DistributedOptimizer(
        make_optimizer("sgd", model), model.named_parameters(), overlap="forward"
    )
    for step, words in enumerate(batches(rank, 14)):
        batch.copy_(words)
        optimizer.zero_grad()
        model(batch, is_seldom(step, rank)).backward()
        optimizer.step()
        batch.fill_(7)
    optimizer.synchronize()
    assert difference(model.state_dict(), train_alone("sgd", size)) < 1e-12
    optimizer.close()


def test_batches_may_be_overwritten_after_a_step():
    run_ranks(2, reuses_its_batch, timeout=120)


def keeps_sparse_gradients(rank, size):
    """With sparse_as_dense=True a layer may be used in an earlier micro-batch alone."""
    ub.init()
    torch.manual_seed(0)
    first, second = nn.Embedding(9, 3, sparse=True), nn.Embedding(9, 3, sparse=True)
    model = nn.ModuleList([first, second])
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse_as_dense=True
    )
    start = first.weight.detach().clone()
    optimizer.zero_grad()
    with optimizer.no_sync():
        first(torch.tensor([1, 1, 2 + rank])).sum().backward()
    second(torch.tensor([rank])).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    moved = (start - first.weight.detach())[:, 0] / 0.1
    assert torch.allclose(moved, torch.tensor([0, 2, 0.5, 0.5, 0, 0, 0, 0, 0]), atol=1e-5), moved
    optimizer.close()


def test_sparse_gradients_of_earlier_micro_batches_become_dense():
    run_ranks(2, keeps_sparse_gradients, timeout=120)


def has_other_rows(rank, size):
    """One rank alone finds another scheme faster; all learn anew, which changes no number."""
    importlib.import_module("usbyte.torch.plan.sparse")._WINDOW = 2
    ub.init()
    steps = 30
    model = Words()
    optimizer = ub.DistributedOptimizer(
        make_optimizer("sgd", model), model.named_parameters(), tune_steps=0
    )
    learning = []
    for step, words in enumerate(batches(rank, steps)):
        optimizer.zero_grad()
        model(words, is_seldom(step, rank)).backward()
        optimizer.step()
        learning.append(optimizer.plan.policy == "learning")
        if step == 8 and rank == 1:
            testing.simulate_density_change(optimizer)
    optimizer.synchronize()
    got, expected = model.state_dict(), train_alone("sgd", size, steps=steps)
    optimizer.close()
    first = learning.index(False)
    # Three windows of two steps each, the vote and its hearing.
    assert learning.index(True, first) in range(14, 20), learning
    assert not learning[-1]
    assert difference(got, expected) < 1e-12


def test_other_rows_make_ranks_learn_anew():
    run_ranks(2, has_other_rows, timeout=120, env={"USBYTE_LEARNING_STEPS": "2"})


def test_a_scheme_is_outdated_when_another_one_is_clearly_faster():
    network = _core.NetworkModel.ring(4, 0.0, 125e6)
    param = nn.Parameter(torch.empty(100_000, 64))
    apart, alike = Counts(1000, 4000), Counts(1000, 1000)  # ranks share no row, or all of them
    doubling, zen = (choose_scheme("words", param, counts, network) for counts in (apart, alike))
    assert (doubling.scheme, zen.scheme) == ("hierarchical", "zen")
    assert potential_gain_s("words", param, doubling, alike, network) > 0
    assert potential_gain_s("words", param, doubling, apart, network) == 0
    assert potential_gain_s("words", param, zen, apart, network) > 0
    nearly = Counts(1000, 2500)  # where both take about as long
    assert potential_gain_s("words", param, zen, nearly, network) == 0
    assert potential_gain_s("words", param, doubling, nearly, network) == 0
    assert Counts(10, 30).grown_to(60) == Counts(20, 60)
    assert Counts(0, 0).grown_to(60) == Counts(60, 60)


def test_other_rows_must_last_for_three_windows():
    asked = []
    drift = DensityMonitor(lambda counts: asked.append(counts) or counts["words"].own > 5)

    def steps_until_wanted(rows):
        counts = RowCounts()
        for step, own in enumerate(rows):
            counts.add("words", own, 2 * own)
            if drift.wants_plan(counts):
                return step + 1
        return None

    drift.reset()  # of the first plan
    assert steps_until_wanted([9] * 100) == 60
    assert asked[0]["words"] == Counts(9, 18)
    drift.reset()
    assert steps_until_wanted([9] * 119) is None
    drift.reset()
    assert steps_until_wanted(([9] * 160 + [1] * 80) * 3) is None


@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_as_one_process_does(ranks):
    # SparseAdam has no other parameters.
    kinds = ["sgd", "adagrad", "sparse_adam"]
    run_ranks(ranks, equals_one_process, kinds, [{}], timeout=120)


def test_accumulated_and_kept_gradients():
    variants = [{"accumulate": 3, "steps": 15}, {"accumulate": 2, "set_to_none": False}]
    run_ranks(2, equals_one_process, ["sgd"], variants, timeout=120)


def hooked(rank, size):
    ub.init()
    model = Words()
    model.seldom.requires_grad_(False)  # DDP wants a gradient from every rank in every step
    optimizer = make_optimizer("adagrad", model)
    net = DistributedDataParallel(model)
    net.register_comm_hook(None, ub.ddp_comm_hook("none"))
    for words in batches(rank, 8):
        optimizer.zero_grad()
        net(words, False).backward()
        optimizer.step()
    expected = train_alone("adagrad", size, steps=8, seldom=False)
    assert difference(model.state_dict(), expected) < 1e-12


def test_as_a_hook_of_ddp():
    run_ranks(2, hooked, timeout=120)


def densified(rank, size):
    ub.init()
    expected = train_alone("sgd", size)
    got, ops = train("backward", "sgd", rank, sparse_as_dense=True)
    assert "sparse_all_reduce" not in ops
    assert difference(got, expected) < 1e-12


def test_sparse_as_dense():
    run_ranks(2, densified, timeout=120)


def remembers_the_others(rank, size):
    """What codecs remember of the parameters that are not sparse goes through a checkpoint."""
    ub.init()
    saved = None
    for _ in range(2):
        model = Words(dtype=torch.float32)
        optimizer = ub.DistributedOptimizer(
            make_optimizer("sgd", model), model.named_parameters(), compression="topk:0.3"
        )
        if saved is not None:
            optimizer.load_state_dict(saved)
            kept = optimizer.state_dict()["usbyte_memory"]["out.weight"]["rows"]
            assert torch.equal(kept, saved["usbyte_memory"]["out.weight"]["rows"])
        for words in batches(rank, 4):
            optimizer.zero_grad()
            model(words, True).backward()
            optimizer.step()
        saved = optimizer.state_dict()
        assert saved["usbyte_memory"].keys() == {"out.weight", "out.bias"}
        assert saved["usbyte_memory"]["out.weight"]["rows"].any()
        optimizer.close()


def test_checkpoints_with_sparse_and_compressed_gradients_load():
    run_ranks(2, remembers_the_others, timeout=120, env={"USBYTE_LEARNING_STEPS": "2"})


def shares_its_state(rank, size):
    """Momenta of sparse gradients are sparse; a rank that resumes or has joined gets them, too."""
    ub.init()

    def wrapped():
        model = Words()
        optimizer = make_optimizer("sgd", model)
        return model, ub.DistributedOptimizer(optimizer, model.named_parameters())

    def steps(count):
        for words in batches(rank, count):
            optimizer.zero_grad()
            model(words, True).backward()
            optimizer.step()

    def check():
        optimizer.synchronize()
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        assert sum(m.is_sparse for m in momenta) >= 3
        for tensor in [*momenta, *model.parameters()]:
            rows = tensor.detach().to_dense()
            assert torch.equal(rows, ub.broadcast(rows, 0))

    model, optimizer = wrapped()
    steps(3 + rank)
    ub.join()
    check()
    parameters, state = model.state_dict(), optimizer.state_dict()
    optimizer.close()
    model, optimizer = wrapped()
    if rank == 0:
        model.load_state_dict(parameters)
        optimizer.load_state_dict(state)
    ub.broadcast_parameters(model.state_dict(), root_rank=0)
    ub.broadcast_optimizer_state(optimizer, root_rank=0)
    check()
    steps(4)
    check()
    optimizer.close()


def test_sparse_momenta_are_shared():
    run_ranks(2, shares_its_state, timeout=120, env={"USBYTE_LEARNING_STEPS": "2"})


class Constrained(nn.Linear):
    """All of whose rows are renormalised, alike on all ranks."""

    max_norm = 1.0


def renormalizes(rank, size):
    ub.init()
    warnings = warnings_from_now_on()
    model = Constrained(3, 2)
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    assert not warnings
    opt.close()
    for sparse in (False, True):
        model = nn.Sequential(nn.Embedding(9, 3, sparse=sparse, max_norm=1.0), nn.Linear(3, 2))
        opt = ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        assert len(warnings) == 1
        assert "renormalizes the rows of '0.weight' that it uses (max_norm)" in warnings.pop()
        opt.close()


def test_rows_that_each_rank_renormalizes_are_told_of():
    run_ranks(2, renormalizes)


class Older(nn.Embedding):
    """Names its parameters by the signature of before torch 2.0, as DDP takes them."""

    def named_parameters(self, prefix="", recurse=True):
        yield from super().named_parameters(prefix, recurse)


def test_sparse_weights_are_found_where_naming_is_overridden():
    model = nn.Sequential(Older(9, 3, sparse=True, max_norm=1.0), nn.Linear(3, 2))
    assert sparse_parameters(model) == renormalized_parameters(model) == {model[0].weight}


def refuses(rank, size):
    ub.init()
    model = Words()
    with pytest.raises(UsageError, match=r"'bag.weight' is sparse, .* shard_optimizer=True"):
        ub.DistributedOptimizer(
            make_optimizer("sgd", model),
            model.named_parameters(),
            overlap="forward",
            shard_optimizer=True,
        )
    names = list(model.named_parameters())  # which does not tell the model
    optimizer = ub.DistributedOptimizer(make_optimizer("sgd", model), names)
    with pytest.raises(UsageError, match=r"is sparse, which could not be detected .* model="):
        model(next(batches(rank, 1)), True).backward()
    optimizer._participant.fail("on purpose")
    optimizer.close()
    told = Words()
    optimizer = ub.DistributedOptimizer(
        make_optimizer("sgd", told), list(told.named_parameters()), model=told
    )
    told(next(batches(rank, 1)), True).backward()
    optimizer.step()
    optimizer.close()
    other = Words()
    with pytest.raises(MismatchError, match=r"'bag.weight' has gradients sparse on rank 0 but"):
        ub.DistributedOptimizer(
            make_optimizer("sgd", other), other.named_parameters(), sparse_as_dense=rank == 1
        )


def test_what_cannot_be_is_an_error():
    run_ranks(2, refuses, timeout=120)

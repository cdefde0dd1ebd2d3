# SPDX-License-Identifier: Apache-2.0
"""Optimizers that nobody refers to any more go with their models, as plain ones do."""

from __future__ import annotations

import copy
import gc
import io
import os
import weakref

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _models import OPTIMIZERS, Awkward, groups
from _ranks import run_ranks
from usbyte.errors import FaultError, UsageError
from usbyte.torch.lazy_tensor import forget_dead

LEARNED = {"USBYTE_LEARNING_STEPS": "2"}


class Words(nn.Module):
    """Has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, sparse=True)
        self.head = nn.Linear(16, 40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def step(model, optimizer, rank, k):
    tokens = torch.randint(0, 40, (4, 6), generator=torch.Generator().manual_seed(100 * k + rank))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def trained(rank, steps=5, kind=Awkward, inner=OPTIMIZERS["adam"], **options):
    """A model and its optimizer after so many steps, the last of which may be on its way."""
    torch.manual_seed(3)
    model = kind()
    optimizer = ub.DistributedOptimizer(inner(groups(model)), model.named_parameters(), **options)
    for k in range(steps):
        step(model, optimizer, rank, k)
    return model, optimizer


def values(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def threads():
    return len(os.listdir("/proc/self/task"))


WAYS = {
    "backward": {"overlap": "backward"},
    "forward": {"overlap": "forward"},
    "while it learns": {"steps": 1},
    "sharded": {"shard_optimizer": True},
    "compressed": {"overlap": "forward", "policy": "ddp", "compression": "efsignsgd"},
    "sparse": {"overlap": "forward", "kind": Words, "inner": torch.optim.Adagrad},
}


def goes(rank, size, way: str):
    ub.init()
    found, counts = [], []
    for _ in range(3):
        model, optimizer = trained(rank, **WAYS[way])
        there = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        gc.collect()
        counts.append(threads())
        found.append([each() is None for each in there])
    return found, counts[0] == counts[1] == counts[2], values(trained(rank, **WAYS[way])[0])


@pytest.mark.parametrize("way", WAYS)
def test_models_and_optimizers_that_nobody_refers_to_go(way):
    first, second = run_ranks(2, goes, way, env=LEARNED)
    assert first == second
    assert first[:2] == [[[True, True]] * 3, True]


def sweeps(rank, size):
    """As in a notebook: names are used again, and nobody thinks of the collector."""
    ub.init()
    there, counts = [], []
    for _ in range(4):
        model, optimizer = trained(rank, steps=3)
        there.append(weakref.ref(model))
        counts.append(threads())
    left = sum(each() is not None for each in there)
    del model, optimizer
    return left, counts[1] == counts[2] == counts[3], ub.join() in (0, 1)


def test_a_sweep_has_no_more_than_two_at_once():
    for left, is_level, joins in run_ranks(2, sweeps, env=LEARNED):
        assert left <= 2
        assert is_level
        assert joins


def keeps(rank, size):
    """What of a model is still referred to has all that an optimizer that is kept would give it."""
    ub.init()
    want = values(trained(rank, overlap="forward")[0])

    model, optimizer = trained(rank, overlap="forward")
    del optimizer
    gc.collect()
    of_model = values(model)

    model, optimizer = trained(rank, overlap="forward")
    params = list(model.parameters())
    del model, optimizer
    gc.collect()
    of_params = torch.cat([p.detach().flatten() for p in params]).tolist()

    model, optimizer = trained(rank, overlap="forward")
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    del model, optimizer
    gc.collect()
    for forget in (False, True):
        if forget:
            forget_dead()
        with pytest.raises(UsageError, match="deleted: read it before that, or call"):
            grads[0].sum()
    del grads, params
    return [of_model == want, of_params == want]


def test_what_is_kept_of_a_model_gets_its_updates():
    assert run_ranks(2, keeps, env=LEARNED) == [[True, True]] * 2


class Bare(nn.Module):
    """Used without being called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


def steps_inside(rank, size):
    """The wrapper is dropped, and the wrapped optimizer goes on."""
    ub.init()
    found = []
    for kind in ("plain", "in place", "bare"):
        torch.manual_seed(0)
        model = Bare() if kind == "bare" else nn.Linear(4, 4)
        if kind == "in place":
            model.compile(backend="eager")
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        ub.DistributedOptimizer(inner, model.named_parameters(), overlap="backward")
        for k in range(4):
            gc.collect()
            inner.zero_grad()
            x = torch.full((1, 4), float(rank + k))
            (x @ model.weight if kind == "bare" else model(x)).sum().backward()
            inner.step()
        found.append(values(model))
    return found


def test_who_goes_on_with_the_wrapped_optimizer_gets_averages():
    first, second = run_ranks(2, steps_inside, env=LEARNED)
    assert first == second


def compiles(rank, size):
    """A whole graph, with and without an optimizer that is gone."""
    ub.init()
    for _ in range(2):
        model = nn.Linear(4, 4)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        optimizer = ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        del model, compiled, optimizer
        gc.collect()
    return torch.compile(nn.Linear(4, 4), fullgraph=True, backend="eager")(torch.ones(1, 4)).shape


def test_compiled_models_have_no_breaks():
    assert run_ranks(2, compiles, env=LEARNED) == [[1, 4]] * 2


def goes_on_one(rank, size):
    """Rank 0 keeps its optimizer: rank 1's engine stays with it until rank 0 drops it, too."""
    ub.init()
    model, optimizer = trained(rank, steps=3)
    kept = [model, optimizer] if rank == 0 else []
    del model, optimizer
    counts = []
    for _ in range(2):
        trained(rank, steps=1)[1].close()
        counts.append(threads())
    kept.clear()
    trained(rank, steps=1)[1].close()
    return counts[0] == counts[1] > threads()


def test_nothing_is_closed_before_all_ranks_have_dropped_it():
    assert run_ranks(2, goes_on_one, env=LEARNED) == [True, True]


def drops_it_too_early(rank, size):
    ub.init()
    model, optimizer = trained(rank, steps=3, overlap="forward", policy="wfbp")
    if rank == 0:
        del model, optimizer
        gc.collect()
    else:
        step(model, optimizer, rank, 3)
    with pytest.raises(FaultError, match="rank 0 has not begun backward of step 4"):
        ub.barrier() if rank == 0 else optimizer.synchronize()


def test_a_rank_that_has_dropped_it_too_early_is_named():
    limits = {"USBYTE_STALL_LIMIT_S": "10", "USBYTE_STALL_WARNING_S": "5"}
    assert run_ranks(2, drops_it_too_early, env=LEARNED | limits) == [None, None]


def fails_in_backward(rank, size):
    """As in a notebook: an error, elsewhere on each rank, a repair, and the cell is run again."""
    ub.init()
    model, optimizer = trained(rank, bucket_bytes=4096)
    at = model.head.weight if rank == 0 else model.norm.weight
    hook = at.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, optimizer, rank, 5)
    hook.remove()
    there = weakref.ref(optimizer)
    del model, optimizer, at, hook
    counts = []
    for _ in range(3):
        after = values(trained(rank, steps=3)[0])  # torch drops the rest of a graph in the next
        gc.collect()
        counts.append(threads())
    return there() is None and counts[0] > counts[1] == counts[2], after


def test_an_error_in_backward_keeps_nothing():
    (gone, first), (gone_too, second) = run_ranks(2, fails_in_backward, env=LEARNED)
    assert gone
    assert gone_too
    assert first == second


def copies(rank, size):
    ub.init()
    model, optimizer = trained(rank)
    shallow, deep = copy.copy(model.norm.weight), copy.deepcopy(model.norm.weight)
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    same = all(torch.equal(loaded[name], p) for name, p in model.named_parameters())
    for param in (shallow, deep, loaded["norm.weight"]):
        inner = torch.optim.SGD([param], lr=0.1)
        ub.DistributedOptimizer(inner).close()
    del model, optimizer, shallow
    gc.collect()
    return same


def test_copies_of_parameters_are_nobodys():
    assert run_ranks(2, copies, env=LEARNED) == [True, True]


def swaps(rank, size):
    """Torch would take the hook away from the parameter."""
    ub.init()
    model = trained(rank)[0]
    torch.__future__.set_swap_module_params_on_conversion(True)
    with pytest.raises(RuntimeError, match="swap"):
        model.load_state_dict(model.state_dict())


def test_parameters_are_not_swapped():
    run_ranks(2, swaps, env=LEARNED)


def test_a_single_rank_keeps_no_optimizer(single):
    model = nn.Linear(4, 4)
    for closes in (True, False, False):
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = ub.DistributedOptimizer(inner, model.named_parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if closes:
            optimizer.close()
        there = weakref.ref(inner)
        del inner, optimizer
        gc.collect()
        assert there() is None

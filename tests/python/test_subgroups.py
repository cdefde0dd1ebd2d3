# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer among some of the ranks: data parallelism inside a larger mesh."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import FaultError, MismatchError, UsageError
from usbyte.torch.runtime.process_groups import gloo_group
from usbyte.torch.world.world import current

STEPS = 12


class Half(nn.Module):
    """A model of which each set of ranks has another one."""

    def __init__(self, seed, sparse=False):
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(30, 8, sparse=sparse)
        self.out = nn.Linear(8, 3)
        self.double()

    def forward(self, words):
        return self.out(self.words(words).tanh()).square().mean()


def trained(net, model, optimizer, rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.randint(0, 30, (16,), generator=generator)).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def make(model, among, sparse=False, **options):
    kind = torch.optim.SGD if sparse else torch.optim.Adam
    inner = kind(model.parameters(), lr=0.1)
    return ub.DistributedOptimizer(inner, model.named_parameters(), process_set=among, **options)


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def inside_a_mesh(rank, size):
    """Ranks 0, 2 and ranks 1, 3 are data parallel, each pair with a model of its own."""
    ub.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    here = mesh["model"].get_local_rank()
    group = mesh["data"].get_group()
    model = Half(here)
    net = DistributedDataParallel(model, process_group=group)
    expected = trained(net, model, torch.optim.Adam(model.parameters(), lr=0.1), rank)
    ways = {
        "mesh": (mesh["data"], {}),
        "group": (group, {"overlap": "backward"}),
        "ranks": ([here, here + 2], {"overlap": "forward", "policy": "wfbp"}),
        "sharded": ([here, here + 2], {"shard_optimizer": True}),
    }
    for name, (among, options) in ways.items():
        model = Half(here)
        optimizer = make(model, among, **options)
        assert optimizer._session.rank_group.size == 2
        assert same(trained(model, model, optimizer, rank), expected), name
        optimizer.close()

    # All ranks, and a part of them, in turns.
    ours, everyones = Half(here), Half(7)
    mine, whole = make(ours, mesh["data"]), make(everyones, None)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        words = torch.randint(0, 30, (16,), generator=generator)
        for model, optimizer in ((ours, mine), (everyones, whole)):
            optimizer.zero_grad()
            model(words).backward()
            optimizer.step()
    assert same(ours.state_dict(), expected)
    flat = nn.utils.parameters_to_vector(everyones.parameters())
    assert torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min))
    mine.close()
    whole.close()
    ub.shutdown()


def test_data_parallel_inside_a_mesh_as_with_ddp():
    run_ranks(4, inside_a_mesh, timeout=150)


def of_three(rank, size):
    ub.init()
    pair = ub.add_process_set([0, 2])
    if rank == 1:
        with pytest.raises(UsageError, match="rank 1 is not in the process set of ranks 0, 2"):
            make(Half(0), pair)
        ub.shutdown()
        ub.init()
        return None
    results = []
    for sparse_as_dense in (False, True):
        model = Half(0, sparse=True)
        optimizer = make(model, pair, sparse=True, sparse_as_dense=sparse_as_dense)
        results.append(trained(model, model, optimizer, rank))
        optimizer.close()
    assert all(torch.allclose(results[0][n], results[1][n], atol=1e-12) for n in results[0])
    model = Half(0)
    coded = make(model, [0, 2], policy="ddp", compression=ub.Compression.topk(0.5))
    state = trained(model, model, coded, rank)
    for name, value in state.items():
        assert torch.equal(ub.allreduce(value, op=ub.Max, process_set=pair), value), name
    assert any(op.codec != "none" for op in coded.plan.ops)
    coded.close()
    ub.shutdown()
    ub.init()  # the same ranks once more
    model = Half(0, sparse=True)
    optimizer = make(model, [0, 2], sparse=True)
    assert same(trained(model, model, optimizer, rank), results[0])
    with pytest.raises(MismatchError, match=r"of ranks.0.2.*rank 0 but .*rank 2"):
        make(Half(0), [0, 2], op=ub.Sum if rank else ub.Average)
    return True


def of_three_then_all(rank, size):
    answer = of_three(rank, size)
    ub.barrier()
    ub.shutdown()
    return answer


def test_sparse_gradients_and_codecs_among_some_ranks():
    assert run_ranks(3, of_three_then_all, timeout=120) == [True, None, True]


def loses_a_member(rank, size):
    ub.init()
    model = Half(0)
    if rank == 0:
        with pytest.raises(FaultError, match=r"rank 2 .* does not answer"):
            ub.allreduce(torch.ones(1), name="never")
        return True
    optimizer = make(model, [1, 2], overlap="backward")
    before = trained(model, model, optimizer, rank)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(FaultError, match=r"rank 2 .* does not answer"):
        trained(model, model, optimizer, rank)
    assert same(model.state_dict(), before)  # which can be saved
    optimizer.state_dict()
    return dist.is_initialized()


def test_the_end_of_a_member_reaches_all_and_leaves_a_state_to_go_on_from():
    assert run_ranks(3, loses_a_member, dies=[2]) == [True, True, None]


def connects_late(rank, size):
    ub.init()
    store = dist.PrefixStore("late", current().store)
    connect = dist.ProcessGroupGloo

    def slowly(*args):
        made = connect(*args)
        time.sleep(0.5)
        store.set("connected", "")
        return made

    if rank == 1:
        dist.ProcessGroupGloo = slowly
    gloo_group(store, rank, size, timedelta(seconds=20))
    assert store.check(["connected"])


def test_no_rank_can_leave_a_group_to_which_others_still_connect():
    run_ranks(2, connects_late, timeout=30)

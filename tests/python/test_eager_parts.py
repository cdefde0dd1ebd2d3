# SPDX-License-Identifier: Apache-2.0
"""Parts of the eager queue by themselves: one rank, messages, verdicts, stores."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import usbyte.torch as ub
from _eager import same
from usbyte.errors import UsageError
from usbyte.torch.eager.descriptors import Descriptor, match
from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.eager.rank_group_ops import RankGroupOps
from usbyte.torch.reduce_op import ReduceOp
from usbyte.torch.runtime import store
from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.world import world


def test_one_rank_needs_neither_thread_nor_store(monkeypatch):
    queue = EagerQueue(None, None, 0, 1, 1.0, 1.0, str)
    monkeypatch.setattr(world, "current", lambda: SimpleNamespace(rank=0, size=1, eager=queue))
    x = torch.arange(6.0).view(3, 2)
    for result in [
        ub.allreduce(x), ub.allgather(x), ub.broadcast(x, 0), ub.reducescatter(x),
        ub.alltoall(x), ub.alltoall(x, [3])[0], ub.grouped_allgather([x, x])[1],
        ub.grouped_reducescatter([x, x])[1], ub.allreduce(x.to_sparse()).to_dense(),
    ]:  # fmt: skip
        same(result, x)
        assert result.data_ptr() != x.data_ptr()
    ub.barrier()
    assert queue.allgather_bytes("a", b"1") == [b"1"]
    assert queue.broadcast_bytes("a", b"1", 0) == b"1"
    queue.allreduce("a", x, ReduceOp.MAX)
    queue.close()
    with pytest.raises(UsageError, match="init"):
        ub.allreduce(x)


def test_what_is_aborted_while_its_group_is_made_does_not_run():
    def connect():
        peers.abort()
        return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))

    peers = RankGroupOps(connect, 0, 2)
    with pytest.raises(RuntimeError, match="aborted while they were made"):
        peers.all_reduce(torch.ones(1), dist.ReduceOp.SUM)


def test_long_lists_of_ranks_are_cut():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_verdicts_carry_each_ranks_sizes():
    def sizes(descriptors):
        return [list(v.sizes) for v in match("x", descriptors)]

    def describe(rank, kind, rows, **more):
        return Descriptor(rank, kind, ["int8"], [[rows, 2]], **more)

    gather = [describe(r, "allgather", rows) for r, rows in [(1, 5), (0, 4)]]
    assert sizes(gather) == [[4, 5], [4, 5]]
    group = [Descriptor(r, "allgather", ["int8"] * 2, [[10 + r], [20 + r]]) for r in (4, 2)]
    assert sizes(group) == [[12, 14, 22, 24]] * 2
    exchange = [describe(r, "alltoall", 3, splits=s) for r, s in [(0, [1, 2]), (1, [3, 0])]]
    assert sizes(exchange) == [[1, 3], [2, 0]]
    broadcast = [describe(r, "broadcast_bytes", 7 + r, root=1) for r in range(2)]
    assert sizes(broadcast) == [[8], [8]]


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("cloning", [True, False], ids=["clone", "before torch 2.8"])
def test_private_stores_share_keys_with_their_clones_only(server, cloning, monkeypatch):
    if not cloning:
        monkeypatch.setattr(store, "_own_clone", lambda _: None)
    elif not hasattr(server, "clone"):
        pytest.skip("this torch has no Store.clone")
    mine = store.private_store(dist.PrefixStore("run", server), "eager")
    others = store.private_store(dist.PrefixStore("run", server), "eager")
    foreign = store.private_store(dist.PrefixStore("another run", server), "eager")
    mine.set("key", "value")
    for same_keys in [others, store.clone_store(mine), store.clone_store(store.clone_store(mine))]:
        assert same_keys.get("key") == b"value"
    assert store.read_now(foreign, "key") is None
    assert store.read_now(mine, "key") == b"value"
    keys = server.num_keys()
    assert store.read_now(mine, "no such key") is None
    assert server.num_keys() == keys
    store.clone_store(server).set("top", "1")
    assert server.get("top") == b"1"


def test_stores_that_cannot_be_cloned_are_refused(server, monkeypatch):
    monkeypatch.setattr(store, "_own_clone", lambda _: None)
    with pytest.raises(UsageError, match="private_store"):
        store.clone_store(dist.PrefixStore("run", server))
    with pytest.raises(UsageError, match=r"not a HashStore(.|\n)*usbyterun or torchrun"):
        store.private_store(dist.HashStore(), "eager")

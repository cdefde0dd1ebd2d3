# SPDX-License-Identifier: Apache-2.0
"""init and shutdown."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from run_support import has_ipv6
from usbyte._core import Env
from usbyte.cluster_env import detect
from usbyte.errors import EnvError, UsageError
from usbyte.torch import torch_private
from usbyte.torch.runtime import default_group
from usbyte.torch.world import world


def exits(rank, size, path):
    ub.init()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    opt = ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), overlap="forward")
    # Reading the parameter, or another tensor over its memory, would have it updated first.
    memory = (ctypes.c_float * 16).from_address(model.weight.data_ptr())
    for _ in range(6):
        opt.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
    before = torch.tensor(list(memory)).view(4, 4)
    ub.shutdown()
    assert torch.equal(model.weight, before - 1)  # the last update was pending and is applied


def test_shutdown_applies_the_last_update(tmp_path):
    run_ranks(2, exits, str(tmp_path), timeout=60)


def closes_again(rank, size):
    ub.init()
    run = world.current()
    ub.shutdown()
    run.close()


def test_what_was_shut_down_may_be_closed():
    run_ranks(2, closes_again)


def test_calls_before_init_say_so():
    assert not ub.is_initialized()
    with pytest.raises(UsageError, match="init"):
        ub.rank()
    with pytest.raises(UsageError, match="init"):
        ub.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1))


def comes_back(rank, size):
    """Ranks end and begin runs seconds apart, each of them once the first."""
    for late in range(3):
        ub.init()
        assert ub.allreduce(torch.tensor(rank + late), op=ub.Sum) == 1 + 2 * late
        time.sleep(1.5 * (rank == late % 2))
        ub.shutdown()
    assert not ub.is_initialized()


def test_init_after_shutdown_waits_for_ranks_that_are_late():
    run_ranks(2, comes_back, timeout=60)


def waits_in_vain(_rank, _size, rank):
    cluster = replace(detect(), rank=rank, size=2)
    where = f"127.0.0.1, port {cluster.master_port}"
    said = [
        f"rank 1 of 2 did not connect to {where} within 1 s",
        f"rank 1 of 2 could not connect to rank 0 at {where} within 1 s",
    ][rank]
    with pytest.raises(UsageError, match=said + ".*MASTER_PORT.*raise USBYTE_START_LIMIT_S"):
        default_group.init_default_group(cluster, Env.read(), timedelta(seconds=1000))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_nobody_meets_are_told_whom_and_where_they_have_waited_for(rank):
    run_ranks(1, waits_in_vain, rank, env={"USBYTE_START_LIMIT_S": "1"})


def meets_in_a_group_of_torch(rank, size):
    """One rank does not call init(), in a process group that the script has made."""
    dist.init_process_group("gloo")
    if rank == 0:
        with pytest.raises(UsageError, match="rank 0 of 2: rank 1 of 2 did not connect to "):
            ub.init()
    dist.barrier()


def test_a_rank_that_does_not_call_init_is_named():
    run_ranks(2, meets_in_a_group_of_torch, env={"USBYTE_START_LIMIT_S": "1"})


def ends_a_group_at_once(rank, size):
    ub.init()
    store, new_group = torch_private.default_store(), dist.new_group

    def connects_late(*args, **kwargs):
        group = new_group(*args, **kwargs)
        if rank == 1:
            time.sleep(0.3)
            store.set("tests/connected", "")
        return group

    dist.new_group = connects_late
    dist.destroy_process_group(world.current().new_group())
    return store.check(["tests/connected"])


def test_a_group_is_made_when_all_its_ranks_have_connected():
    assert run_ranks(2, ends_a_group_at_once) == [True, True]


def has_no_network(rank, size):
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "none7"
    with pytest.raises(UsageError, match=r"rank 1 of 2 cannot make network connections.*_IFNAME"):
        ub.init()


def test_a_rank_that_can_make_no_connections_ends_the_start_on_all():
    run_ranks(2, has_no_network, env={"USBYTE_START_LIMIT_S": "600"})


def counts(rank, size):
    ub.init()
    local = [ub.local_rank(), ub.local_size(), ub.cross_rank(), ub.cross_size()]
    ub.shutdown()
    return local


@pytest.mark.parametrize(
    "env",
    [{"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}, {"LOCAL_WORLD_SIZE": ""}, {"LOCAL_RANK": ""}],
    ids=["nothing", "rank", "size"],
)
def test_ranks_of_a_host_are_counted_where_the_launcher_does_not_tell(env):
    # An address that does not look as if all ranks were on this host.
    env = env | {"MASTER_ADDR": "0.0.0.0"}
    assert run_ranks(2, counts, env=env) == [[0, 2, 0, 1], [1, 2, 0, 1]]


def has_the_local_rank_of_another(rank, size):
    with pytest.raises(EnvError, match=r"ranks 0, 1 on host '.*' all have local rank 0 of 2"):
        ub.init()


def test_ranks_of_a_host_with_one_local_rank_are_refused():
    run_ranks(2, has_the_local_rank_of_another, env={"LOCAL_RANK": "0"})


def meets(rank, size):
    ub.init()
    assert ub.allreduce(torch.tensor(rank), op=ub.Sum) == 1
    ub.shutdown()


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on the loopback interface")
def test_ranks_meet_at_an_address_of_ipv6():
    run_ranks(2, meets, env={"MASTER_ADDR": "::1"})


def tells(_rank, _size, level):
    log, sys.stderr, own = logging.getLogger("usbyte"), io.StringIO(), io.StringIO()
    if level:
        log.setLevel(level)
    for text in ("first", "second"):
        ub.init()
        log.info(text)
        log.warning(text)
        ub.shutdown()
    logging.basicConfig(stream=own, format="%(message)s")
    log.info("own")
    return [sys.stderr.getvalue().split(), own.getvalue().split()]


@pytest.mark.parametrize(
    ("env", "level", "told"),
    [
        ({}, None, [["first", "second"], []]),
        ({}, "INFO", [["first", "second"], ["own"]]),
        ({"USBYTE_LOG_LEVEL": "info"}, None, [["first", "first", "second", "second"], ["own"]]),
        ({"USBYTE_LOG_LEVEL": "error"}, "INFO", [[], []]),
    ],
)
def test_the_log_tells_what_the_environment_or_else_the_script_wants(env, level, told):
    assert run_ranks(1, tells, level, env=env) == [told]

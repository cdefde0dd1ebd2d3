# SPDX-License-Identifier: Apache-2.0
"""Gradients on routes through the dimensions of a network."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _emulated import emulate
from _hosts import on_hosts
from _models import difference, train
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import FaultError, MismatchError, UsageError
from usbyte.planning.layout import tensor_specs
from usbyte.torch.comm.topology import parse, sizes_of
from usbyte.torch.compression.state import CodecState
from usbyte.torch.layout import CONTROL_TENSOR
from usbyte.torch.optimizer.gradients.plan_executor import PlanExecutor
from usbyte.torch.plan.codec_selection import CodedPlans

LEARN_FAST = {"USBYTE_LEARNING_STEPS": "2"}


def scattered(profile, network):
    """DDP's small buckets, each in three chunks of other orders."""
    usual = _core.make_plan("ddp", profile, network, {"bucket_bytes": 4096})
    topology = network.topology
    dimensions = [d for d, each in enumerate(topology.dimensions) if each.size > 1]
    ops = []
    for op in usual.ops:
        turns = [dimensions[k:] + dimensions[:k] for k in range(3)]
        collective = _core.MeshCollective("all_reduce", usual.bytes(op), turns)
        schedule = _core.simulate_mesh(topology, [collective]).schedule(collective)
        ops.append(_core.Op(op.kind, op.blocks, op.window_bytes, op.fence, route=schedule))
    return _core.Plan("scattered", profile.tensors, ops)


def routed(rank, size, sizes, mixed):
    ub.init()
    name = "sgd" if mixed else "adamw"
    expected = train("ddp", name, rank, size, steps=12, double=not mixed, mixed=mixed)
    plans = []

    def remember(_step, _model, optimizer):
        plans.append(optimizer.plan)

    for mode in ("forward", "backward") if mixed else ("forward",):
        got = train(
            mode, name, rank, size, steps=12, double=not mixed, mixed=mixed, policy=scattered,
            topology=sizes, on_step=remember,
        )  # fmt: skip
        assert difference(got, expected) <= (1e-4 if mixed else 1e-6)
    assert plans[-1].policy == "scattered"
    assert all(op.route for op in plans[-1].ops)
    ub.shutdown()
    return plans[-1].hash()


@pytest.mark.parametrize(("sizes", "mixed"), [("2x2", True), ("2x1x2", False), ("2x3", False)])
def test_training_on_routes_equals_ddp(sizes, mixed):
    ranks = math.prod(map(int, sizes.split("x")))
    assert len(set(run_ranks(ranks, routed, sizes, mixed, timeout=120, env=LEARN_FAST))) == 1


def learned(rank, size, policy, topology):
    """What the ranks find out about their mesh, and how many ops of the plan are routed."""
    on_hosts(rank, 2)
    ub.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), policy=policy,
        topology=topology, tune_steps=0 if policy == "auto" else None,
    )  # fmt: skip
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(4, 256)).sum().backward()
        optimizer.step()
    decision = optimizer.decision
    found = decision.network.topology
    routes = sum(op.route is not None for op in decision.plan.ops)
    ub.shutdown()
    return found.to_json() if found is not None else None, routes


def test_dimensions_are_measured():
    found = run_ranks(4, learned, "auto", "2x2", env=LEARN_FAST)
    assert len({text for text, _ in found}) == 1
    dimensions = _core.Topology.from_json(found[0][0]).dimensions
    assert [(d.name, d.size) for d in dimensions] == [("inside", 2), ("between", 2)]
    # What was not measured is less than a byte per second, and what takes no time is above 1e12.
    assert all(1 < d.bytes_per_s < 1e12 and d.latency_s >= 0 for d in dimensions), found[0][0]


def test_themis_takes_hosts_for_dimensions_and_environment_or_file_otherwise(tmp_path):
    sizes = {"": [2, 2], "4x1": None}
    for given, expected in sizes.items():
        env = LEARN_FAST | ({"USBYTE_TOPOLOGY": given} if given else {})
        for text, _ in run_ranks(4, learned, "themis", None, env=env):
            assert (sizes_of(_core.Topology.from_json(text)) if text else None) == expected
    # Of a network so fast that whatever the flat way was measured to cost is more.
    fast = _core.Topology([_core.Dimension("a", 2, 1e15), _core.Dimension("b", 2, 1e15)])
    path = tmp_path / "fast.json"
    path.write_text(fast.to_json())
    for text, routes in run_ranks(4, learned, "themis", str(path), env=LEARN_FAST):
        assert text == fast.to_json()
        assert routes > 0


def adapted(profile, network):
    """DDP's buckets, picked from by AdaTopK's ratios in both dimensions."""
    usual = _core.make_plan("ddp", profile, network)
    names = ["none" if t.name == CONTROL_TENSOR else "topk:0.1" for t in profile.tensors]
    coded = _core.with_codecs(usual, names)
    mesh = network.topology

    def serves(path):
        return path.sum_dimension == 1 and path.scatter != "none"

    paths = [next(filter(serves, _core.dimension_paths(op, mesh)), None) for op in coded.ops]
    return _core.along_dimensions(coded, mesh, paths)


def compressed(rank, size, topology, spec, policy="ddp", on_device=False):
    """Trains with a codec, and without.

    Returns the difference, what is coded, how much mass was lost as plans changed, by change how
    much was left to this rank of its shards and of others', and whether it was on a device.
    """
    ub.init()
    # What codecs and the flat way are measured to take depends on who else uses the cores: here the
    # one counts for nothing, and the other is slow.
    cost = _core.CodecCost(*[_core.AlphaBeta(1e-9, 1e-12)] * 2)
    CodedPlans._measure = lambda _plans, _spec: cost
    planning = importlib.import_module("usbyte.torch.plan.planner")
    planning.fit = lambda size, _rows: _core.NetworkModel(size, [_core.AlphaBeta(1e-2, 1e-7)])
    expected = train("ddp", "sgd", rank, size, steps=12)
    if on_device:
        emulate()
    plans, masses, left, places = [], [], [], []
    adopt = PlanExecutor.switch_plan

    def mass(transport):
        parts = transport._codec_state.parts
        return {n: ub.allreduce(parts[n].double(), op=ub.Sum) for n in sorted(parts)}

    def watched(transport, plan, learning):
        before = mass(transport)
        adopt(transport, plan, learning)
        after = mass(transport)
        masses.append(max((after[n] - before[n]).abs().max().item() for n in before) if before
                      else 0.0)  # fmt: skip
        if any(op.kind == "reduce_scatter" and op.codec == "none" for op in plan.ops):
            left.append(shares(transport._codec_state._buffer, plan, rank))
        places.append(transport.device.core is not None)

    PlanExecutor.switch_plan = watched
    got = train(
        "forward", "sgd", rank, size, steps=12, topology=topology,
        policy=adapted if policy == "adapted" else policy,
        on_step=lambda _step, _model, optimizer: plans.append(optimizer.plan),
        compression={"*": spec},
    )  # fmt: skip
    ub.shutdown()
    coded = {f"{op.kind} {op.dimension} {op.codec}" for op in plans[-1].ops if op.codec != "none"}
    return difference(got, expected), sorted(coded), max(masses), left, set(places) == {on_device}


def shares(memory, plan, rank):
    """The most that is remembered of this rank's shards, and of others' that it does not send."""
    if memory.numel() == 0:
        return [0.0, 0.0]
    own = torch.zeros(plan.numel, dtype=torch.bool)
    for op in plan.ops:
        if op.kind == "all_reduce" and op.dimension >= 0:
            inside = (rank // 2, rank % 2)[op.dimension]  # the coordinate in the other one of two
            for begin, end in op.blocks:
                half = -(-(end - begin) // 2)
                own[begin + inside * half : min(begin + half + inside * half, end)] = True
    most = [memory[:, part].abs() for part in (own, ~own)]
    return [part.max().item() for part in most]


@pytest.mark.parametrize(
    ("spec", "tolerance", "slow", "on_device"),
    [
        ("fp16", 1e-2, 0, False),
        ("fp16", 1e-2, 1, True),
        ("topk:0.9", 0.2, 0, True),
        ("topk:0.9", 0.2, 1, False),
    ],
)
def test_codecs_in_the_slower_dimension_only(tmp_path, spec, tolerance, slow, on_device):
    # Of dimensions so fast that the flat way costs more.
    speeds = [1e15, 1e15]
    speeds[slow] = 1e9
    dimensions = [_core.Dimension(f"d{k}", 2, speed) for k, speed in enumerate(speeds)]
    path = tmp_path / "mesh.json"
    path.write_text(_core.Topology(dimensions).to_json())
    args = (str(path), spec, "ddp", on_device)
    ranks = run_ranks(4, compressed, *args, timeout=120, env=LEARN_FAST)
    for off, coded, lost, left, placed in ranks:
        assert off <= tolerance
        assert coded == [f"all_reduce {slow} {spec}"]
        assert placed
        assert lost < 1e-6
        assert left
        assert all(others == 0 for _, others in left)
    remembered = max(own for _, _, _, left, _ in ranks for own, _ in left)
    assert (remembered > 0) == (spec != "fp16")


@pytest.mark.parametrize("on_device", [False, True])
def test_codecs_in_both_dimensions(tmp_path, on_device):
    dimensions = [_core.Dimension("inside", 2, 2e7), _core.Dimension("between", 2, 1e7)]
    path = tmp_path / "mesh.json"
    path.write_text(_core.Topology(dimensions).to_json())
    args = (str(path), "topk:0.1", "adapted", on_device)
    for off, coded, lost, _, placed in run_ranks(4, compressed, *args, timeout=120, env=LEARN_FAST):
        assert off < 0.4
        assert coded == ["all_reduce 1 topk:0.1", "reduce_scatter 0 topk:0.2"]
        assert placed
        assert lost < 1e-6


def joins(rank, size, topology):
    """Ranks that remember shards run out of data, and go on from what they remember."""
    ub.init()
    weight, produced = nn.Parameter(torch.zeros(40, 30)), torch.zeros(40, 30)
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], overlap="forward",
        topology=topology, policy=adapted, compression="topk:0.1",
    )  # fmt: skip
    data = torch.Generator().manual_seed(rank)
    for last in (5 + rank, 2):
        for _ in range(last):
            optimizer.zero_grad()
            gradient = torch.randn(weight.shape, generator=data)
            (weight * gradient).sum().backward()
            produced += gradient
            optimizer.step()
        ub.join()
        unsent = optimizer.state_dict()["usbyte_memory"]["weight"]["rows"][0].view_as(weight)
        left = ub.allreduce(unsent, op=ub.Sum)
        assert torch.allclose(left - weight.detach(), ub.allreduce(produced), atol=1e-4)
        assert left.abs().max() > 1e-2
    coded = sorted({f"{op.kind} {op.dimension}" for op in optimizer.plan.ops if op.codec != "none"})
    assert coded == ["all_reduce 1", "reduce_scatter 0"]
    optimizer.close()


def test_ranks_that_remember_shards_may_join(tmp_path):
    dimensions = [_core.Dimension("inside", 2, 2e7), _core.Dimension("between", 2, 1e7)]
    path = tmp_path / "mesh.json"
    path.write_text(_core.Topology(dimensions).to_json())
    run_ranks(4, joins, str(path), timeout=120, env=LEARN_FAST)


def test_each_op_goes_the_way_that_is_predicted_to_be_the_fastest():
    tensors = tensor_specs(
        [("a", 4_000_000, "float32"), ("b", 30, "float32"), ("c", 3_000_000, "float32")]
    )
    profile = _core.Profile(tensors, [0.0, 0.1, 0.2], [0.6, 0.5, 0.4])
    plans = CodedPlans("test", {}, "backward", False, None)
    codecs = {"a": "topk:0.01", "c": "topk:0.01"}

    def chosen(inside, between):
        dimensions = [
            _core.Dimension("inside", 4, inside),
            _core.Dimension("between", 2, between),
        ]
        network = _core.NetworkModel.ring(8, 1e-3, min(inside, between))
        flat = plans.make("ddp", profile, network, codecs)
        network = network.with_topology(_core.Topology(dimensions))
        plan = plans.make("ddp", profile, network, codecs)
        before, after = (plans.step_s(each, profile, network) for each in (flat, plan))
        timed = set(plans._own)
        assert plans.routed(plan, profile, network) == plan
        assert set(plans._own) == timed  # nothing that no op can have
        coded = {(op.kind, op.dimension, op.codec) for op in plan.ops if op.codec != "none"}
        return coded, after / before

    # So slow that coding does not count: inside, messages of 3/4 are sent, and between twice those
    # of 1/8, at half the speed.
    coded, part = chosen(2e6, 1e6)
    assert coded == {
        ("reduce_scatter", 0, "topk:0.01"),
        ("all_reduce", 1, "topk:0.015"),
        ("all_gather", 0, "topk:0.036,feedback=off"),
    }
    assert part < 0.5
    coded, part = chosen(1e12, 1e6)  # inside, messages cost more than they save
    assert {c for c in coded if c[0] != "all_gather"} == {("all_reduce", 1, "topk:0.01")}
    assert part < 0.5


def coded_everywhere(profile, network):
    """DDP's small buckets by codecs in both dimensions that lose nothing, or what casts do."""
    usual = _core.make_plan("ddp", profile, network, {"bucket_bytes": 4096})
    names = ["topk:1" if "weight" in t.name else "fp16" for t in profile.tensors]
    names = [
        "none" if t.name == CONTROL_TENSOR else n
        for t, n in zip(profile.tensors, names, strict=True)
    ]
    coded = _core.with_codecs(usual, names)
    codecs = {"topk:1": ("topk:1", "topk:1", "topk:1,feedback=off"), "fp16": ("fp16",) * 3}
    paths = [
        _core.DimensionPath(i % 2, *codecs[op.codec]) if op.codec in codecs else None
        for i, op in enumerate(coded.ops)
    ]
    return _core.along_dimensions(coded, network.topology, paths)


def trained_everywhere(rank, size, on_device):
    ub.init()
    expected = train("ddp", "sgd", rank, size, steps=12)
    if on_device:
        emulate()
    plans = []
    got = train(
        "forward", "sgd", rank, size, steps=12, topology="2x2", policy=coded_everywhere,
        on_step=lambda _step, _model, optimizer: plans.append(optimizer.plan),
    )  # fmt: skip
    ub.shutdown()
    return difference(got, expected), sorted({op.codec for op in plans[-1].ops}), plans[-1].hash()


@pytest.mark.parametrize("on_device", [False, True])
def test_training_with_codecs_in_both_dimensions_equals_ddp_closely(on_device):
    results = run_ranks(4, trained_everywhere, on_device, timeout=120)
    assert len({plan for _, _, plan in results}) == 1
    for off, codecs, _ in results:
        assert off < 1e-2  # as fp16 has it
        assert codecs == ["fp16", "none", "topk:1", "topk:1,feedback=off"]


def test_what_is_remembered_moves_to_who_sends_it():
    mesh = _core.Topology([_core.Dimension("in", 2, 1e9), _core.Dimension("out", 2, 1e9)])
    tensors = [_core.TensorSpec("a", 7, "float32", 0), _core.TensorSpec("b", 6, "float32", 7)]
    whole = _core.Plan("t", tensors, [_core.Op("all_reduce", [(0, 7), (7, 13)], codec="topk:0.5")])
    along = _core.along_dimensions(whole, mesh, [_core.DimensionPath(1, sum="topk:0.5")])
    both = _core.along_dimensions(whole, mesh, [_core.DimensionPath(1, "topk:0.5", "topk:0.5")])
    ranks = [CodecState() for _ in range(4)]
    generator = torch.Generator().manual_seed(0)
    for rank, memory in enumerate(ranks):
        if rank == 3:  # has remembered nothing yet
            continue
        memory.lay_out(whole)
        for part in memory.parts.values():
            part.copy_(torch.randn(part.shape, generator=generator))

    def total(name):
        return sum(memory.parts[name].double() for memory in ranks if name in memory.parts)

    before = {name: total(name) for name in "ab"}
    for plan in (along, both, whole, both, along):
        told = [memory.kinds_json() for memory in ranks]
        sums = []
        for memory in ranks:  # first to hear what each has
            copy = CodecState()
            copy.parts, copy.kinds = dict(memory.parts), dict(memory.kinds)
            copy.replicate(tensors, told, sums.append)
        mean = sum(sums) / 4
        for rank, memory in enumerate(ranks):
            memory.replicate(tensors, told, lambda rows, mean=mean: rows.copy_(mean))
            memory.lay_out(plan)
            memory.shard(plan, mesh, rank)
        for name in "ab":
            assert torch.allclose(total(name), before[name], atol=1e-6)
        for rank, memory in enumerate(ranks):
            kept = memory.parts["a"][0]
            others = kept[4:7] if rank % 2 == 0 else kept[:4]
            assert (others.abs().max() == 0) == (plan is along)
    state = ranks[0].state()
    other = CodecState()
    other.load(state, 0)
    assert torch.equal(other.parts["a"], ranks[0].parts["a"])
    other = CodecState()
    other.load(state, 1)  # another rank's shards
    assert not other.parts


def refused(rank, size, case):
    ub.init()
    parameter = nn.Parameter(torch.ones(3))
    topology = {"size": "3x2", "text": "two", "differs": ["2x2", "4", "2x2", "2x2"][rank]}[case]
    try:
        ub.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=0.1), [("w", parameter)], topology=topology
        )
    except (UsageError, MismatchError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ub.shutdown()


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("size", "UsageError: topology 3x2 is not one of this job's 4 ranks"),
        ("text", "UsageError: topology 'two' is neither 'hosts'"),
        ("differs", "MismatchError: optimizer.1: topology is"),
    ],
)
def test_meshes_that_are_none_are_refused_on_every_rank(case, told):
    for text in run_ranks(4, refused, case):
        assert text.startswith(told)


def foreign(rank, size, topology):
    """A plan whose routes are of another mesh."""
    ub.init()
    alone = _core.Topology([_core.Dimension("all", size, 1e9)])

    def policy(profile, network):
        return scattered(profile, network.with_topology(alone))

    model = nn.Linear(8, 8)
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), policy=policy,
        topology=topology,
    )  # fmt: skip
    try:
        for _ in range(4):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    except UsageError as error:
        return str(error)
    finally:
        ub.shutdown()


@pytest.mark.parametrize(
    ("topology", "told"),
    [("2x2", "mesh schedule: orders of 1"), (None, "the network no dimension")],
)
def test_plans_for_another_mesh_are_refused_on_every_rank(topology, told):
    for text in run_ranks(4, foreign, topology, env=LEARN_FAST):
        assert told in text


def dying(rank, size):
    ub.init()
    model = nn.Linear(512, 512)
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), policy=scattered,
        topology="2x2",
    )  # fmt: skip
    began = time.monotonic()
    try:
        for step in range(1000):
            if step == 8 and rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(4, 512)).sum().backward()
            optimizer.step()
            began = time.monotonic()
    except FaultError as error:
        return str(error), time.monotonic() - began
    finally:
        ub.shutdown()


def test_a_lost_peer_is_a_fault_on_every_rank():
    env = LEARN_FAST | {"USBYTE_STALL_LIMIT_S": "20"}
    for told, seconds in run_ranks(4, dying, timeout=60, env=env, dies=[3])[:3]:
        assert "rank 3" in told
        assert seconds < 30


def test_what_a_topology_may_be_given_as(tmp_path):
    topology = _core.Topology([_core.Dimension("a", 2, 1e9), _core.Dimension("b", 3, 2e9)])
    path = tmp_path / "t.json"
    path.write_text(topology.to_json())
    assert parse("hosts", 6) == "hosts"
    assert parse("2x3", 6) == parse([2, 3], 6) == [2, 3]
    assert parse(topology, 6) == parse(str(path), 6) == topology
    path.write_text(json.dumps({"format": "else"}))
    with pytest.raises(UsageError, match=r"t\.json"):
        parse(str(path), 6)
    assert parse(np.array([2, 3]), 6) == [2, 3]
    for wrong in (6, [2.0, 3], ["2", "3"]):
        with pytest.raises(UsageError, match="topology must be sizes such as"):
            parse(wrong, 6)
    for wrong in ("2x2", [], [6, 0]):
        with pytest.raises(UsageError, match="not one of this job's 6 ranks"):
            parse(wrong, 6)

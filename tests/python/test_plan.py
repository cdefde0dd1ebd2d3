# SPDX-License-Identifier: Apache-2.0
"""Plans against a brute-force reading of the rule that they tile the flat buffer."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from usbyte import _core
from usbyte.errors import PlanError, UsageError
from usbyte.torch.optimizer.gradients.plan_executor import co_arriving

KINDS = ["all_reduce", "reduce_scatter", "all_gather"]


@st.composite
def lines(draw):
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dtypes = draw(st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=len(sizes),
                           max_size=len(sizes)))  # fmt: skip
    specs, offset = [], 0
    for i, (numel, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        specs.append(_core.TensorSpec(f"t{i}", numel, dtype, offset))
        offset += numel
    return specs


@st.composite
def tilings(draw, specs):
    """Ops that cover the flat buffer, before anything is broken."""
    edges = [0]
    for spec in specs:
        cuts = draw(st.sets(st.integers(spec.offset + 1, spec.end), max_size=3))
        change = spec is specs[-1] or specs[specs.index(spec) + 1].dtype != spec.dtype
        edges += sorted(cuts | ({spec.end} if change else set()))
    ops = []
    for begin, end in itertools.pairwise(edges):
        if draw(st.booleans()):
            ops.append(("all_reduce", [(begin, end)]))
        else:
            ops += [("reduce_scatter", [(begin, end)]), ("all_gather", [(begin, end)])]
    return ops


def is_valid(specs, ops):
    dtype_of = [spec.dtype for spec in specs for _ in range(spec.numel)]
    reduced = [0] * len(dtype_of)
    waiting: set[tuple[int, int]] = set()
    for kind, blocks in ops:
        for begin, end in blocks:
            if not 0 <= begin < end <= len(dtype_of) or len(set(dtype_of[begin:end])) > 1:
                return False
            if kind == "all_gather":
                if (begin, end) not in waiting:
                    return False
                waiting.remove((begin, end))
                continue
            if kind == "reduce_scatter":
                waiting.add((begin, end))
            for element in range(begin, end):
                reduced[element] += 1
    return not waiting and set(reduced) == {1}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_plan_is_accepted_exactly_if_it_tiles(data):
    specs = data.draw(lines())
    ops = data.draw(tilings(specs))
    total = specs[-1].end
    if ops and data.draw(st.booleans()):  # break it, or perhaps only reorder it
        where = data.draw(st.integers(0, len(ops) - 1))
        how = data.draw(st.sampled_from(["drop", "repeat", "swap", "shift", "kind"]))
        kind, [(begin, end)] = ops[where]
        if how == "drop":
            del ops[where]
        elif how == "repeat":
            ops.append(ops[where])
        elif how == "swap":
            ops.append(ops.pop(where))
        elif how == "shift":
            by = data.draw(st.integers(-1, 1))
            ops[where] = (kind, [(begin + by, min(end + by, total))])
        else:
            ops[where] = (data.draw(st.sampled_from(KINDS)), [(begin, end)])

    def build():
        return _core.Plan("test", specs, [_core.Op(kind, blocks, 64) for kind, blocks in ops])

    if is_valid(specs, ops):
        plan = build()
        again = _core.Plan.from_json(plan.to_json())
        assert again == plan
        assert again.hash() == plan.hash()
    else:
        with pytest.raises(PlanError):
            build()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20
    ),
    st.sampled_from(_core.policies()),
    st.integers(1, 2000),
    st.integers(1, 4000),
)
def test_every_policy_makes_a_valid_plan(rows, policy, partition, credit):
    offset, specs = 0, []
    for i, (numel, _, _) in enumerate(rows):
        specs.append(_core.TensorSpec(f"t{i}", numel, "float32", offset))
        offset += numel
    profile = _core.Profile(specs, [need for _, need, _ in rows], [ready for _, _, ready in rows])
    network = _core.NetworkModel(4, [_core.AlphaBeta(1e-3, 1e-6)])
    options = {"partition_bytes": partition, "credit_bytes": credit, "bucket_bytes": partition}
    plan = _core.make_plan(policy, profile, network, options)
    ops = [(op.kind, op.blocks) for op in plan.ops]
    assert is_valid(specs, ops)
    if policy == "bytescheduler":
        limit = max(partition // 4, 1)
        assert all(end - begin <= limit for _, [(begin, end)] in ops)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_arrives_together_is_what_no_other_operation_brings(data):
    specs = data.draw(lines())
    dtype_of = [spec.dtype for spec in specs for _ in range(spec.numel)]
    ops: list[tuple[str, list[tuple[int, int]]]] = []
    for kind, blocks in data.draw(tilings(specs)):
        alike = ops and ops[-1][0] == kind == "all_reduce"
        alike = alike and dtype_of[ops[-1][1][0][0]] == dtype_of[blocks[0][0]]
        if alike and data.draw(st.booleans()):
            ops[-1][1].extend(blocks)
        else:
            ops.append((kind, list(blocks)))
    plan = _core.Plan("test", specs, [_core.Op(kind, blocks, 64) for kind, blocks in ops])
    slot = data.draw(st.permutations(range(len(specs))))
    bringing = [
        {
            k
            for k, op in enumerate(plan.ops)
            if op.kind != "reduce_scatter"
            and any(begin < specs[t].end and specs[t].offset < end for begin, end in op.blocks)
        }
        for t in slot
    ]
    everything = range(len(slot))
    assert co_arriving(plan, slot) == [
        [j for j in everything if bringing[j] <= bringing[i]] for i in everything
    ]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 50), st.integers(0, 60), st.integers(1, 9))
def test_shards_are_ranges_of_equal_length_but_the_last(begin, numel, size):
    end = begin + numel
    shards = [_core.shard((begin, end), rank, size) for rank in range(size)]
    elements = [e for low, high in shards for e in range(low, high)]
    assert elements == list(range(begin, end))
    lengths = [high - low for low, high in shards]
    longest = -(-numel // size)
    filled = numel // longest if longest else 0
    assert lengths[:filled] == [longest] * filled
    assert sum(lengths[filled + 1 :]) == 0


def test_json_of_another_format_is_refused():
    with pytest.raises(PlanError, match="malformed"):
        _core.Plan.from_json("{")
    with pytest.raises(PlanError, match="unknown format"):
        _core.Plan.from_json(json.dumps({"format": "other"}))


def test_misspelt_names_list_what_is_known():
    with pytest.raises(UsageError, match="bytescheduler"):
        _core.make_plan(
            "bytescheduller",
            _core.Profile([_core.TensorSpec("a", 1)], [0.0], [0.0]),
            _core.NetworkModel(1, [_core.AlphaBeta()]),
        )
    with pytest.raises(UsageError, match="float32"):
        _core.TensorSpec("a", 1, "float31")

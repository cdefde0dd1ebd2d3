# SPDX-License-Identifier: Apache-2.0
"""Networks of several dimensions from Python: topologies, routes, and jobs on them."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.planning import topologies


def topology(*rows):
    return _core.Topology(
        [
            _core.Dimension(f"d{i}", size, speed, kind="fully_connected")
            for i, (size, speed) in enumerate(rows)
        ]
    )


def fixed(mesh, _kind, _size):
    return _core.fixed_routes(mesh, 1)


def job(*steps, model_ranks=1, scale=1.0):
    return topologies.Workload("job", "", (), model_ranks, scale, steps)


@pytest.mark.parametrize("name", topologies.MESHES)
def test_published_networks(name):
    mesh = topologies.load_mesh(name)
    assert mesh.ranks == 1024
    assert _core.Topology.from_json(mesh.to_json()) == mesh
    assert mesh.rank(mesh.coordinates(777)) == 777
    choice = _core.chosen_routes(mesh, "all_reduce", 1e9, 64)
    assert choice.ideal_s <= choice.seconds <= choice.fixed_s
    choice.schedule.validate(mesh)
    assert _core.MeshSchedule.from_json(choice.schedule.to_json()) == choice.schedule
    assert sorted(choice.schedule.routes[0]) == list(range(len(mesh.dimensions)))


def test_errors_name_the_culprit():
    with pytest.raises(UsageError, match="'d0': size is 0"):
        topology((0, 1.0))
    with pytest.raises(UsageError, match="unknown kind of dimension 'torus'"):
        _core.Dimension("a", 2, 1.0, kind="torus")
    with pytest.raises(UsageError, match="unknown queue 'lifo'"):
        _core.simulate_mesh(topology((2, 1.0)), [], "lifo")
    with pytest.raises(UsageError, match="twice"):
        _core.themis_routes(topology((2, 1.0)), "all_reduce", 1, 1, "twice")
    for source in ("5d", "no\0path", "."):
        with pytest.raises(UsageError, match="cannot read"):
            topologies.load_mesh(source)


def test_ranks_of_a_collective():
    mesh = topology((16, 1.0), (64, 1.0))
    assert topologies.group_sizes(mesh, "all", 128) == [16, 64]
    assert topologies.group_sizes(mesh, "model", 128) == [16, 8]
    assert topologies.group_sizes(mesh, "data", 128) == [1, 8]
    assert topologies.group_sizes(mesh, "model", 1) == [1, 1]
    assert topologies.group_sizes(mesh, "model", 4) == [4, 1]
    for ranks in (3, 24, 2048):
        with pytest.raises(UsageError, match="form no smaller mesh"):
            topologies.group_sizes(mesh, "model", ranks)


def test_steps_by_hand():
    mesh = topology((2, 10.0))  # an all_reduce of 10 bytes takes 1 s
    gradients = topologies.Start("gradients", "all_reduce", 10)
    one = job(topologies.Step(compute_s=2, start=gradients), topologies.Step(compute_s=0.5))
    assert topologies.step_s(one, mesh, fixed) == pytest.approx(3)
    assert topologies.step_s(one.scaled(4), mesh, fixed) == pytest.approx(10)  # hidden
    blocking = topologies.Start("first", "all_reduce", 10, blocking=True)
    two = job(
        topologies.Step(compute_s=2, start=blocking),
        topologies.Step(compute_s=0.5, start=gradients),
    )
    assert topologies.step_s(two, mesh, fixed) == pytest.approx(4.5)
    waits = job(
        topologies.Step(start=gradients), topologies.Step(compute_s=0.5),
        topologies.Step(wait="gradients", compute_s=1),
    )  # fmt: skip
    assert topologies.step_s(waits, mesh, fixed) == pytest.approx(2)
    assert topologies.step_s(job(topologies.Step(compute_s=3)), mesh, fixed) == pytest.approx(3)
    # A wait is not for what was started before it.
    other = topologies.Start("other", "all_reduce", 10)
    both = job(
        topologies.Step(start=gradients),
        topologies.Step(start=other),
        topologies.Step(wait="other"),
    )
    assert topologies.step_s(both, mesh, fixed) == pytest.approx(2)
    at_once = job(topologies.Step(start=gradients), topologies.Step(wait="gradients"))
    assert topologies.step_s(at_once, mesh, fixed) == pytest.approx(1)
    for each in (one, two, waits):  # one dimension is used as well as can be
        assert topologies.ideal_step_s(each, mesh) == pytest.approx(
            topologies.step_s(each, mesh, fixed)
        )


def test_an_ideal_step_of_more_ranks_than_there_are_numbers_for():
    """All, those of a model and those of its parts: multiplied, 10^10 ranks."""
    mesh = topology((10, 400.0), (100, 100.0), (100, 50.0))
    assert mesh.ranks == 100_000
    starts = (
        topologies.Start("all", "all_reduce", 550e3, blocking=True),
        topologies.Start("model", "all_gather", 500e3, "model", blocking=True),
        topologies.Start("data", "reduce_scatter", 50e3, "data"),
    )
    steps = job(*(topologies.Step(compute_s=1, start=start) for start in starts), model_ranks=1000)
    # The model is the two inner dimensions, its parts are the outer one.
    parts = 2 * 1e3 * (1 - 1e-5), 1e3 * (1 - 1e-3), 1e3 * (1 - 1e-2)
    assert topologies.ideal_step_s(steps, mesh) == pytest.approx(3 + sum(parts))
    assert topologies.ideal_step_s(steps, mesh) <= topologies.step_s(steps, mesh, fixed)
    alone = job(topologies.Step(start=starts[1]), model_ranks=1)  # one rank sends nothing
    assert topologies.ideal_step_s(alone, mesh) == 0


def test_an_ideal_step_is_no_bound_where_collectives_overtake():
    mesh = topology((2, 10.0))
    large = topologies.Start("large", "all_reduce", 100)  # 10 s, in chunks of 1 s
    small = topologies.Start("small", "all_reduce", 1, blocking=True)  # 0.1 s
    both = job(
        topologies.Step(start=large), topologies.Step(start=small), topologies.Step(compute_s=9)
    )

    def in_chunks(mesh, _kind, size):
        return _core.fixed_routes(mesh, 10 if size == 100 else 1)

    assert topologies.ideal_step_s(both, mesh) == pytest.approx(10.1 + 9)
    assert topologies.step_s(both, mesh, in_chunks, "fifo") == pytest.approx(10.1 + 9)
    # The small one goes between the first two halves of a chunk of the large one.
    assert topologies.step_s(both, mesh, in_chunks, "scf") == pytest.approx(0.6 + 9.5)


def test_an_all_to_all_is_passed_on_around_a_ring():
    exchange = job(topologies.Step(start=topologies.Start("x", "all_to_all", 80)))
    for kind, seconds in (("ring", 12), ("fully_connected", 6)):
        mesh = _core.Topology([_core.Dimension("d", 4, 10.0, kind=kind)])
        assert mesh.dimensions[0].exchanged_bytes(80) == 10 * seconds
        assert topologies.step_s(exchange, mesh, fixed) == pytest.approx(seconds)
        assert topologies.ideal_step_s(exchange, mesh) == pytest.approx(6)


@pytest.mark.parametrize("name", topologies.WORKLOADS)
def test_published_jobs(name):
    training = topologies.load_workload(name)
    assert training.source
    assert training.assumptions
    for network in topologies.MESHES:
        mesh = topologies.load_mesh(network)
        taken = topologies.step_s(training, mesh, fixed, startups_overlap=True)
        assert training.compute_s < topologies.ideal_step_s(training, mesh) <= taken


EMPTY = {
    "format": "usbyte-mesh-workload-1", "name": "job", "source": "", "assumptions": [],
    "model_ranks": 1, "compute_scale": 1, "steps": [],
}  # fmt: skip
SENDS = {"name": "x", "kind": "all_reduce", "bytes": 1}
ABSURD = ["1e400", "-1e400", "NaN", "Infinity", "1" + 400 * "0", 5000 * "1", "-1", "1.5", "true"]
ABSURD += ["null", '"1"', "[]", "{}", 900 * "[" + 900 * "]", 10**5 * "[", '{"a": ' * 10**5]


def load(tmp_path, text):
    path = tmp_path / "job.json"
    path.write_text(text, encoding="utf-8")
    return topologies.load_workload(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, 'format is "other", and must be one of usbyte-mesh-workload-1'),
        ({"format": 3}, "format is 3"),
        ({"name": None}, "name is null, and must be a string"),
        ({"assumptions": "none"}, 'assumptions is "none", and must be a list of strings'),
        ({"steps": [{"wait": "x"}]}, r"steps\[0\].wait is for 'x', which has not been started"),
        ({"steps": [{"start": SENDS | {"name": "y"}}, {"wait": "x"}]}, r"steps\[1\].wait is for"),
        ({"steps": [{"start": SENDS}, {"start": SENDS}]}, r"steps\[1\].start.name: 'x' starts"),
        ({"steps": [{"compute_s": -1}]}, r"steps\[0\].compute_s is -1"),
        ({"steps": [{"compute": 1}]}, r"steps\[0\].compute is no known field"),
        ({"steps": [{"start": SENDS | {"kind": "gossip"}}]}, r'steps\[0\].start.kind is "gossip"'),
        (
            {"steps": [{"start": SENDS | {"kind": ["all_reduce"]}}]},
            r"steps\[0\].start.kind is a list",
        ),
        ({"steps": [{"start": SENDS | {"ranks": "some"}}]}, r'steps\[0\].start.ranks is "some"'),
        ({"steps": [{"start": SENDS | {"bytes": -1}}]}, r"steps\[0\].start.bytes is -1"),
        (
            {"steps": [{"start": SENDS | {"bytes": 10**400}}]},
            r"steps\[0\].start.bytes is 10+\.\.\., and must",
        ),
        ({"steps": [{"start": SENDS | {"size": 1}}]}, r"steps\[0\].start.size is no known field"),
        ({"steps": [{"start": SENDS | {"blocking": "no"}}]}, r'steps\[0\].start.blocking is "no"'),
        (
            {"steps": [{"start": {"name": "x", "kind": "all_reduce"}}]},
            r"steps\[0\].start.bytes is missing",
        ),
        ({"steps": [{"start": [SENDS]}]}, r"steps\[0\].start is a list, and must be an object"),
        ({"steps": [SENDS, 3]}, r"steps\[1\] is 3, and must be an object"),
        ({"steps": 3}, "steps is 3, and must be a list"),
        ({"model_ranks": 0}, "model_ranks is 0"),
        ({"model_ranks": 2.0}, "model_ranks is 2.0"),
        ({"model_ranks": 10**400}, "model_ranks is 10+"),
        ({"model_ranks": float("inf")}, "not JSON"),
        ({"compute_scale": float("nan")}, "not JSON"),
        ({"compute_scale": "1"}, 'compute_scale is "1"'),
        ({"compute_scale": True}, "compute_scale is true"),
        ({"speed": 1}, "speed is no known field"),
    ],
)
def test_jobs_that_make_no_sense(tmp_path, change, message):
    assert load(tmp_path, json.dumps(EMPTY)).compute_s == 0
    with pytest.raises(UsageError, match=f"job.json'.* {message}"):
        load(tmp_path, json.dumps(EMPTY | change))


def attempt(run, *args):
    """What it returns, or None; and what its error says."""
    try:
        return run(*args), ""
    except UsageError as error:
        return None, str(error)


@pytest.mark.parametrize("field", ["model_ranks", "compute_scale", "steps", "compute_s", "bytes"])
@pytest.mark.parametrize("value", ABSURD, ids=lambda value: value[:8])
def test_absurd_values_of_any_field(tmp_path, field, value):
    """The error names the file and, if it is JSON at all, the field."""
    text = json.dumps(EMPTY | {"steps": [{"compute_s": 1, "start": SENDS}]})
    steps = json.dumps([{"compute_s": 1, "start": SENDS}])
    old = steps if field == "steps" else "1"
    assert f'"{field}": {old}' in text
    taken, said = attempt(load, tmp_path, text.replace(f'"{field}": {old}', f'"{field}": {value}'))
    if said:
        named = f"job.json': {field} is ", f".{field} is ", f"job.json': {field}[0] is "
        assert any(name in said for name in (*named, "job.json' is not JSON"))
        assert len(said) < 1000
    else:
        makes_sense = {"steps": "[]", "compute_s": "1.5 null", "bytes": "1.5", "model_ranks": ""}
        assert value in makes_sense.get(field, "1.5").split()
        assert math.isfinite(topologies.step_s(taken, topology((2, 10.0)), fixed))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_files_are_jobs_or_errors(tmp_path_factory, data):
    """Of published files, some characters of which are others."""
    folder = tmp_path_factory.mktemp("changed", numbered=True)
    kind = data.draw(st.sampled_from(["meshes", "workloads"]))
    names = topologies.MESHES if kind == "meshes" else topologies.WORKLOADS
    text = list(topologies._read(kind, names, data.draw(st.sampled_from(names))))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place] = data.draw(st.sampled_from([*'{}[],:"0123456789.-+eEtrufalsn\\ é', "", "999"]))
    path = folder / "changed.json"
    path.write_text("".join(text), encoding="utf-8")
    load_it = topologies.load_mesh if kind == "meshes" else topologies.load_workload
    taken, said = attempt(load_it, str(path))
    assert (
        ("changed.json'" in said) if taken is None else (kind == "meshes" or taken.compute_s < 1e40)
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)
FIELDS = ["name", "kind", "bytes", "ranks", "blocking", "wait", "compute_s", "start", "steps"]


@settings(max_examples=300, deadline=None)
@example(change={"steps": [{"start": {"name": ["x"], "kind": "all_reduce", "bytes": 1}}]})
@example(change={"steps": [{"start": {**SENDS, "bytes": 1e18}, "compute_s": 1e18}]})
@given(
    change=st.dictionaries(st.sampled_from(sorted(EMPTY)), VALUES)
    | st.fixed_dictionaries(
        {"steps": st.lists(st.dictionaries(st.sampled_from(FIELDS), VALUES), max_size=3)}
    )
)
def test_values_of_any_type_are_jobs_or_errors(tmp_path_factory, change):
    folder = tmp_path_factory.mktemp("values", numbered=True)
    taken, said = attempt(load, folder, json.dumps(EMPTY | change))
    if taken is None:
        assert "job.json'" in said
        return
    for seconds in (topologies.step_s, topologies.ideal_step_s):
        args = (fixed,) if seconds is topologies.step_s else ()
        taken_s, said = attempt(seconds, taken, topology((2, 10.0)), *args)
        assert "form no smaller mesh" in said if taken_s is None else math.isfinite(taken_s)


@pytest.mark.parametrize("text", ["{é", '{"name": é}', "é"])
@pytest.mark.parametrize("of", ["Topology", "MeshSchedule", "Plan", "Profile", "NetworkModel"])
def test_errors_that_quote_a_cut_character_are_ours(of, text):
    with pytest.raises(_core.Error, match="malformed JSON"):
        getattr(_core, of).from_json(text)

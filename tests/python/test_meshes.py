"""Networks of several dimensions from Python: topologies, routes, and jobs on them."""

from __future__ import annotations

import json

import pytest

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.lab import meshes


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
    return meshes.Workload("job", "", (), model_ranks, scale, steps)


@pytest.mark.parametrize("name", meshes.MESHES)
def test_published_networks(name):
    mesh = meshes.load_mesh(name)
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
    with pytest.raises(UsageError, match="cannot read"):
        meshes.load_mesh("5d")


def test_ranks_of_a_collective():
    mesh = topology((16, 1.0), (64, 1.0))
    assert meshes.group_sizes(mesh, "all", 128) == [16, 64]
    assert meshes.group_sizes(mesh, "model", 128) == [16, 8]
    assert meshes.group_sizes(mesh, "data", 128) == [1, 8]
    assert meshes.group_sizes(mesh, "model", 1) == [1, 1]
    assert meshes.group_sizes(mesh, "model", 4) == [4, 1]
    for ranks in (3, 24, 2048):
        with pytest.raises(UsageError, match="form no smaller mesh"):
            meshes.group_sizes(mesh, "model", ranks)


def test_steps_by_hand():
    mesh = topology((2, 10.0))  # an all_reduce of 10 bytes takes 1 s
    gradients = meshes.Start("gradients", "all_reduce", 10)
    one = job(meshes.Step(compute_s=2, start=gradients), meshes.Step(compute_s=0.5))
    assert meshes.step_s(one, mesh, fixed) == pytest.approx(3)
    assert meshes.step_s(one.scaled(4), mesh, fixed) == pytest.approx(10)  # hidden
    blocking = meshes.Start("first", "all_reduce", 10, blocking=True)
    two = job(meshes.Step(compute_s=2, start=blocking), meshes.Step(compute_s=0.5, start=gradients))
    assert meshes.step_s(two, mesh, fixed) == pytest.approx(4.5)
    waits = job(
        meshes.Step(start=gradients), meshes.Step(compute_s=0.5),
        meshes.Step(wait="gradients", compute_s=1),
    )  # fmt: skip
    assert meshes.step_s(waits, mesh, fixed) == pytest.approx(2)
    assert meshes.step_s(job(meshes.Step(compute_s=3)), mesh, fixed) == pytest.approx(3)
    # A wait is not for what was started before it.
    other = meshes.Start("other", "all_reduce", 10)
    both = job(meshes.Step(start=gradients), meshes.Step(start=other), meshes.Step(wait="other"))
    assert meshes.step_s(both, mesh, fixed) == pytest.approx(2)
    at_once = job(meshes.Step(start=gradients), meshes.Step(wait="gradients"))
    assert meshes.step_s(at_once, mesh, fixed) == pytest.approx(1)
    for each in (one, two, waits):  # one dimension is used as well as can be
        assert meshes.ideal_step_s(each, mesh) == pytest.approx(meshes.step_s(each, mesh, fixed))


@pytest.mark.parametrize("name", meshes.WORKLOADS)
def test_published_jobs(name):
    training = meshes.load_workload(name)
    assert training.source
    assert training.assumptions
    for network in meshes.MESHES:
        mesh = meshes.load_mesh(network)
        taken = meshes.step_s(training, mesh, fixed, startups_overlap=True)
        assert training.compute_s < meshes.ideal_step_s(training, mesh) <= taken


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format is 'other'"),
        ({"steps": [{"wait": "x"}]}, "has not been started"),
        ({"steps": [{"compute_s": -1}]}, "compute_s is -1"),
        ({"steps": [{"start": {"name": "x", "kind": "gossip", "bytes": 1}}]}, "'gossip'"),
        ({"steps": [{"start": {"name": "x", "kind": "all_reduce", "bytes": -1}}]}, "x is -1"),
        ({"steps": [{"start": {"name": "x", "kind": "all_reduce", "size": 1}}]}, "size"),
        ({"steps": 3}, "not a job"),
        ({"model_ranks": 0}, "model_ranks are 0"),
        ({"compute_scale": float("inf")}, "compute_scale"),
    ],
)
def test_jobs_that_make_no_sense(tmp_path, change, message):
    path = tmp_path / "job.json"
    root = {
        "format": "usbyte-mesh-workload-1", "name": "job", "source": "", "assumptions": [],
        "model_ranks": 1, "compute_scale": 1, "steps": [],
    }  # fmt: skip
    path.write_text(json.dumps(root))
    assert meshes.load_workload(str(path)).compute_s == 0
    path.write_text(json.dumps(root | change))
    with pytest.raises(UsageError, match=message):
        meshes.load_workload(str(path))

# SPDX-License-Identifier: Apache-2.0
"""Whether NCCL is used, and which: with libraries that look like it, on emulated devices."""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

import usbyte.torch as ub
from _emulated import EmulatedDevice, emulate
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import FaultError, MismatchError, UsageError
from usbyte.torch.comm import factory
from usbyte.torch.comm.factory import ConnectionFacts, Connector, connect
from usbyte.torch.comm.hierarchical import MeshCommunicator
from usbyte.torch.comm.host_staged import HostStagedCommunicator
from usbyte.torch.comm.nccl import NcclCommunicator, NcclOffer, _problem, wheels
from usbyte.torch.runtime.device import Device
from usbyte.torch.world.world import current

SOURCE = Path(__file__).parents[1] / "cpp" / "fake_libnccl.c"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Paths of libraries by the version that they tell."""
    made = {}
    for version in (22809, 23001):
        path = tmp_path_factory.mktemp(str(version)) / "libnccl.so.2"
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-shared", "-fPIC", f"-DFAKE_NCCL_VERSION={version}", str(SOURCE)]
        subprocess.run([*command, "-o", str(path)], check=True)
        made[version] = str(path)
    return made


def chosen(rank, size, library, gpus, variables):
    """What is chosen where ranks have these libraries, GPUs and variables."""
    os.environ |= {"USBYTE_NCCL_LIB": library[rank]} | variables[rank]
    ub.init()
    device = emulate()
    device.identity = lambda: gpus[rank]
    context = current()
    connector = Connector(context, device)
    facts = context.eager.allgather_json("facts", asdict(connector.facts), ConnectionFacts)
    try:
        connector.verify("test", facts)
    except (UsageError, MismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return connector.nccl.version if connector.nccl is not None else "staged"


@pytest.mark.parametrize(
    ("offers", "why"),
    [
        ([("2.28.9", "h", "a", False), ("2.28.9", "h", "b", False)], ""),
        ([("2.28.9", "h", "a", False), ("2.28.9", "i", "a", False)], ""),
        ([("2.28.9", "h", "a", False), ("2.28.9", "h", "a", False)], "ranks 0 and 1 share a GPU"),
        ([("2.30.1", "h", "a", True), ("2.30.1", "h", "a", True)], ""),
        ([("2.30.1", "h", "a", True), ("2.30.1", "h", "a", False)], "ranks 0 and 1 share a GPU"),
        (
            [("2.28.9", "h", "a", False), ("2.30.1", "h", "b", False)],
            "2.28.9 on rank 0 but 2.30.1 on rank 1",
        ),
        (
            [("2.28.9", "h", "a", False), ("", "h", "b", False)],
            "rank 1 cannot use it: no such file",
        ),
    ],
)
def test_what_keeps_ranks_from_nccl(offers, why):
    problem = _problem([NcclOffer(v, "" if v else "no such file", *rest) for v, *rest in offers])
    assert why in problem
    assert bool(why) == bool(problem)


def test_a_gpu_for_each_rank_is_taken(libraries):
    # Two that are one GPU are two for NCCL if hosts are said to be.
    hosts = [{"NCCL_HOSTID": "x"}, {"NCCL_HOSTID": "y"}]
    assert run_ranks(2, chosen, [libraries[22809]] * 2, ["a", "a"], hosts) == ["2.28.9"] * 2


def test_a_shared_gpu_is_where_nccl_allows_it(libraries):
    allowed = [{"NCCL_MULTI_RANK_GPU_ENABLE": "1"}] * 2
    assert run_ranks(2, chosen, [libraries[23001]] * 2, ["a", "a"], allowed) == ["2.30.1"] * 2
    assert run_ranks(2, chosen, [libraries[22809]] * 2, ["a", "a"], allowed) == ["staged"] * 2


def test_every_rank_tells_why_nccl_cannot_be_used_though_it_must(libraries, tmp_path):
    must = [{"USBYTE_BACKEND": "nccl"}] * 2
    library = [libraries[22809], str(tmp_path / "none")]
    for told in run_ranks(2, chosen, library, ["a", "b"], must):
        assert told.startswith("UsageError: USBYTE_BACKEND=nccl, but rank 1 cannot use it")


def test_settings_must_be_the_same_on_all_ranks(libraries):
    variables = [{}, {"USBYTE_NCCL_MAX_CTAS": "4"}]
    args = [libraries[22809]] * 2, ["a", "b"], variables
    for told in run_ranks(2, chosen, *args):
        assert told.startswith("MismatchError")
        assert "USBYTE_NCCL_MAX_CTAS is 0 on rank 0 but 4 on rank 1" in told


def makes(rank, size, library, other):
    """What `connect` gives, or raises, for a device."""
    os.environ["USBYTE_NCCL_LIB"] = library
    ub.init()
    device = emulate()
    staged = connect(current(), device)
    assert isinstance(staged, HostStagedCommunicator)
    staged.close()
    device.identity = lambda: str(rank)
    with pytest.raises(FaultError, match=r"while connecting 2 ranks|CUDA's driver"):
        connect(current(), device)  # there is neither NCCL nor a GPU
    nccl = _core.load_nccl(library)
    assert len(nccl.unique_id()) == 128
    with pytest.raises(UsageError, match="5 bytes"):
        _core.NcclCommunicator(nccl, device.core, 0, 1, [b"short"])
    with pytest.raises(UsageError, match="which cannot become"):
        _core.load_nccl(other)


def test_communicators_are_made_as_was_agreed(libraries):
    run_ranks(2, makes, libraries[22809], libraries[23001])


def refuses_the_host(rank, size):
    ub.init()
    with pytest.raises(UsageError, match=r"model\.cuda\(\)"):
        connect(current(), Device())


def differs(rank, size):
    os.environ["USBYTE_CHUNK_BYTES"] = str((rank + 1) << 20)
    ub.init()
    with pytest.raises(MismatchError, match="USBYTE_CHUNK_BYTES is 1048576 on rank 0 but 2"):
        connect(current(), EmulatedDevice())


def test_nccl_does_not_move_the_hosts_tensors():
    run_ranks(2, refuses_the_host, env={"USBYTE_BACKEND": "nccl"})


def test_ranks_must_cut_alike():
    run_ranks(2, differs)


def test_wheels_are_paths_that_exist():
    assert all(Path(path).exists() for path in wheels())


class Made:
    """In place of what would connect GPUs: remembers what it was made with."""

    def __init__(self, *args, **options):
        self.args, self.options = args, options

    def close(self):
        self.args = None


def test_what_waits_for_other_ranks_does_so_up_to_the_stall_limit(monkeypatch):
    monkeypatch.setattr(_core, "NcclCommunicator", Made)
    env = SimpleNamespace(stall_limit_s=7.0, nccl_max_ctas=0, nccl_register=0)
    options = NcclCommunicator(env, None, 0, 2, [], EmulatedDevice()).core.options
    assert options["init_timeout_s"] == options["launch_timeout_s"] == 7.0


def makes_lines(rank, size, library):
    """Ranks, sizes and ids of the communicators of a mesh."""
    os.environ["USBYTE_NCCL_LIB"] = library
    ub.init()
    device = emulate()
    device.identity = lambda: str(rank)
    context = current()
    nccl = SimpleNamespace(unique_id=lambda: os.urandom(128))
    offer = NcclOffer("2.28.9", "", "host", str(rank), False)
    factory.offer_nccl = lambda env, device, dimensions: (nccl if dimensions else None, offer)
    _core.NcclCommunicator = _core.StreamMeshCommunicator = Made
    mesh = connect(context, device, "3x1x2")
    assert isinstance(mesh, MeshCommunicator)
    assert not mesh.is_measured
    topology, cuda, flat, groups, slots = mesh.core.args
    assert [d.size for d in topology.dimensions] == [3, 1, 2]
    assert cuda is device.core
    assert slots == 2
    assert mesh.allocate(8).device.type == "cpu"
    made = [core and [*core.args[2:4], [i.hex() for i in core.args[4]]] for core in [flat, *groups]]
    mesh.close()
    assert flat.args is None
    assert [group and group.args for group in groups] == [None] * 3
    return made


def test_a_mesh_has_a_communicator_for_each_line(libraries):
    made = run_ranks(6, makes_lines, libraries[22809])
    assert [(rank, size) for (rank, size, _), *_ in made] == [(r, 6) for r in range(6)]
    assert [groups[1][:2] for groups in made] == [[r % 3, 3] for r in range(6)]
    assert [groups[2] for groups in made] == [None] * 6
    assert [groups[3][:2] for groups in made] == [[r // 3, 2] for r in range(6)]
    ids = [[tuple(group[2]) for group in groups if group is not None] for groups in made]
    assert all(len(set(its)) == 2 for of_rank in ids for its in of_rank)
    flat, inner, outer = zip(*ids, strict=True)
    assert len(set(flat)) == 1
    assert [inner.index(its) for its in inner] == [0, 0, 0, 3, 3, 3]
    assert [outer.index(its) for its in outer] == [0, 1, 2, 0, 1, 2]
    assert len({*flat, *inner, *outer}) == 1 + 2 + 3

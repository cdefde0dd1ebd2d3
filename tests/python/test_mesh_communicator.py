# SPDX-License-Identifier: Apache-2.0
"""The mesh communicator from Python: over threads, and over communicators written in Python."""

from __future__ import annotations

import array
import ctypes
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import pytest

from usbyte import _core
from usbyte.errors import FaultError, UsageError


def topology(*sizes):
    return _core.Topology([_core.Dimension(f"d{i}", n, 1e9) for i, n in enumerate(sizes)])


def schedule(mesh, routes):
    collective = _core.MeshCollective("all_reduce", 1e6, routes)
    return _core.simulate_mesh(mesh, [collective]).schedule(collective)


def communicators(mesh, make):
    """A mesh communicator for each rank; make(size) makes those of an axis group."""
    groups = [[None] * len(mesh.dimensions) for _ in range(mesh.ranks)]
    for d, dimension in enumerate(mesh.dimensions):
        for rank in range(mesh.ranks):
            group = mesh.axis_group(rank, d)
            if group[0] == rank and dimension.size > 1:
                for member, made in zip(group, make(dimension.size), strict=True):
                    groups[member][d] = made
    flat = make(mesh.ranks)
    return [_core.MeshCommunicator(mesh, flat[r], groups[r]) for r in range(mesh.ranks)]


def on_each_rank(ranks, body):
    with ThreadPoolExecutor(ranks) as pool:
        return [f.result() for f in [pool.submit(body, rank) for rank in range(ranks)]]


class Network:
    """Ranks that meet in a thread of Python, which moves floats."""

    def __init__(self, size):
        self.arrived = [SimpleQueue() for _ in range(size)]
        # No reference cycle through C++, which Python's collector cannot see.
        self.ranks = [
            _core.PythonCommunicator(rank, size, partial(self.launch, queue))
            for rank, queue in enumerate(self.arrived)
        ]
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def close(self):
        for queue in self.arrived:
            queue.put(None)
        self.thread.join(20)

    @staticmethod
    def launch(arrived, ticket, kind, dtype, spans):
        assert dtype == "float32"
        views = [(ctypes.c_float * count).from_address(address) for address, count in spans]
        arrived.put((ticket, kind, views))

    def run(self):
        while None not in (calls := [queue.get() for queue in self.arrived]):
            kind = calls[0][1]
            for views in zip(*[call[2] for call in calls], strict=True):
                self.move(kind, views)
            for rank, (ticket, _, _) in zip(self.ranks, calls, strict=True):
                rank.complete(ticket)

    @staticmethod
    def move(kind, views):
        for owner in range(len(views)):
            for i in range(*_core.shard((0, len(views[0])), owner, len(views))):
                value = views[owner][i] if kind == "all_gather" else sum(v[i] for v in views)
                for view in [views[owner]] if kind == "reduce_scatter" else views:
                    view[i] = value


@pytest.fixture
def make_python_communicators():
    networks = []

    def make(size):
        networks.append(Network(size))
        return networks[-1].ranks

    yield make
    for network in networks:
        network.close()


@pytest.mark.parametrize("threads", [True, False])
def test_sums(threads, make_python_communicators):
    mesh = topology(2, 1, 3)
    make = _core.make_local_communicators if threads else make_python_communicators
    ranks = communicators(mesh, make)
    both = schedule(mesh, [[0, 2], [2, 0], [0, 2]])

    def body(rank):
        for how in (both, None, both):
            data = [array.array("f", [rank + i for i in range(n)]) for n in (50, 1, 7)]
            spans = [(d.buffer_info()[0], len(d)) for d in data]
            ranks[rank].all_reduce(spans, "float32", how)
            for d in data:
                assert list(d) == [15 + 6 * i for i in range(len(d))]
        assert (ranks[rank].rank, ranks[rank].size) == (rank, 6)
        assert ranks[rank].failure() == ""

    on_each_rank(6, body)


def test_errors_name_the_culprit():
    mesh = topology(2, 1)
    flat, group = _core.make_local_communicators(2), _core.make_local_communicators(2)
    with pytest.raises(UsageError, match="'d0' has rank 0 of 1, not 1 of 2"):
        _core.MeshCommunicator(mesh, flat[1], [None, None])
    with pytest.raises(TypeError):
        _core.MeshCommunicator(mesh, None, [group[1], None])
    ranks = [_core.MeshCommunicator(mesh, flat[r], [group[r], None]) for r in range(2)]
    how = schedule(mesh, [[0]])
    with pytest.raises(UsageError, match="is negative"):
        ranks[0].all_reduce([(0, -1)], schedule=how)
    with pytest.raises(UsageError, match="1 dimensions for 2"):
        ranks[0].all_reduce([], schedule=schedule(topology(2), [[0]]))
    ranks[0].abort()
    with pytest.raises(FaultError, match="aborted"):
        ranks[0].all_reduce([], schedule=how)
    with pytest.raises(FaultError, match="aborted"):
        ranks[0].all_reduce([])


def test_a_line_that_raises_is_a_fault():
    def refuse(*_):
        raise ValueError("no route to host")

    mesh = topology(2)
    mine = _core.MeshCommunicator(
        mesh, _core.make_local_communicators(2)[0], [_core.PythonCommunicator(0, 2, refuse)]
    )
    data = array.array("f", [1.0] * 4)
    with pytest.raises(FaultError, match=r"phase 0 of chunk 0, over dimension 'd0'.*no route"):
        mine.all_reduce([(data.buffer_info()[0], 4)], schedule=schedule(mesh, [[0]]))


def test_the_end_waits_without_the_gil():
    """Completions need it while the communicator's end waits for them."""
    tickets = SimpleQueue()
    flat = _core.PythonCommunicator(0, 2, lambda ticket, *_: tickets.put(ticket))
    group = _core.make_local_communicators(2)[0]
    plan = _core.Plan(
        "test", [_core.TensorSpec("a", 4)], [_core.Op("all_reduce", [(0, 4)], 1 << 20)]
    )
    flat_buffer = array.array("f", [1.0] * (plan.flat_buffer_bytes // 4))
    mine = _core.MeshCommunicator(topology(2), flat, [group])
    engine = _core.Engine(plan, flat_buffer.buffer_info()[0], mine)
    engine.begin_step()
    engine.ready(0)
    ticket = tickets.get(timeout=20)
    engine.fail("this rank is lost")
    engine.close()
    completed = []

    def complete():
        completed.append(ticket)
        flat.complete(ticket, "aborted")

    completer = threading.Timer(0.1, complete)
    completer.start()
    del engine, mine, group
    assert completed
    completer.join(20)


@pytest.fixture
def launching():
    """An engine whose launch is under way until the event is set."""
    tickets, go_on = SimpleQueue(), threading.Event()

    def launch(ticket, *_):
        tickets.put(ticket)
        go_on.wait(20)

    flat = _core.PythonCommunicator(0, 1, launch)
    mine = _core.MeshCommunicator(topology(1), flat, [None])
    plan = _core.Plan(
        "test", [_core.TensorSpec("a", 4)], [_core.Op("all_reduce", [(0, 4)], 1 << 20)]
    )
    flat_buffer = array.array("f", [1.0] * (plan.flat_buffer_bytes // 4))
    engine = _core.Engine(plan, flat_buffer.buffer_info()[0], mine)
    engine.begin_step()
    engine.ready(0)
    ticket = tickets.get(timeout=20)
    yield engine, go_on
    go_on.set()
    flat.complete(ticket, "aborted")
    engine.close()


def test_a_fault_is_told_without_the_gil(launching):
    """Whoever is inside a communicator needs it, and the abort waits for them."""
    engine, go_on = launching
    threading.Timer(0.2, go_on.set).start()
    engine.fail("rank 1 is lost")
    with pytest.raises(FaultError, match="rank 1 is lost"):
        engine.drain()


def test_an_engine_is_closed_although_another_thread_fails_it(launching):
    """Memory that it uses is freed next; and were that its own thread, it could not end itself."""
    engine, go_on = launching
    failer = threading.Thread(target=engine.fail, args=("rank 1 is lost",))
    failer.start()
    while not engine.fault:
        time.sleep(0.001)
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    go_on.set()
    for thread in (failer, closer):
        thread.join(20)
    assert not closer.is_alive()


def test_abort_ends_who_waits():
    tickets = SimpleQueue()
    group = _core.PythonCommunicator(0, 2, lambda ticket, *_: tickets.put(ticket))
    mine = _core.MeshCommunicator(topology(2), _core.make_local_communicators(2)[0], [group])
    data = array.array("f", [1.0] * 4)
    span = (data.buffer_info()[0], 4)

    def waits():
        with pytest.raises(FaultError, match="aborted"):
            mine.all_reduce([span], schedule=schedule(topology(2), [[0]]))

    with ThreadPoolExecutor(2) as pool:
        scheduled = pool.submit(waits)
        ticket = tickets.get(timeout=20)
        mine.abort()
        group.complete(ticket)
        scheduled.result(20)


def test_axis_groups_live_as_long_as_it_and_no_longer():
    class Launch:
        def __call__(self, ticket, *_):
            tickets.append(ticket)

    tickets = []
    launch = Launch()
    seen = weakref.ref(launch)
    group = _core.PythonCommunicator(0, 2, launch)
    mine = _core.MeshCommunicator(topology(2), _core.make_local_communicators(2)[0], [group])
    del group, launch
    gc.collect()
    assert seen() is not None
    mine.abort()
    gc.collect()
    assert seen() is None
    assert not tickets

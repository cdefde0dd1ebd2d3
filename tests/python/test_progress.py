# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks through a store, and what is told of their progress."""

from __future__ import annotations

import threading
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

from usbyte.torch.fault.report import behind, last_operations
from usbyte.torch.runtime.message_queue import StoreMessageQueue
from usbyte.torch.runtime.worker_thread import SerialExecutor, WorkerThread


def test_messages_arrive_once_each_and_in_the_order_of_their_sender():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boxes = [
        StoreMessageQueue(dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False), rank)
        for rank in range(4)
    ]
    received = []
    reader = threading.Thread(target=lambda: received.extend(boxes[0].receive() for _ in range(60)))
    reader.start()

    def write(box, name):
        for number in range(20):
            box.send(0, f"{name} {number}")

    writers = [threading.Thread(target=write, args=(boxes[r], "abc"[r - 1])) for r in (1, 2, 3)]
    for writer in writers:
        writer.start()
    for thread in [*writers, reader]:
        thread.join(30)
    assert len(set(received)) == len(received) == 60
    for name in "abc":
        mine = [text for text in received if text.startswith(name)]
        assert mine == [f"{name} {number}" for number in range(20)]


def test_a_worker_runs_tasks_in_order_and_survives_their_errors(caplog):
    done, worker = [], WorkerThread("tested")
    with torch.enable_grad():
        worker.put(lambda: done.append(torch.is_grad_enabled()))
    worker.put(lambda: 1 / 0)
    for number in range(100):
        worker.put(partial(done.append, number))
    worker.end()
    assert worker.join(30)
    assert done == [False, *range(100)]
    assert "a task of the thread tested failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_worker_with_a_task_that_hangs_is_not_waited_for_in_vain():
    gate, worker = threading.Event(), WorkerThread("tested", count=2)
    worker.put(partial(gate.wait, 30))
    worker.end()
    assert not worker.join(0.05)
    gate.set()
    assert worker.join(30)


def test_a_worker_keeps_its_owner_until_its_end_but_not_its_tasks():
    class Thing:
        pass

    owner, task_of = Thing(), Thing()
    references = weakref.ref(owner), weakref.ref(task_of)
    worker, ran = WorkerThread("tested", owner=owner), threading.Event()
    worker.put(partial(lambda _: None, task_of))
    worker.put(ran.set)
    del owner, task_of
    assert ran.wait(30)
    assert references[0]() is not None
    assert references[1]() is None
    worker.end()
    assert worker.join(30)
    assert references[0]() is None


def test_a_worker_without_enough_threads_leaves_none(monkeypatch):
    started, start = [], threading.Thread.start

    def refuse_the_third(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    with pytest.raises(RuntimeError, match="can't start"):
        WorkerThread("tested", count=3)
    for thread in started:
        thread.join(30)
    assert not any(thread.is_alive() for thread in started)


def test_calls_wait_for_those_before_them_only_if_they_are_patient():
    calls, gate = SerialExecutor("test"), threading.Event()
    with pytest.raises(RuntimeError, match=r"no answer in 0\.1 s"):
        calls.run(lambda: gate.wait(30), 0.1)
    with pytest.raises(RuntimeError, match="no answer to an earlier call"):
        calls.run(lambda: 1, 30)
    threading.Timer(0.3, gate.set).start()
    assert calls.run(lambda: 2, 30, ignore_backlog=True) == 2
    assert calls.run(lambda: 3, 30) == 3
    calls.close()
    with pytest.raises(RuntimeError, match="connection is closed"):
        calls.run(lambda: 4, 30)


def state(
    step,
    phase="flight",
    completed=0,
    awaited=(),
    last=(),
    eager=(),
    launched=3,
    gathers=True,
):
    status = {"step": step, "phase": phase, "launched": launched, "completed": completed, "ops": 5}
    status |= {"awaited": awaited, "last": last, "awaits_release": not gathers}
    return {"optimizers": {"optimizer.1": status}, "eager": list(eager)}


def test_ranks_that_are_behind_are_named():
    states = {0: state(7), 1: state(6, "idle"), 2: state(7, "backward", awaited=["a", "b"])}
    assert behind(states) == [
        "rank 1 has not begun backward of step 7",
        "rank 2 is still in backward of step 7, without the gradients of a, b",
    ]
    assert behind({0: state(7), 1: state(7)}) == []
    states[1]["eager"].append("allreduce 'loss'")
    assert behind(states)[0] == (
        "rank 1 has not begun backward of step 7 and has allreduce 'loss' in flight, which all "
        "ranks must call: if rank 1 had fewer batches, call ub.join() after the last one"
    )
    late = {
        0: state(7, completed=2, launched=3),
        1: state(7, completed=2, launched=2, gathers=False),
    }
    assert behind(late) == ["rank 1 has not updated its shards in step 7"]
    encodes = {0: state(7, completed=2, launched=3), 1: state(7, completed=2, launched=2)}
    assert behind(encodes) == []
    node = {0: state(4, "averaging"), 1: state(4, "averaging"), 2: state(3, "averaging")}
    assert behind(node) == ["rank 2 has not begun node averaging 4"]
    node[1]["optimizers"]["node"] = state(7)["optimizers"]["optimizer.1"]
    node[2]["optimizers"]["node"] = state(6, "idle")["optimizers"]["optimizer.1"]
    assert behind(node) == ["rank 2 has not begun backward of step 7"]
    apart = {
        0: state(7),
        1: {"optimizers": {"optimizer.1 of ranks.1.2": {"step": 3, "phase": "idle"}}, "eager": []},
    }
    assert behind(apart) == []  # which have nothing to do with each other


def test_the_last_operations_of_those_behind_come_first():
    done = {"step": 6, "op": "op 4 (all_reduce: x)", "launched_s": 2.0, "took_s": 0.25}
    open_ = {"step": 7, "op": "op 0 (all_reduce: y)", "launched_s": 1.0, "took_s": None}
    states = {
        0: state(7, last=[done, open_]),
        1: state(6, "idle", 5, last=[done], eager=["allreduce 'loss'"]),
        4: {"optimizers": {"optimizer.1": {}}, "eager": []},
    }
    assert last_operations(states, [2, 3]).splitlines() == [
        "the last operations of each rank:",
        "ranks 2, 3: no answer",
        "rank 4:",
        "rank 1: step 6, idle, 5 of 5 done",
        "  step 6 op 4 (all_reduce: x): launched 2 s ago, took 0.25 s",
        "  in flight: allreduce 'loss'",
        "rank 0: step 7, flight, 0 of 5 done",
        "  step 6 op 4 (all_reduce: x): launched 2 s ago, took 0.25 s",
        "  step 7 op 0 (all_reduce: y): launched 1 s ago, not completed",
    ]
    many = {rank: state(7) for rank in range(40)}
    text = last_operations(many, [])
    assert text.endswith("and 24 ranks that have come further")

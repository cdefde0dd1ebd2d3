# SPDX-License-Identifier: Apache-2.0
"""Replayed jobs: sizes, order and values of what they need and give."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.lab.replay import Replay, _may_come_back, giving_way
from usbyte.planning import profiles
from usbyte.planning.layout import tensor_specs

MS = 1e-3


def job(rows, **times):
    """A profile from (name, elements, need ms, ready ms) or with a dtype as the fifth."""
    rows = [(*row, "float32")[:5] for row in rows]
    specs = tensor_specs((name, numel, dtype) for name, numel, _, _, dtype in rows)
    need, ready = [row[2] * MS for row in rows], [row[3] * MS for row in rows]
    return _core.Profile(specs, need, ready, **times)


def order_of(replay):
    """Names in the order of forward and of backward, of one step."""
    forward, backward = [], []
    handles = []
    names = {param: name for name, param in replay.named_tensors()}
    for layer in replay.layers:

        def entered(module, _args):
            forward.append({names[p] for p in module.parameters()})

        handles.append(layer.register_forward_pre_hook(entered))
    for param, name in names.items():
        note = lambda _, name=name: backward.append(name)  # noqa: E731
        handles.append(param.register_post_accumulate_grad_hook(note))
    replay(torch.zeros(1, requires_grad=True)).sum().backward()
    for handle in handles:
        handle.remove()
    return forward, backward


def test_needs_and_gradients_come_in_the_profiles_order_and_sizes():
    profile = job(
        [("a.w", 5, 0, 40), ("a.b", 2, 0, 37), ("b.w", 7, 4, 30), ("b.b", 1, 4, 30),
         ("c", 3, 8, 15)]
    )  # fmt: skip
    replay = Replay(profile)
    assert {name: p.numel() for name, p in replay.named_tensors()} == {
        "a.w": 5, "a.b": 2, "b.w": 7, "b.b": 1, "c": 3
    }  # fmt: skip
    forward, backward = order_of(replay)
    assert forward == [{"a.w", "a.b"}, {"b.w", "b.b"}, {"c"}]
    assert backward[0] == "c"
    assert set(backward[1:3]) == {"b.w", "b.b"}
    assert backward[3:] == ["a.b", "a.w"]
    assert replay.profile.need_s == profile.need_s
    assert replay.profile.ready_s == profile.ready_s


def test_a_pass_is_never_shorter_than_the_profile(monkeypatch):
    replay = Replay(job([("a", 5, 0, 40), ("b", 7, 10, 30)]))
    slept = []
    now = [100.0]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds + 0.5 * MS  # sleep always takes a little longer

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    replay(torch.zeros(1, requires_grad=True)).sum().backward()
    # Had overshoot added up, it would be four times 0.5 ms.
    assert now[0] - 100.0 == pytest.approx(40.5 * MS + 0.5 * MS)
    assert len(slept) == 4


def test_waiting_at_a_gate_delays_the_rest(monkeypatch):
    replay = Replay(job([("a", 5, 0, 40), ("b", 7, 10, 30)]))
    now = [100.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    replay.layers[1].register_forward_pre_hook(lambda *_: sleep(0.2))
    replay(torch.zeros(1, requires_grad=True)).sum().backward()
    assert now[0] - 100.0 == pytest.approx(0.24)


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_values_are_checked(steps):
    rows = [("a", 5, 0, 6, "float32"), ("b", 3, 1, 5, "bfloat16"), ("c", 4, 2, 4, "float16")]
    replay = Replay(job(rows), value=2.0)
    optimizer = torch.optim.SGD(replay.parameters(), lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        replay(torch.zeros(1, requires_grad=True)).sum().backward()
        optimizer.step()
    assert replay.steps == steps
    assert replay.wrong(2.0) == []
    assert replay.wrong(1.0) == ["a", "b", "c"]
    with torch.no_grad():
        dict(replay.named_tensors())["b"][1] += 1
    assert replay.wrong(2.0) == ["b"]


def test_gradients_add_up_where_they_are_kept():
    replay = Replay(job([("a", 5, 0, 3)]))
    optimizer = torch.optim.SGD(replay.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        replay(torch.zeros(1, requires_grad=True)).sum().backward()
        optimizer.step()
    assert replay.wrong(1.0) == []
    [(_, param)] = replay.named_tensors()
    first = param.grad.clone()
    replay(torch.zeros(1, requires_grad=True)).sum().backward()
    assert param.grad[0] not in (first[0], 2 * (param.grad[0] - first[0]))


def test_a_missing_or_repeated_update_is_noticed():
    for applied in ([0, 1], [0, 0, 1, 2], [0, 1, 1]):
        replay = Replay(job([("a", 5, 0, 3)]))
        total = 0
        for step in range(3):
            replay.zero_grad()
            replay(torch.zeros(1, requires_grad=True)).sum().backward()
            [(_, param)] = replay.named_tensors()
            total = total + applied.count(step) * param.grad
        with torch.no_grad():
            param -= total
        assert replay.wrong(1.0) == ["a"]


def test_contradictions_of_the_profile_are_told():
    # b is needed after a but ready only after it: backward cannot do that.
    replay = Replay(job([("a", 5, 0, 10), ("b", 7, 2, 20)]))
    assert replay.profile.ready_s == [20 * MS, 20 * MS]
    assert order_of(replay)[1] == ["b", "a"]


def test_flags_are_left_out_and_idle_time_stays():
    profile = job([("usbyte.used", 3, 0, 9), ("a", 5, 0, 9)], step_s=14 * MS, update_s=2 * MS)
    replay = Replay(profile)
    assert [name for name, _ in replay.named_tensors()] == ["a"]
    assert replay.profile.iteration_s == pytest.approx(12 * MS)
    assert replay.profile.update_s == 0


def test_what_cannot_be_replayed():
    with pytest.raises(UsageError, match="'a' of dtype int64"):
        Replay(job([("a", 5, 0, 1, "int64")]))
    with pytest.raises(UsageError, match="without tensors"):
        Replay(job([("usbyte.used", 3, 0, 9)]))


@pytest.mark.parametrize("even", [False, True])
def test_the_made_up_profiles(even):
    profile = profiles.vgg16_half(0.9, even=even)
    assert profile.model == profiles.MADE_UP[even]
    gaps = [b - a for a, b in pairwise(profile.need_s[::2])]
    assert (max(gaps) == pytest.approx(min(gaps))) == even
    assert len(profile.tensors) == 32
    assert profile.bytes == pytest.approx(121.1e6, rel=1e-3)
    assert profile.iteration_s == pytest.approx(0.9)
    assert profile.need_s[:2] == [0.0, 0.0]
    assert profile.need_s == sorted(profile.need_s)
    assert profile.ready_s == sorted(profile.ready_s, reverse=True)
    assert min(profile.ready_s) > max(profile.need_s)


def trace(**changes):
    root = {
        "model": "m",
        "columns": ["tensor", "elements", "backward_gap_us"],
        "order": "backward",
        "tensors": [["c.bias", 1, 0], ["c.weight", 2, 200], ["b", 3, 400], ["a.weight", 4, 100]],
    }
    return json.dumps(root | changes)


def test_a_published_trace(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(trace())
    profile = profiles.load(str(path))
    assert profile.model == "m"
    assert [(t.name, t.numel) for t in profile.tensors] == [
        ("a.weight", 4), ("b", 3), ("c.weight", 2), ("c.bias", 1)
    ]  # fmt: skip
    assert profile.need_s == pytest.approx([0, 50e-6, 250e-6, 250e-6])
    assert profile.ready_s == pytest.approx([1050e-6, 950e-6, 550e-6, 350e-6])
    again = tmp_path / "again.json"
    again.write_text(profile.to_json())
    assert profiles.load(str(again)).ready_s == profile.ready_s


def test_names_without_a_module_in_a_trace_stand_for_themselves():
    job = profiles.read_trace(trace(tensors=[["second", 3, 100], ["first", 4, 100]]))
    assert [t.name for t in job.tensors] == ["first", "second"]
    assert job.need_s == pytest.approx([0, 50e-6])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"columns": ["x"]}, "columns"),
        ({"order": "forward"}, "order"),
        ({"tensors": []}, "empty"),
        ({"tensors": [["a", 1, -1]]}, "negative"),
        ({"tensors": [["a", 1]]}, "backward"),
    ],
)
def test_a_bad_trace(changes, words):
    with pytest.raises(UsageError, match=words):
        profiles.read_trace(trace(**changes))


def test_no_such_profile():
    with pytest.raises(UsageError, match="vgg16-half, vgg16-even, vgg16, resnet50"):
        profiles.load("nowhere.json")


def test_scaling():
    profile = job([("a", 10, 0, 40), ("b", 1, 10, 30)], step_s=50 * MS, update_s=4 * MS)
    scaled = profiles.scaled(profile, time=0.5, size=0.2)
    assert [t.numel for t in scaled.tensors] == [2, 1]
    assert scaled.need_s == pytest.approx([0, 5 * MS])
    assert scaled.ready_s == pytest.approx([20 * MS, 15 * MS])
    assert (scaled.step_s, scaled.update_s) == pytest.approx((25 * MS, 2 * MS))
    with pytest.raises(UsageError, match="above 0"):
        profiles.scaled(profile, time=0)


def test_where_cores_are_shared_what_an_accelerator_would_do_gives_way():
    def policies(policy):
        os.sched_setscheduler(0, policy, os.sched_param(0))  # of this thread
        with giving_way():
            inside = os.sched_getscheduler(0)
        return inside, os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(policies, os.SCHED_BATCH).result() == (
            os.SCHED_IDLE if _may_come_back() else os.SCHED_BATCH,
            os.SCHED_BATCH,
        )
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        assert policies(os.SCHED_OTHER) == (os.SCHED_OTHER, os.SCHED_OTHER)

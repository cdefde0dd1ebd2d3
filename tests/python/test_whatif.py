# SPDX-License-Identifier: Apache-2.0
"""Whether the network is the bottleneck: `usbyte.planning.whatif` and `usbyte whatif`."""

from __future__ import annotations

import itertools
import json
import math

import click.testing
import pytest

from usbyte import _core
from usbyte.cli import main
from usbyte.errors import UsageError
from usbyte.planning import whatif
from usbyte.planning.layout import tensor_specs
from usbyte.planning.whatif import COMPUTE, LATENCY, NETWORK, SOFTWARE, TOLERANCE, examine

MEGA = 1_000_000


def job(*rows, model="tiny"):
    """From (elements, need_s, ready_s) in forward order."""
    specs = tensor_specs((f"layer{i}.weight", row[0], "float32") for i, row in enumerate(rows))
    return _core.Profile(specs, [row[1] for row in rows], [row[2] for row in rows], model=model)


#: The last layer, whose gradient is ready first and needed last, has nearly all bytes.
TOP_HEAVY = job((MEGA // 10, 0.0, 0.3), (MEGA // 10, 0.05, 0.2), (25 * MEGA, 0.1, 0.11))


def ring(gbit, ranks=8, latency_s=25e-6):
    return _core.NetworkModel.ring(ranks, latency_s, gbit * 1e9 / 8)


@pytest.mark.parametrize("latency_s", [0.0, 5e-4])
def test_one_gradient_has_a_closed_form(latency_s):
    # Ready when backward ends and needed at once: all of a + b M / r adds to the step.
    compute_s, target = 0.1, 0.9
    only = job((25 * MEGA, 0.0, compute_s))
    network = ring(10, latency_s=latency_s)
    alpha_s, bytes_s = network.all_reduce[0].alpha_s, network.all_reduce[0].beta_s_per_byte * 1e8
    room_s = compute_s / target - compute_s
    point = examine(only, network, target)
    assert point.ddp.scaling == pytest.approx(compute_s / (compute_s + alpha_s + bytes_s))
    # No byte flows before a scatter's startup, which is half of an all_reduce's.
    startups = (point.ddp, alpha_s), (point.bound, alpha_s / 2), (point.bytes_bound, 0.0)
    for outcome, startup_s in startups:
        needed = bytes_s / (room_s - startup_s)
        assert needed * (1 - 1e-9) <= outcome.ratio <= needed * TOLERANCE
    assert point.bound.ratio <= point.plan.ratio <= point.ddp.ratio * TOLERANCE
    assert point.verdict == NETWORK


def test_communication_and_gain_by_hand():
    # Two gradients of 4 MB that are ready at 30 and 40 ms take 20 ms each, and 1 ms for a startup.
    two = job((MEGA, 0.0, 0.04), (MEGA, 0.01, 0.03))
    network = _core.NetworkModel(4, [_core.AlphaBeta(1e-3, 5e-9)], concurrent=1)
    point = examine(two, network)
    assert point.communication == pytest.approx(1.0)
    assert whatif.best_ddp(two, network)[1] == pytest.approx(0.072)  # one after the other
    assert point.gain == pytest.approx(0.072 / point.plan.step_s)
    assert point.gain > 1


def test_startups_are_beyond_compression():
    point = examine(job((MEGA, 0.0, 0.1)), ring(1, latency_s=1e-3), 0.95)
    assert point.ddp.ratio == point.plan.ratio == math.inf
    assert 1 < point.bytes_bound.ratio < math.inf
    assert point.bound.ratio == math.inf
    assert "startups, not bytes, take too long here" in whatif.advice([point])


def test_more_bandwidth_never_hurts():
    points = [examine(TOP_HEAVY, ring(gbit)) for gbit in (0.5, 2, 3.3, 7, 10, 40)]
    for schedule, slack in (("ddp", 1.0), ("bytes_bound", 1.0), ("plan", 0.99)):  # auto searches
        outcomes = [getattr(point, schedule) for point in points]
        for slow, fast in itertools.pairwise(outcomes):
            assert fast.scaling >= slack * slow.scaling
            assert fast.ratio <= slow.ratio * TOLERANCE
    assert points[0].verdict == NETWORK
    assert points[-1].verdict == COMPUTE
    for point in points:
        assert point.bytes_bound.scaling >= point.bound.scaling >= point.plan.scaling - 1e-12
        assert point.bytes_bound.ratio <= point.bound.ratio <= point.plan.ratio
        assert point.plan.ratio <= point.ddp.ratio


@pytest.mark.parametrize("target", [0.7, 0.95])
def test_ratios_are_enough_and_no_larger(target):
    network = ring(2)

    def scaling(schedule, ratio):
        less = network.scaled(1.0, 1.0 / ratio)
        if schedule == "bytes_bound":
            return TOP_HEAVY.iteration_s / _core.bytes_bound_s(TOP_HEAVY, less)
        policy, overlap = {"ddp": ("ddp", "backward"), "plan": ("auto", "forward")}[schedule]
        plan = _core.make_plan(policy, TOP_HEAVY, less, {}, overlap)
        return TOP_HEAVY.iteration_s / _core.simulate(plan, TOP_HEAVY, less, overlap).step_s

    point = examine(TOP_HEAVY, network, target)
    for schedule in ("ddp", "plan", "bytes_bound"):
        ratio = getattr(point, schedule).ratio
        assert 1 < ratio < math.inf
        assert scaling(schedule, ratio) >= target
        assert scaling(schedule, ratio / TOLERANCE**2) < target


def test_the_verdict_agrees_with_the_numbers():
    verdicts = {}
    for gbit in (1, 5, 100):
        point = examine(TOP_HEAVY, ring(gbit))
        verdicts[gbit] = point.verdict
        assert (point.verdict == COMPUTE) == (point.ddp.ratio == 1)
        assert (point.verdict == NETWORK) == (point.bytes_bound.ratio > 1)
    assert verdicts == {1: NETWORK, 5: SOFTWARE, 100: COMPUTE}


def test_startups_that_a_fast_link_cannot_hide_are_latency():
    # 14 startups of 0.5 ms for each of two collectives, and next to no time for the bytes.
    point = examine(job((MEGA, 0.0, 0.1)), ring(1000, latency_s=5e-4), 0.95)
    assert point.bytes_bound.scaling > 0.95 > point.bound.scaling
    assert point.verdict == LATENCY
    assert point.ddp.ratio == math.inf
    assert "reduce the startups" in whatif.advice([point])


def test_least_ratio_is_the_threshold():
    for threshold in (1.0, 1.004, 1.5, 7.0, 900.0, 1e6):
        found = whatif.least_ratio(lambda ratio, least=threshold: ratio >= least)
        assert threshold <= found <= threshold * TOLERANCE
    assert whatif.least_ratio(lambda _: False) == math.inf
    assert whatif.least_ratio(lambda ratio: ratio >= 8, lowest=8.0) == 8.0


def test_bandwidth_of_a_network():
    assert whatif.bus_bandwidth(ring(10)) == pytest.approx(1.25e9)
    measured = _core.NetworkModel(4, [_core.AlphaBeta(1e-3, 2e-8), _core.AlphaBeta(2e-3, 1.2e-8)])
    faster = whatif.at_bandwidth(measured, 1e9)
    assert whatif.bus_bandwidth(faster) == pytest.approx(1e9)
    assert [cost.alpha_s for cost in faster.all_reduce] == [1e-3, 2e-3]
    with pytest.raises(UsageError, match="several ranks"):
        whatif.bus_bandwidth(_core.NetworkModel(1, [_core.AlphaBeta(1e-3, 1e-9)]))


def test_the_first_thing_to_do():
    points = {gbit: examine(TOP_HEAVY, ring(gbit)) for gbit in (1, 5, 100)}
    assert whatif.advice([points[100]]) == "Nothing to do: DDP reaches 0.95 of linear here."
    assert "first use usbyte (policy" in whatif.advice([points[5]])
    told = whatif.advice(list(points.values()))
    assert told.index("use usbyte (policy") < told.index("; then send")
    assert f"{whatif.format_ratio(points[1].plan.ratio)} fewer bytes" in told
    assert "at 5gbit on 8 ranks" in told
    assert [whatif.format_ratio(r) for r in (1.001, 2.0, 8.241, 67.2, 1234.5)] == [
        "1.01x", "2.00x", "8.25x", "67.2x", "1235x",
    ]  # fmt: skip


def invoke(*arguments):
    return click.testing.CliRunner().invoke(
        main, ["whatif", *map(str, arguments)], env={"COLUMNS": "160"}
    )


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(TOP_HEAVY.to_json())
    return path


def test_a_table_with_json_and_pictures(profile, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "whatif.json"
    rings = ["--ranks", "8", "--bandwidth", "1gbit,5gbit,100gbit", "--json", output]
    done = invoke(profile, *rings, "--plot", tmp_path / "scaling.html")
    assert done.exit_code == 0, done.output
    [found] = json.loads(output.read_text())
    points = [examine(TOP_HEAVY, ring(gbit)) for gbit in (1, 5, 100)]
    assert found["advice"] == whatif.advice(points)
    assert found["advice"] in done.output
    for row, point in zip(found["points"], points, strict=True):
        assert row["verdict"] == point.verdict
        assert row["plan"]["scaling"] == point.plan.scaling
        assert row["ddp"]["ratio"] == point.ddp.ratio
        assert f"{point.ddp.scaling:.3f}" in done.output
    page = (tmp_path / "scaling.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</svg>")
    assert invoke(profile, *rings, "--plot", tmp_path / "scaling.svg").exit_code == 0
    assert "<svg" in (tmp_path / "scaling.svg").read_text()


def test_a_measured_network_at_other_bandwidths(profile, tmp_path):
    path, output = tmp_path / "network.json", tmp_path / "whatif.json"
    measured = _core.NetworkModel(4, [_core.AlphaBeta(0.3, 1e-9)])
    path.write_text(measured.to_json())
    done = invoke(profile, "--network", path, "--json", output)
    assert done.exit_code == 0, done.output
    [[point]] = [found["points"] for found in json.loads(output.read_text())]
    assert point["bandwidth_bytes_per_s"] == pytest.approx(1.5e9)
    assert point["ranks"] == 4
    assert point["plan"]["ratio"] is None
    assert "not by compression" in done.output
    done = invoke(profile, "--network", path, "--bandwidth", "1gbit,400gbit", "--json", output)
    assert done.exit_code == 0, done.output
    [found] = json.loads(output.read_text())
    rates = [point["bandwidth_bytes_per_s"] for point in found["points"]]
    assert rates == pytest.approx([1.25e8, 5e10])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.json"], "cannot read the profile 'none.json'"),
        (["vgg16-even", "--network", "none.json"], "cannot read the network 'none.json'"),
        (["vgg16-even", "--network", "n.json", "--ranks", "4"], "only --bandwidth with --network"),
        (["vgg16-even", "--network", "n.json", "--latency", "1us"], "only --bandwidth with"),
        (["vgg16-even", "--ranks", "1"], "2 to 4096"),
        (["vgg16-even", "--bandwidth", "fast"], "'fast' is no rate"),
        (["vgg16-even", "--target", "95"], "above 0 and up to 1"),
        (["vgg16-even", "--json", "/no/such/file.json"], "cannot write '/no/such/file.json'"),
        (["vgg16-even", "--plot", "/no/such/file.png"], "cannot write '/no/such/file.png'"),
    ],
)
def test_errors_name_the_culprit(arguments, words):
    done = invoke(*arguments)
    assert done.exit_code in (1, 2)
    assert words in " ".join(done.output.split())

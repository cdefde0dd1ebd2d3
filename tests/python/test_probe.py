# SPDX-License-Identifier: Apache-2.0
"""`usbyte probe` between real processes, and the fit that it reports."""

from __future__ import annotations

import csv
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from _ranks import run_ranks
from usbyte import _core
from usbyte.cli import main
from usbyte.cli._codec_options import parse_codecs
from usbyte.cli._probe_text import in_words
from usbyte.errors import UsageError
from usbyte.planning.cost_fit import (
    BUSY,
    ONE_SHOT,
    PACKED,
    SHOT_BUSY,
    SHOTS,
    Measured,
    fit,
    fit_lines,
)

probe = importlib.import_module("usbyte.torch.comm.probe")  # ub.probe is the function


def usbyte_probe(tmp_path, *arguments, ranks=1):
    launcher = ["-m", "usbyte.launch", "-np", str(ranks), sys.executable] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, "-c", "from usbyte.cli import main; main()", "probe",
         *arguments],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_on_two_ranks(tmp_path):
    pytest.importorskip("matplotlib")
    files = ["--json", "network.json", "--csv", "times.csv", "--plot", "probe.png"]
    done = usbyte_probe(tmp_path, "--largest", "64k", "--repeats", "3", *files, ranks=2)
    assert done.returncode == 0, done.stderr
    network = _core.NetworkModel.from_json((tmp_path / "network.json").read_text())
    assert network.ranks == 2
    windows = [window for window in (1, 2, 4) if window <= (network.concurrent or 4)]
    halves = [window for window in windows if window <= 2]
    lengths = [len(c) for c in (network.all_reduce, network.reduce_scatter, network.all_gather)]
    assert lengths == [windows[-1], halves[-1], halves[-1]]
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "times.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["seconds"]) > 0 for row in rows)
    busy = [row for row in rows if row["collective"] == "busy"]
    for ahead in range(1, len(busy) // 3 + 1):
        row = busy[3 * (ahead - 1)]
        assert (row["in_flight"], row["bytes"]) == (str(ahead + 1), str(ahead << 20))
    packed = [row for row in rows if row["collective"] == "packed"]
    assert [row["bytes"] for row in packed] == 3 * [str(1 << 20)]
    times = sorted(float(row["seconds"]) for row in packed)
    assert network.pack_s_per_byte == pytest.approx(times[1] / (1 << 20), rel=0.01)
    for kind, count in (("one_shot", 1), ("one_shot_together", 16), ("one_shot_busy", 1)):
        shots = [row for row in rows if row["collective"] == kind]
        expected = (str(count), str(count * 32 << 10))
        assert [(row["in_flight"], row["bytes"]) for row in shots] == 3 * [expected]
    assert network.one_shot.most_bytes == 32 << 10
    assert f"{32 << 10} bytes, takes" in done.stdout.replace("\n", " ")
    # 64 and 256 KiB, each three times; three of 1 MiB.
    timed = [
        row for row in rows if row["collective"] in ("all_reduce", "reduce_scatter", "all_gather")
    ]
    for row in timed:
        assert int(row["bytes"]) // int(row["in_flight"]) in (1 << 16, 1 << 18, 1 << 20)
    assert len(timed) == 3 * 2 * (len(windows) + 2 * len(halves)) + 3
    assert all(cost.alpha_s > 0 for cost in network.all_reduce)
    for row in timed:
        cost = network.cost(row["collective"], int(row["in_flight"]))
        assert float(row["fitted_s"]) == pytest.approx(cost.time_s(int(row["bytes"])), abs=1e-9)
    # One table of costs and one of residuals, of rank 0 alone.
    assert "[1]" not in done.stdout
    for kind, lines in (
        ("all_reduce", windows),
        ("reduce_scatter", halves),
        ("all_gather", halves),
    ):
        assert done.stdout.count(f"│ {kind} ") == 2 * len(lines), done.stdout
    assert f"{network.all_reduce[0].beta_s_per_byte * 1e9:.4f}" in done.stdout
    # The last line says in words the same as the file.
    told = done.stdout.splitlines()[-1].removeprefix("[0] ")
    assert told == in_words(network, Path("network.json"))


def probes(rank, _size, folder, *arguments):
    os.chdir(folder)
    done = CliRunner().invoke(main, ["probe", *arguments])
    return [done.exit_code, done.output]


def test_dimensions_of_a_mesh(tmp_path):
    def run(ranks, *arguments):
        return run_ranks(ranks, probes, str(tmp_path), *arguments, timeout=120)[0]

    files = ["--dimensions", "2x2", "--json", "network.json"]
    code, output = run(4, "--largest", "64k", "--repeats", "2", *files)
    assert code == 0, output
    network = _core.NetworkModel.from_json((tmp_path / "network.json").read_text())
    assert [(d.name, d.size) for d in network.topology.dimensions] == [
        ("inside", 2),
        ("between", 2),
    ]
    for dimension in network.topology.dimensions:
        assert re.search(rf"{dimension.name} +│ +2 │", output)
    # All ranks are on this host.
    _, output = run(2, "--largest", "64k", "--repeats", "1", "--dimensions", "hosts")
    assert "has one dimension only" in output
    code, output = run(2, "--dimensions", "3")
    assert code == 1
    assert "topology 3 is not one of this job's 2 ranks" in output
    done = CliRunner().invoke(main, ["probe", "--dimensions", "--codecs", "fp16"])
    assert done.exit_code == 2


def test_what_it_says_where_it_cannot(tmp_path):
    done = usbyte_probe(tmp_path)
    assert done.returncode == 1
    assert "usbyterun -np 4 usbyte probe" in done.stderr
    done = usbyte_probe(tmp_path, "--json", "no/network.json", ranks=2)
    assert done.returncode == 1
    assert "cannot write 'no/network.json'" in done.stderr


def test_codecs_on_one_thread(tmp_path):
    files = ["--json", "codecs.json"]
    quick = ["--codec-time", "1ms"]
    path = str(tmp_path / "codecs.json")
    named = ["probe", "--codecs", "topk:1e-2, fp16,topk:0.01", *quick, "--json", path]
    done = CliRunner().invoke(main, named)
    assert done.exit_code == 0, done.output
    costs = _core.CodecCosts.from_json((tmp_path / "codecs.json").read_text())
    assert costs.specs == ["fp16", "topk:0.01"]
    for spec in costs.specs:
        for cost in (costs.of(spec).encode, costs.of(spec).decode):
            assert cost.beta_s_per_byte > 0
            assert cost.alpha_s == cost.overlap_s  # constant, then by the byte
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["topk:0.01", "fp16"]
    assert "50.00%" in rows[1]
    assert f"{1e-9 / costs.of('fp16').encode.beta_s_per_byte:.2f}" in rows[1]
    # All, and only one of several ranks.
    done = usbyte_probe(tmp_path, "--codecs", *quick, *files, ranks=2)
    assert done.returncode == 0, done.stderr
    costs = _core.CodecCosts.from_json((tmp_path / "codecs.json").read_text())
    assert {spec.partition(":")[0] for spec in costs.specs} == set(_core.codec_names())
    assert done.stdout.count("fp16") == 1


def test_lists_of_codecs_with_parameters():
    expected = ["dgc:0.01,momentum=0.5", "fp16", "topk:0.5,feedback=off"]
    assert parse_codecs(", ".join(expected)) == expected
    assert [spec.partition(":")[0] for spec in parse_codecs("all")] == _core.codec_names()
    costs = _core.CodecCosts(dict.fromkeys(expected, _core.CodecCost()))
    with pytest.raises(UsageError) as unknown:  # its remedy can be followed
        costs.of("int8")
    remedy = str(unknown.value).partition("--codecs ")[2]
    assert parse_codecs(remedy) == ["int8", *costs.specs]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codecs", "zip"], "'zip' is unknown"),
        (["--codecs", "none"], "name codecs other than none"),
        (["--codecs", "fp16", "--plot", "x.png"], "cannot be combined with --codecs"),
        (["--codecs", "fp16", "--codec-time", "0"], "time above 0"),
        (["--codecs", "fp16", "--json", "no/codecs.json"], "cannot write 'no/codecs.json'"),
        pytest.param(
            ["--codecs", "fp16", "--device", "cuda"],
            _core.cuda_info().reason,
            marks=pytest.mark.skipif(bool(_core.cuda_info().devices), reason="there is a GPU"),
        ),
    ],
)
def test_codecs_that_cannot_be_measured(arguments, message):
    done = CliRunner().invoke(main, ["probe", *arguments])
    assert done.exit_code != 0
    assert message in done.output


def test_groups_end_when_the_last_of_their_operations_has():
    # Four groups of two, each kind; ends are in any order within a group.
    ends = [9.0, 8.0, 10.0, 10.5, 11.5, 12.0, 14.0, 13.0, *range(20, 28)]
    engine = SimpleNamespace(
        plan=SimpleNamespace(tensors=[None] * 8), op_times=lambda: [(0.0, end) for end in ends]
    )
    groups, others = probe._ends(engine, 2)
    assert (groups, others) == ([9.0, 10.5, 12.0, 14.0], [21, 23, 25, 27])
    assert probe._mean_s(groups) == (14.0 - 9.0) / 3
    assert probe._mean_s(groups, every=2) == (10.5 - 9.0 + 14.0 - 12.0) / 2


def test_residuals_of_a_line_and_of_none():
    sizes = [1 << k for k in range(12, 26, 2)]
    exact = [Measured("all_reduce", 1, m, 1e-3 + 1e-8 * m) for m in sizes]
    # 1 ms more for a constant time: small ones are right, what lies between is overestimated.
    step = [Measured("all_gather", 2, m, 1e-3 if m < 1 << 20 else 1e-8 * m) for m in sizes]
    outlier = [Measured("all_gather", 2, 1 << 12, 1.0), Measured("all_gather", 2, 1 << 12, 1e-4)]
    line, stepped = fit_lines(exact + step + outlier)
    assert (line.kind, line.window, len(line.points)) == ("all_reduce", 1, len(sizes))
    assert line.residual < 0.01
    assert line.cost.alpha_s == pytest.approx(1e-3, rel=0.05)
    assert all(abs(point.residual) < 0.02 for point in line.points)
    first = stepped.points[0]
    assert first.seconds == 1e-3  # the median of three
    assert first.low_s < first.seconds < first.high_s
    by_size = {point.bytes: point.residual for point in stepped.points}
    assert by_size[1 << 18] > 1
    assert abs(by_size[1 << 24]) < 0.02
    assert fit(4, exact + step).all_reduce == [line.cost]


LARGE = 1 << 24


def behind(*seconds):
    """How long a small operation took behind one large one, behind two, ..."""
    line = [Measured("all_reduce", k, m, 1e-3 + 1e-8 * m) for k in (1, 2) for m in (1 << 12, LARGE)]
    return line + [
        Measured(BUSY, ahead + 1, ahead * LARGE, s) for ahead, s in enumerate(seconds, start=1)
    ]


@pytest.mark.parametrize(
    ("seconds", "concurrent", "busy"),
    [
        ([0.05, 0.1, 0.1], 0, 0.05),
        ([0.05, 0.34], 2, 0.05),
        ([0.05, 0.1, 0.51], 3, 0.05),
        ([0.17], 1, 0.0),
        ([], 0, 0.0),
    ],
)
def test_small_operations_behind_large_ones(seconds, concurrent, busy):
    network = fit(4, behind(*seconds))
    assert network.concurrent == concurrent
    assert network.busy_alpha_s == busy


def test_a_network_in_words():
    # 2 * 3 / 4 of the bytes pass each link, at 9.4 Gb/s with two operations in flight.
    lines = [_core.AlphaBeta(1.13e-4, 2e-9, 1e-5), _core.AlphaBeta(3e-4, 1.5 * 8 / 9.4e9)]
    network = _core.NetworkModel(4, lines)
    assert in_words(network, Path("my network.json")) == (
        "The network carries 9.4 Gb/s from each rank; one all_reduce of 4 ranks takes 113 us to "
        "start. Gradients of 100 MB take 128 ms: compare that with your step, or run "
        "`usbyte whatif PROFILE --network 'my network.json'`."
    )
    told = in_words(network, None)
    assert "write the network with --json NETWORK.json and run `usbyte whatif" in told


def test_a_network_whose_bandwidth_was_not_seen():
    told = in_words(_core.NetworkModel(2, [_core.AlphaBeta(2.5e-3, 0.0)]), None)
    assert told == (
        "The bandwidth could not be measured, as large operations took no longer than small ones; "
        "one all_reduce of 2 ranks takes 2.5 ms to start. Measure again with a larger --largest."
    )


def test_what_packing_takes():
    def packed(*seconds):
        return fit(4, behind() + [Measured(PACKED, 1, 1000, s) for s in seconds]).pack_s_per_byte

    assert packed() == 0
    assert packed(2e-6, 3e-6, 90e-6) == pytest.approx(3e-9)


def test_what_one_shot_takes():
    assert fit(4, behind()).one_shot == _core.OneShot()
    alone = [Measured(ONE_SHOT, 1, 100, s) for s in (2e-3, 3e-3, 90e-3)]
    five = [Measured(SHOTS, 5, 500, s) for s in (1e-3, 11e-3, 12e-3)]
    busy = [Measured(SHOT_BUSY, 1, 100, s) for s in (4e-3, 5e-3, 90e-3)]
    shot = fit(4, [*behind(), *alone, *five, *busy]).one_shot
    assert (shot.most_bytes, shot.latency_s, shot.busy_latency_s) == (100, 3e-3, 5e-3)
    assert shot.gap_s == pytest.approx(2e-3)
    noise = Measured(SHOTS, 5, 500, 1e-3)
    assert fit(4, [*behind(), *alone, noise, *busy]).one_shot.gap_s == 0


def test_operations_too_short_to_tell():
    line = [Measured("all_reduce", 1, m, 0.1 + 1e-8 * m) for m in (1 << 12, LARGE)]
    network = fit(4, [*line, Measured(BUSY, 2, LARGE, 0.4)])
    assert (network.concurrent, network.busy_alpha_s) == (0, 0)

# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/reproduce.py` on traces that are small enough to be worked out by hand."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import click.testing
import pytest

from usbyte.planning import profiles
from usbyte.planning.layout import tensor_specs

pytestmark = pytest.mark.evidence

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def reproduce(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("reproduce")


@pytest.fixture
def folder(tmp_path):
    """vgg16: two tensors of 4 MB, with 10 ms of backward between and after them."""
    rows = [["b.weight", 1_000_000, 10_000], ["a.weight", 1_000_000, 10_000]]
    columns = ["tensor", "elements", "backward_gap_us"]
    for name in ("vgg16", "resnet50"):
        trace = {"model": name, "columns": columns, "tensors": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(trace))
    return tmp_path


def rows_of(table):
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in cells]


def test_the_page(reproduce, folder, tmp_path):
    page = tmp_path / "page.md"
    arguments = ["--profiles", str(folder), "-o", str(page)]
    done = click.testing.CliRunner().invoke(reproduce.main, arguments)
    assert done.exit_code == 0, done.output
    _, headlines, energy, earlier = page.read_text().split("\n## ")
    header, *claims = rows_of(headlines)
    assert len(claims) == len(reproduce.CLAIMS) + len(reproduce.NOT_SIMULATED)
    assert all(len(row) == len(header) for row in claims)
    assert all(row[-1] for row in claims)  # each says what differs
    by_text = {row[1]: row for row in claims}
    transformer = by_text["Transformer, 64 GPUs: 108k to 145k tokens/s (1.34x)"]
    assert transformer[2:8] == ["", "", "no trace", "", "", "not tried"]
    adatopk = next(row for row in claims if "AdaTopK" in row[1])
    assert adatopk[4] == "not simulated"
    us_byte = by_text["up to 1.56x over WFBP, 8 nodes"]
    assert us_byte[2].startswith("1.49x (zju_densenet201, US-Byte's constants, 8 ranks")
    assert us_byte[7] == "no"
    assert us_byte[3] == "auto 1.84x, ddp 1.82x"
    header, *saved = rows_of(energy)
    assert [row[:2] for row in saved] == [["bytescheduler", "17.8%"], ["wfbp", "25.1%"]]
    assert saved[0][2] == "20.6%"
    shares = [float(cell.removesuffix("%")) for cell in saved[0][4:]]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < shares[0] < 100
    header, *cases = rows_of(earlier)
    assert all(len(row) == len(header) for row in cases)
    assert [row[1] for row in cases if row[0] == "vgg16, 8 x 56G IB"] == [*reproduce.READINGS]
    assert [row[3] for row in cases if row[0].startswith("gpt2")] == ["no trace"]


def test_steps_by_hand(reproduce, folder):
    # Forward 10 ms, then b is ready at 20 and a at 30 ms. WFBP sends each when ready: on 8 x 56G
    # IB a tensor takes 0.0975 ms + 4e6 * 3.06e-7 ms = 1.3215 ms, so that b is hidden and a is not.
    jobs = reproduce.load(folder)
    found = [row for row in reproduce.against_earlier(jobs) if row[1] == "WFBP"]
    assert found[0][:4] == ("vgg16, 8 x 56G IB", "WFBP", "215", "31.3")
    assert found[0][4] == "-85.4 %"
    # On 8 x 10GbE it takes 0.523 + 3.428 = 3.951 ms: 33.951 ms with the barrier. a is needed at
    # once, so that crossing the barrier gains nothing for whole tensors.
    [claim] = [c for c in reproduce.CLAIMS if c.text == "up to 1.56x over WFBP, 8 nodes"]
    gain = reproduce.best_gain(claim, jobs, overlapping=False)
    assert gain.factor == pytest.approx(1.0)
    ethernet = next(cluster for cluster in claim.clusters if cluster.name == "8 x 10GbE")
    step_s = reproduce.VARIANTS["wfbp"].step_s(jobs["vgg16"], ethernet)
    assert step_s == pytest.approx(33.951e-3)


def test_of_several_baselines_the_best_counts(reproduce, folder):
    jobs = reproduce.load(folder)
    [claim] = [c for c in reproduce.CLAIMS if "10GbE" in c.text]
    gain = reproduce.best_gain(claim, jobs, overlapping=False)
    steps = {
        name: reproduce.VARIANTS[name].step_s(jobs["resnet50"], gain.cluster)
        for name in (*claim.baselines, claim.variant)
    }
    assert steps[gain.baseline] == min(steps[name] for name in claim.baselines)
    assert gain.factor == steps[gain.baseline] / steps[claim.variant]
    assert gain.model == "resnet50"  # of bert there is no trace


def test_modules_are_merged(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    variants = importlib.import_module("_published_policies")
    rows = [("a.bias", 0.0, 5.0), ("a.weight", 0.0, 4.0), ("b.weight", 1.0, 3.0)]
    specs = tensor_specs((name, 10, "float32") for name, *_ in rows)
    job = profiles.Profile(specs, [row[1] for row in rows], [row[2] for row in rows])
    merged = variants.merged_modules(job)
    assert [(t.name, t.numel) for t in merged.tensors] == [("a", 20), ("b", 10)]
    assert merged.need_s == [0.0, 1.0]
    assert merged.ready_s == [5.0, 3.0]


def test_a_folder_without_traces_is_an_error(reproduce, tmp_path):
    done = click.testing.CliRunner().invoke(reproduce.main, ["--profiles", str(tmp_path)])
    assert done.exit_code == 1
    assert "name a folder that holds vgg16.json" in done.output

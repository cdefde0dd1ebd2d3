# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/compression_published.py` on small traces, and the bindings that it uses."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import click.testing
import pytest

from usbyte import _core
from usbyte.errors import UsageError

pytestmark = pytest.mark.evidence

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COST = _core.CodecCost(*[_core.AlphaBeta(1e-4, 1e-10, 1e-4)] * 2)


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("compression_published")


@pytest.fixture
def schemes(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("_compression_schemes")


@pytest.fixture
def folder(tmp_path):
    rows = [["b.weight", 1_000_000, 10_000], ["a.weight", 5_000_000, 10_000], ["a.bias", 10, 5]]
    columns = ["tensor", "elements", "backward_gap_us"]
    trace = {"model": "resnet50", "columns": columns, "tensors": rows}
    (tmp_path / "resnet50.json").write_text(json.dumps(trace))
    return tmp_path


def rows_of(table):
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in cells]


def page_of(published, folder, *arguments):
    page = folder / "page.md"
    done = click.testing.CliRunner().invoke(
        published.main, ["--profiles", str(folder), "-o", str(page), *arguments]
    )
    assert done.exit_code == 0, done.output
    head, headlines, cases = page.read_text().split("\n## ")
    return head, rows_of(headlines), rows_of(cases)


def test_the_page(published, folder):
    _, (header, *claims), (titles, *cases) = page_of(published, folder)
    assert len(claims) == 12
    assert all(len(row) == len(header) and row[-1] for row in claims)
    assert [row[4] for row in claims if "10 to 314" in row[1]] == ["not tried"]  # of bert no trace
    assert len(cases) == 2 * 4 * 3  # links, models with three of Espresso's, codecs
    best = {title: titles.index(title) for title in ("uncompressed", "1 + 2", "ByteComp", "bound")}
    for row in cases:
        steps = [int(row[best[title]]) for title in best]
        assert steps == sorted(steps, reverse=True), row
        assert all(int(row[best["ByteComp"]]) <= int(other) for other in row[3:7])
    # Gradients of 24 MB over NVLink: with or without FP16 nearly all is hidden.
    nothing = next(row for row in claims if row[1] == "ResNet50, NVLink, without compression")
    assert float(nothing[2].split("%")[0]) > 90
    smaller = next(row for row in claims if row[1].startswith("the same, where layer-wise"))
    assert re.search(r"^[0-9.]+x \(\d+ to \d+ ms", smaller[2])


def test_measured_costs(published, folder):
    path = folder / "costs.txt"
    path.write_text(_core.CodecCosts({"efsignsgd": COST}).to_json())
    head, (_, *claims), (_, *cases) = page_of(published, folder, "--codec-costs", str(path))
    assert "cost what was measured: efsignsgd" in head
    assert [row[2] for row in claims if row[0].startswith("MergeComp")] == ["no trace"] * 2
    assert {row[0].split(", ")[1] for row in cases} == {"EF-SignSGD"}
    path.write_text("{}")
    done = click.testing.CliRunner().invoke(
        published.main, ["--profiles", str(folder), "--codec-costs", str(path)]
    )
    assert done.exit_code == 1
    assert "usbyte probe --codecs" in done.output


def job_of(*rows):
    return _core.CompressionJob([(n, "float32", ready_s, "efsignsgd") for n, ready_s in rows])


def free_cluster(**codecs):
    nothing = _core.CodecCosts({"efsignsgd": _core.CodecCost()})
    return _core.CompressionCluster.thakur(1, 4, 1e-3, 1e9, 0.0, 1.0, **{"gpu": nothing, **codecs})


def test_groups_are_merged_where_that_pays(schemes):
    # 20 gradients at once, 3 ms of startup each; encoding is free, so that one group is best.
    job = job_of(*[(1000, 0.01)] * 20)
    seconds, groups = schemes.mergecomp_s(job, free_cluster())
    assert groups == 1
    assert seconds == pytest.approx(0.013, abs=1e-4)
    assert schemes.layer_wise_s(job, free_cluster()) == pytest.approx(0.07, abs=1e-4)
    # What is ready much earlier goes ahead of the rest.
    early = job_of((20_000_000, 0.01), *[(20_000_000, 0.1)] * 2)
    assert schemes.mergecomp_s(early, free_cluster())[1] == 2
    merged = schemes.merged(job_of((1, 0.1), (2, 0.2), (3, 0.3)), [2, 3])
    assert [row[:3] for row in merged.tensors] == [(3, "float32", 0.2), (3, "float32", 0.3)]


def test_bindings():
    cluster = free_cluster()
    assert (cluster.nodes, cluster.ranks_per_node, cluster.ranks) == (1, 4, 4)
    tree = _core.decision_tree(cluster)
    assert "C[gpu] AG D[gpu]" in tree
    job = job_of((1_000_000, 0.1), (1_000_000, 0.11))
    found = _core.select_strategies(job, cluster)
    assert found.iteration_s == _core.compressed_iteration_s(job, cluster, found.strategies)
    assert found.iteration_s <= found.offloaded_s <= found.greedy_s < found.uncompressed_s
    assert found.simulated > 0
    plain = _core.select_strategies(job, cluster, ["AR"])
    assert plain.strategies == ["AR", "AR"]
    with pytest.raises(UsageError, match="'nothing' is none of"):
        _core.compressed_iteration_s(job, cluster, ["AR", "nothing"])
    assert _core.adatopk_ratios([4.0, 1.0], 0.1) == [0.1, 0.4]
    assert _core.adatopk_codecs([4.0, 1.0, 0.1], 0.1) == ["topk:0.1", "topk:0.4", "none"]

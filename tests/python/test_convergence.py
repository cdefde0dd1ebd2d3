# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/convergence.py` on two ranks, and how it judges."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import click.testing
import pytest

import usbyte
from usbyte import _core
from usbyte.errors import UsageError

pytestmark = pytest.mark.evidence

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: importlib.import_module(f"_convergence_{name}")


def convergence(*options, ranks=2):
    command = [sys.executable, "-m", "usbyte.launch", "-np", str(ranks), sys.executable]
    command += [str(BENCHMARKS / "convergence.py"), *map(str, options)]
    known = [str(Path(usbyte.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, known))}
    env |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_both_jobs_with_two_codecs(tmp_path):
    pytest.importorskip("matplotlib")
    result, table = tmp_path / "result.json", tmp_path / "table.md"
    done = convergence("--quick", "--json", result, "--markdown", table, "--curves", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = json.loads(result.read_text())["jobs"]
    assert [job["job"] for job in jobs] == ["digits", "char_gpt"]
    for job in jobs:
        assert job["ranks"] == 2
        assert job["skipped"] == []
        plain, rounded, sparse = job["results"].values()
        assert list(job["results"]) == ["uncompressed", "int8", "topk:0.1"]
        assert plain["worse_by"] == 0
        assert plain["message_bytes"] == plain["gradient_bytes"] > rounded["message_bytes"]
        # 8 bytes for a tenth of the elements, and biases as they are.
        assert 4 < sparse["gradient_bytes"] / sparse["message_bytes"] < 5
        for row in (plain, rounded, sparse):
            [losses] = row["losses"]
            assert len(losses) == row["steps"] // job["loss_every_steps"]
            assert len(row["scores"]) == 1
        # Compressed training is another one, from the same beginning.
        (first,), (rough,), (other,) = (row["losses"][0] for row in (plain, rounded, sparse))
        assert rough == pytest.approx(first, abs=1e-3)
        assert 0 < abs(other - first) < 0.3
        assert "<svg" in (tmp_path / f"compression_{job['job']}.svg").read_text()
    text = table.read_text()
    assert text.count("| `int8` |") == text.count("| uncompressed |") == 2


def test_bad_options(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    main = importlib.import_module("convergence").main
    for options, words in (
        (("--codecs", "int8 zip"), "'zip' is unknown"),
        (("--jobs", "x"), "digits"),
    ):
        done = click.testing.CliRunner().invoke(main, options)
        assert done.exit_code == 2
        assert words in done.output
    alone = convergence("--quick", ranks=1)
    assert alone.returncode == 1
    assert "usbyterun -np 2" in alone.stderr


def test_every_codec_has_its_place(module):
    variants = module("variants")
    names = {variant.label.partition(":")[0] for variant in variants.VARIANTS}
    assert names >= set(_core.codec_names())
    assert not next(v for v in variants.VARIANTS if "feedback=off" in v.label).may_take_longer
    labels = [variant.label for variant in variants.chosen(["int8", "topk:0.3", "signsgd"])]
    assert labels == ["uncompressed", "int8", "topk:0.3", "signsgd"]
    with pytest.raises(UsageError, match="'zip' is unknown"):
        variants.chosen(["zip"])
    assert not variants.known(variants.Variant("zip", "zip"))


def test_what_counts_as_reached(module):
    pytest.importorskip("matplotlib")
    results, variants = module("results"), module("variants")
    digits = module("jobs").digits(quick=False)  # 1 % of accuracy

    def result(*scores):
        return results.Result(
            0.1, "SGD", 20, 100, 400, list(scores), [[2.0, score] for score in scores]
        )

    scores = [(0.97, 0.99), (0.96, 0.985), (0.9, 0.99), (math.nan, 0.99)]
    labels = ["uncompressed", "int8", "onebit", "signsgd"]
    found = {label: result(*pair) for label, pair in zip(labels, scores, strict=True)}
    chosen = {v.label: v for v in variants.chosen(labels[1:])}
    trained = results.Trained(digits, 2, 10, chosen, found, ["zip"])
    assert [trained.reached(label) for label in found] == [True, True, False, False]
    rows = {row[0]: row for row in trained.rows()}
    assert rows["`int8`"][1:6] == ["97.25 %", "-0.75 %", "yes", "20", "0.9725"]
    assert rows["`onebit`"][7:] == ["4.0", "SGD, 0.1"]
    assert trained.to_markdown().endswith("does not know them: `zip`.\n")
    assert "deviation is 1.41 %" in trained.heading()
    written = json.loads(results.to_json([trained], {}))["jobs"][0]["results"]
    assert written["signsgd"]["worse_by"] is None
    assert written["int8"]["worse_by"] == pytest.approx(0.0075)
    axes = trained.curves().axes
    assert [panel.get_title() for panel in axes] == ["fewer bits", "signs"]
    # A loss is worse the larger it is.
    trained.job = dataclasses.replace(digits, percent=False, tolerance=0.05)
    assert trained.behind("int8") == pytest.approx(-0.0075)

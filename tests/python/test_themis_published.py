"""`benchmarks/themis_published.py`: what it simulates of published networks, and its page."""

from __future__ import annotations

import importlib
import re
import statistics
from pathlib import Path

import click.testing
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("themis_published")


def means(published, rules):
    found = list(published.outcomes(rules).values())
    used = [statistics.mean(u) for u in zip(*(each.utilization for each in found), strict=True)]
    return used, [each.gains[1] for each in found]


def test_one_all_reduce_is_near_what_is_published(published):
    used, gains = means(published, published.OVERLAPPING)
    for ours, theirs in zip(used, published.UTILIZATION, strict=True):
        assert ours == pytest.approx(theirs / 100, abs=0.04)
    assert statistics.mean(gains) == pytest.approx(published.SPEEDUPS[1], rel=0.05)
    assert max(gains) == pytest.approx(published.MOST, rel=0.05)


def test_trainings_gain_what_is_published_where_inputs_are(published):
    """ResNet-50 has one image for each rank, GNMT no public input: both are told on the page."""
    found = {row[0]: row for row in published.training_summary()}
    assert found["DLRM"][5].startswith("1.32x")
    assert found["Transformer-1T"][5].startswith("1.24x")


def test_nothing_is_lost(published):
    for row in published.closed_form():
        if row[3] == "no":
            assert row[-1] == "1.00x (fixed)"
        if row[0].startswith("PCIe"):
            assert float(row[5][:-1]) > 1.4  # the best share's


def test_the_page(published, tmp_path):
    page = tmp_path / "themis.md"
    done = click.testing.CliRunner().invoke(published.main, ["-o", str(page)])
    assert done.exit_code == 0, done.output
    written, kept = (path.read_text() for path in (page, ROOT / "docs" / "themis.md"))

    def lasting(text):  # neither who ran it when, nor how long planning took
        text = re.sub(r"^Written by .*$", "", text, flags=re.M)
        return re.sub(r"(?m)^(\|.*\| 64 \|) [\d.]+ \|", r"\1 |", text)

    assert lasting(written) == lasting(kept)

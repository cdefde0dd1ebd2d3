# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/sparse_published.py`: what it derives from published figures, and its page."""

from __future__ import annotations

import importlib
from pathlib import Path

import click.testing
import pytest

pytestmark = pytest.mark.evidence

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("sparse_published")


def test_gradients_are_as_published(published):
    for model in published.MODELS:
        _, chances = published.fitted(model.density)
        assert chances.mean() == pytest.approx(model.density)
        assert chances[: len(chances) // 8].sum() / chances.sum() == pytest.approx(0.6)


def test_times_by_hand(published):
    alone, together = list(published.cases())[:2]
    assert alone.model.name == "LSTM"
    assert alone.densities[0] == pytest.approx(0.0113)
    assert together.densities[0] == pytest.approx(alone.densities[7])  # eight GPUs
    elements, share, s_per_byte = 406e6, 15 / 16, 8e-9 / 25
    assert alone.seconds("dense", 25) == pytest.approx(2 * share * 4 * elements * s_per_byte)
    assert alone.seconds("agsparse", 25) == pytest.approx(15 * 0.0113 * 8 * elements * s_per_byte)
    # Sums have more than one element in 32, for which bits are shorter than numbers.
    own, whole = alone.densities[0], alone.densities[-1]
    zen = share * (8 * own + 4 * whole + 1 / 8) * elements * s_per_byte
    assert alone.seconds("zen", 25) == pytest.approx(zen)
    assert alone.seconds("zen", 100) == pytest.approx(zen / 4)


def test_the_page(published, tmp_path):
    page = tmp_path / "page.md"
    done = click.testing.CliRunner().invoke(published.main, ["-o", str(page)])
    assert done.exit_code == 0, done.output
    rows = [line for line in page.read_text().splitlines() if line.startswith("| LSTM")]
    assert len(rows) == 6  # two readings of times, two baselines, two readings of the rest
    zen, best = (next(published.cases()).seconds(s, 25) for s in ("zen", "sparcml"))
    assert f"{best / zen:.2f}x over sparcml" in rows[0]
    dense = next(published.cases()).seconds("dense", 25)
    assert rows[2].startswith(f"| LSTM | dense | 6.77x | {dense / zen:.2f}x |")


def test_a_density_by_hand(published):
    # Two words, of which one is twice as likely: two tokens miss it with chance 1/9, the other 4/9.
    assert published._drawn(2, 2) == pytest.approx((8 / 9 + 5 / 9) / 2)

# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/themis_published.py`: what it simulates of published networks, and its page."""

from __future__ import annotations

import importlib
import re
import statistics
from pathlib import Path

import click.testing
import pytest

from usbyte import _core
from usbyte.planning import topologies

pytestmark = pytest.mark.evidence

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


def alone_s(mesh, start, model_ranks, routes, queue="fifo"):
    """One collective on a network of nothing but its ranks."""
    among = mesh.among(topologies.group_sizes(mesh, start.ranks, model_ranks))
    collective = _core.MeshCollective(start.kind, start.bytes, routes(among, start))
    return _core.simulate_mesh(among, [collective], queue, True).finish_s


def fixed(mesh, _start):
    return _core.fixed_routes(mesh, 64)


def themis(mesh, start):
    return _core.themis_routes(mesh, start.kind, start.bytes, 64, "once")


def ideal_s(mesh, start, model_ranks):
    """All links at once: 1 - 1/N of a vector of N ranks, twice for an all_reduce."""
    among = mesh.among(topologies.group_sizes(mesh, start.ranks, model_ranks))
    times = 2 if start.kind == "all_reduce" else 1
    return times * start.bytes * (1 - 1 / among.ranks) / among.bytes_per_s


@pytest.mark.parametrize("name", ["resnet50", "gnmt", "transformer-1t"])
def test_where_nothing_overlaps_a_step_is_computing_and_its_collectives(published, name):
    job = topologies.load_workload(name)
    starts = [step.start for step in job.steps]
    for network in topologies.MESHES:
        mesh = topologies.load_mesh(network)
        by_hand = [
            sum(alone_s(mesh, start, job.model_ranks, *how) for start in starts)
            for how in ((fixed,), (themis,), (themis, "scf"))
        ]
        by_hand.append(sum(ideal_s(mesh, start, job.model_ranks) for start in starts))
        found = published.steps_s(job, mesh)
        assert found == pytest.approx([job.compute_s + s for s in by_hand], rel=1e-9)


def test_dlrm_exchanges_beside_its_lower_layers(published):
    """Forward: bottom, exchange beside lower layers, top; backward likewise, then gradients."""
    job = topologies.load_workload("dlrm")
    first, lower, upper, backward, lower_backward, last = (
        job.compute_scale * step.compute_s for step in job.steps
    )
    exchange, again, gradients = (step.start for step in job.steps if step.start)
    assert exchange.bytes == again.bytes
    for network in topologies.MESHES:
        mesh = topologies.load_mesh(network)
        # 64 equal chunks go through dimensions in a row, as many at once as there are dimensions.
        part = exchange.bytes / 64
        phases = []
        for d in mesh.dimensions:
            times = (d.size - 1) / 2 if d.kind == "ring" else (d.size - 1) / d.size
            phases.append(times * part / d.bytes_per_s)
        startups_s = sum(d.steps * d.latency_s for d in mesh.dimensions)
        exchange_s = sum(phases) + 63 * max(phases) + startups_s
        ideal_exchange_s = exchange.bytes * (1 - 1 / mesh.ranks) / mesh.bytes_per_s

        def step_s(exchange_s, gradients_s):
            forward = first + max(exchange_s, lower) + upper
            return forward + backward + max(exchange_s, lower_backward) + last + gradients_s

        by_hand = [
            step_s(exchange_s, alone_s(mesh, gradients, 1, *how))
            for how in ((fixed,), (themis,), (themis, "scf"))
        ]
        by_hand.append(step_s(ideal_exchange_s, ideal_s(mesh, gradients, 1)))
        assert published.steps_s(job, mesh) == pytest.approx(by_hand, rel=1e-9)


def test_trainings_gain_what_is_published_where_inputs_are(published):
    """ResNet-50 has one image for each rank, GNMT no public input: both are told on the page."""
    found = {row[0]: float(row[5].split("x")[0]) for row in published.training_summary()}
    later = {training.model: training.later[0] for training in published.TRAININGS}
    for model, within in (("DLRM", 0.05), ("Transformer-1T", 0.02)):
        assert found[model] == pytest.approx(later[model], rel=within)


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

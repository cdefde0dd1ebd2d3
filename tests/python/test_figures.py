# SPDX-License-Identifier: Apache-2.0
"""Pictures of `usbyte whatif` and `usbyte probe`, by matplotlib's artists."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from usbyte import _core
from usbyte.cli import _figures
from usbyte.planning.cost_fit import Measured, fit_lines
from usbyte.planning.layout import tensor_specs
from usbyte.planning.whatif import examine


def test_what_is_needed_is_explained():
    specs = tensor_specs([("a", 1_000_000, "float32")])
    job = _core.Profile(specs, [0.0], [0.1])
    rings = [_core.NetworkModel.ring(n, 1e-6, rate) for n in (8, 48) for rate in (1e8, 1e9)]
    points = [examine(job, ring, 0.9) for ring in rings]
    figure = _figures.scaling_by_bandwidth([("a $ job", points)])
    upper, lower = figure.axes
    assert upper.get_title() == "a $ job\nscaling; grey: the target, 0.9 of linear"
    assert lower.get_title() == "needed: how many times fewer bytes reach 0.9 of linear"
    assert [label.get_text() for label in lower.get_xticklabels()] == ["800mbit", "8gbit"]
    assert figure.get_supxlabel() == ""
    slow = examine(job, _core.NetworkModel.ring(8, 1.0, 1e8), 0.9)
    figure = _figures.scaling_by_bandwidth([("job", [slow])])
    assert "no compression is enough" in figure.get_supxlabel()


def test_costs_are_in_units():
    rows = [
        Measured("all_reduce", window, size * window, 5e-4 + 1e-9 * size * window)
        for window in (1, 2)
        for size in (1 << 16, 1 << 18, 1 << 20, 1 << 22)
    ]
    figure = _figures.costs(fit_lines(rows))
    figure.draw_without_rendering()
    [panel] = figure.axes

    def shown(axis, limits):
        low, high = limits
        return [
            label.get_text()
            for place, label in zip(
                axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True
            )
            if low <= place <= high
        ]

    sizes = shown(panel.xaxis, panel.get_xlim())
    assert sizes == ["64 KiB", "256 KiB", "1 MiB", "4 MiB"]
    assert shown(panel.yaxis, panel.get_ylim()) == ["0.5 ms", "1 ms", "2 ms", "5 ms", "10 ms"]
    assert {label.get_text() for label in panel.yaxis.get_minorticklabels()} <= {""}

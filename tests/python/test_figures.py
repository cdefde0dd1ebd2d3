# SPDX-License-Identifier: Apache-2.0
"""Pictures of `usbyte simulate`, `usbyte whatif` and `usbyte probe`, by matplotlib's artists."""

from __future__ import annotations

import itertools

import click.testing
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

from matplotlib.text import Text

from usbyte import _core
from usbyte.cli import _figures, _step_figure, main
from usbyte.cli._case import Case
from usbyte.planning.cost_fit import Measured, fit_lines
from usbyte.planning.layout import tensor_specs
from usbyte.planning.whatif import examine


def case(spec, workers, step_s, bound_s, rate=1.25e9):
    overlap, _, policy = spec.rpartition(":")
    return Case(
        "job", workers, rate, 25e-6, False, overlap or "forward", False, policy, 1, step_s, bound_s,
        0.1, 0.1,
    )  # fmt: skip


#: Milliseconds of a step on 2 and 8 workers.
STEPS = {
    "p3": (900, 9000), "far": (110, 160), "auto": (101, 110), "ddp": (120, 140),
    "good": (104, 115), "equal": (101, 110), "worse": (106, 118), "backward:ddp": (130, 150),
}  # fmt: skip


def cases():
    return [
        case(spec, workers, ms * 1e-3, bound_ms * 1e-3)
        for spec, steps in STEPS.items()
        for workers, ms, bound_ms in zip((2, 8), steps, (100, 109), strict=True)
    ]


def names_of(panel):
    return [text.get_text() for text in panel.texts]


def by_label(panel):
    """The lines that have names."""
    return {line.get_label(): line for line in panel.lines if not line.get_label().startswith("_")}


def test_five_lines_have_names_and_the_others_are_grey():
    figure = _step_figure.steps_by_workers(cases())
    [panel] = figure.axes
    assert (panel.get_title(), figure.legends, panel.get_legend()) == ("job, 10gbit", [], None)
    # From below; "equal" and "good" are the two best of the others.
    assert names_of(panel) == ["bound", "auto", "equal", "good", "backward:ddp"]
    assert {t.get_text() for t in panel.texts if t.get_fontweight() == "bold"} == {"auto"}
    lines = by_label(panel)
    assert set(lines) == set(names_of(panel))
    assert list(lines["auto"].get_ydata()) == pytest.approx([101, 110])
    assert list(lines["bound"].get_ydata()) == pytest.approx([100, 109])
    assert lines["auto"].get_linewidth() > lines["good"].get_linewidth()
    assert lines["auto"].get_zorder() < lines["equal"].get_zorder()  # shows on both sides of it
    assert len({line.get_color() for line in lines.values()}) == 5
    grey = [line for line in panel.lines if line not in lines.values()]
    assert [list(line.get_ydata()) for line in grey] == [
        pytest.approx(STEPS[spec]) for spec in ("worse", "ddp", "far", "p3")
    ]
    assert {line.get_color() for line in grey} == {"#c4c4c4"}
    caption = figure.get_supxlabel()
    assert caption.startswith("grey: all other policies (4), as far")
    assert "backward:ddp is PyTorch DDP" in caption
    # p3 and "far" do not squeeze the named lines.
    low, high = panel.get_ylim()
    assert 95 < low < 100
    assert 150 < high < 155


def test_a_name_has_one_colour_in_all_panels():
    other = [
        case(c.spec, c.workers, c.step_s * (3 if c.spec == "good" else 1), c.bound_s, 2.5e9)
        for c in cases()
    ]
    figure = _step_figure.steps_by_workers([*cases(), *other])
    first, second = figure.axes
    assert names_of(second) == ["bound", "auto", "equal", "worse", "backward:ddp"]
    one, two = by_label(first), by_label(second)
    for name in ("auto", "equal", "backward:ddp", "bound"):
        assert one[name].get_color() == two[name].get_color()
    assert two["worse"].get_color() not in {line.get_color() for line in one.values()}


def test_auto_and_ddp_are_those_that_users_know():
    mixed = [c for c in cases() if c.spec in ("auto", "ddp", "backward:ddp")]
    mixed += [case("backward:auto", c.workers, 0.2, c.bound_s) for c in mixed[:2]]
    mixed += [case("sharded:auto", c.workers, 0.2, c.bound_s) for c in mixed[:2]]
    [panel] = _step_figure.steps_by_workers(mixed).axes
    assert [t.get_text() for t in panel.texts if t.get_fontweight() == "bold"] == ["auto"]
    assert {"backward:ddp", "ddp"} < set(names_of(panel))


def test_few_policies_all_have_names():
    few = [c for c in cases() if c.spec in ("ddp", "good")]
    figure = _step_figure.steps_by_workers(few)
    assert names_of(figure.axes[0]) == ["bound", "good", "ddp"]
    assert figure.get_supxlabel() == ""
    assert len(figure.axes[0].lines) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["resnet50", "--scale-time", "0.1", "--bandwidth", "25gbit"],
        ["vgg16"],
        ["vgg16", "resnet50", "--scale-time", "0.02", "--bandwidth", "10gbit,100gbit"],
        ["vgg16", "--policies", "ddp,backward:wfbp", "--workers", "2,8"],
        ["vgg16", "--policies", "auto", "--workers", "8"],
        ["resnet50", "--scale-time", "0.02", "--shard-optimizer"],
    ],
)
def test_names_do_not_overlap(arguments, monkeypatch):
    drawn = []
    monkeypatch.setattr(_figures, "save", lambda figure, _: drawn.append(figure))
    done = click.testing.CliRunner().invoke(main, ["simulate", *arguments, "--plot", "x.png"])
    assert done.exit_code == 0, done.output
    [figure] = drawn
    figure.draw_without_rendering()
    assert figure.axes
    boxes = []
    for panel in figure.axes:
        here = [Text.get_window_extent(text) for text in panel.texts]  # without the arrows
        assert 2 <= len(here) <= 5
        assert all(box.x0 > panel.bbox.x1 for box in here)
        boxes += [*here, panel.bbox]
        # Names are the table's, and the named lines fill the panel.
        assert set(names_of(panel)) <= set(done.output.split())
        values = [y for line in by_label(panel).values() for y in line.get_ydata()]
        low, high = panel.get_ylim()
        assert low < min(values) <= max(values) < high
        assert high - low <= max(1.2 * (max(values) - min(values)), 2e-3 * high)
    assert not any(one.overlaps(two) for one, two in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5).map(sorted))
def test_heights_move_apart_no_further_than_they_must(heights):
    gap, found = _step_figure._GAP, _step_figure._apart(heights)
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(found))
    assert found[0] >= -1e-9
    assert found[-1] <= 1 + 1e-9
    if all(b - a >= gap for a, b in itertools.pairwise(heights)):
        assert found == pytest.approx(heights)

    def moved(places):
        return sum((a - b) ** 2 for a, b in zip(places, heights, strict=True))

    # Moving any of them, or several together, is no improvement.
    for i, j in itertools.combinations(range(len(found) + 1), 2):
        for by in (-1e-3, 1e-3):
            other = [h + by * (i <= k < j) for k, h in enumerate(found)]
            allowed = other[0] >= 0 and other[-1] <= 1
            if allowed and all(b - a >= gap for a, b in itertools.pairwise(other)):
                assert moved(other) >= moved(found)


def test_equal_names_lie_around_the_end_of_their_lines():
    gap = _step_figure._GAP
    assert _step_figure._apart([0.5, 0.5, 0.5]) == pytest.approx([0.5 - gap, 0.5, 0.5 + gap])
    assert _step_figure._apart([0.0, 0.0]) == pytest.approx([0.0, gap])
    assert _step_figure._apart([1.0, 1.0]) == pytest.approx([1 - gap, 1.0])


def test_a_codec_is_in_the_title():
    coded = Case("job", 2, 1.25e9, 0, False, "forward", False, "auto", 1, 0.2, 0.1, 0.1, 0.1, "f")
    assert _step_figure.steps_by_workers([coded]).axes[0].get_title() == "job by f, 10gbit"


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

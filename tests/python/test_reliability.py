# SPDX-License-Identifier: Apache-2.0
"""Every fault of docs/reliability.md, as real processes: what ranks report, and what is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from _fault_cases import BOUNDS_S, CASES, Case, LabCase, kind_of, matches, steps_of
from _faults import CULPRIT
from _reliability_page import LAUNCHER, Row, launcher, page
from usbyte.lab.system_commands import unusable

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
rows: dict[str, Row] = {}


@pytest.fixture(scope="module", autouse=True)
def written(request):
    """Writes the page after the tests, if asked to."""
    yield
    path = request.config.getoption("--reliability")
    if path:
        Path(path).write_text(page([rows[case.what] for case in CASES if case.what in rows]))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.what.replace(" ", "-"),
            marks=[pytest.mark.netns] if isinstance(case, LabCase) else [],
        )
        for case in CASES
    ],
)
def test_fault(case: Case, tmp_path: Path) -> None:
    if isinstance(case, LabCase) and (reason := unusable()):
        pytest.skip(reason)
    steps = steps_of(kind_of(case))
    found = case.run(tmp_path)
    told, left, seconds = {}, {}, 0.0
    for rank, ended in enumerate(found):
        if ended is None:
            assert rank in case.gone
            continue
        told[rank] = ended["told"]
        left[rank] = f"step {steps[ended['left']]}" if ended["left"] in steps else ended["left"]
        seconds = max(seconds, ended["seconds"])
    for rank in told:
        here = rank == CULPRIT
        assert matches((case.culprit if here else case.told) or "", told[rank]), told
        assert matches(f"{case.culprit_state if here else case.state}", left[rank]), left
    assert seconds <= BOUNDS_S[case.bound]
    rows[case.what] = Row(case, told, left, seconds)


def test_the_page_has_all_faults(request):
    if request.config.getoption("--reliability"):
        pytest.skip("it is being written")
    text = PAGE.read_text()
    assert len(CASES) >= 20
    for case in CASES:
        assert f"| {case.what} |" in text, f"run: make reliability ({case.what} is missing)"


def test_the_page_has_the_launchers_faults_and_their_tests():
    assert PAGE.read_text().endswith(launcher()), "run: make reliability"
    for _, _, test in LAUNCHER:
        file, name = test.split()
        assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text(), test

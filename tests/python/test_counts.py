# SPDX-License-Identifier: Apache-2.0
"""`tools/test_counts.py`: the line that ends `make test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "test_counts.py"
CTEST = """<?xml version="1.0"?><testsuite name="Linux" tests="3" failures="0">
<testcase name="A.B" status="run"><system-out>fine</system-out></testcase>
<testcase name="A.C" status="run"/>
<testcase name="A.D" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/></testcase>
</testsuite>"""
PYTEST = """<testsuites><testsuite name="pytest">
<testcase name="test_a"/>
<testcase name="test_b"><failure message="assert 0"/></testcase>
<testcase name="test_c"/><testcase name="test_c"><error message="teardown"/></testcase>
</testsuite></testsuites>"""


def counts(*reports: Path) -> tuple[int, str]:
    command = [sys.executable, str(TOOL), *map(str, reports)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_counts_of_both_runners_in_one_line(tmp_path: Path) -> None:
    ctest, pytest = tmp_path / "ctest.xml", tmp_path / "pytest.xml"
    ctest.write_text(CTEST)
    assert counts(ctest) == (0, "ctest: 2 passed, 0 failed, 1 skipped\n")
    pytest.write_text(PYTEST)
    line = "ctest: 2 passed, 0 failed, 1 skipped; pytest: 2 passed, 2 failed, 0 skipped\n"
    assert counts(ctest, pytest) == (1, line)


def test_a_runner_that_did_not_end_is_a_failure(tmp_path: Path) -> None:
    pytest, none = tmp_path / "pytest.xml", tmp_path / "none.xml"
    pytest.write_text(PYTEST[:80])
    none.write_text("<testsuites/>")
    line = "ctest: did not end; pytest: did not end; none: 0 passed, 0 failed, 0 skipped\n"
    assert counts(tmp_path / "ctest.xml", pytest, none) == (1, line)

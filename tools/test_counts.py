# SPDX-License-Identifier: Apache-2.0
"""Prints the counts of JUnit reports in one plain line: test_counts.py REPORT..."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

COUNTS = ("passed", "failed", "skipped")


def count(report: Path) -> dict[str, int]:
    """Counts the tests of a report by their outcome.

    Raises:
        OSError: The report is not there, because its tests did not run.
        xml.etree.ElementTree.ParseError: The tests ended before they had written it.
    """
    found = dict.fromkeys(COUNTS, 0)
    for case in ET.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            found["failed"] += 1
        else:
            found["skipped" if "skipped" in outcomes else "passed"] += 1
    return found


def main(reports: list[str]) -> int:
    """Prints the line. Returns 1 if a test failed or a report is missing."""
    parts, good = [], True
    for name in reports:
        path = Path(name)
        try:
            counts = count(path)
        except (OSError, ET.ParseError):
            parts.append(f"{path.stem}: did not end")
            good = False
            continue
        good = good and counts["failed"] == 0 and counts["passed"] > 0
        parts.append(f"{path.stem}: " + ", ".join(f"{counts[kind]} {kind}" for kind in COUNTS))
    print("; ".join(parts))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

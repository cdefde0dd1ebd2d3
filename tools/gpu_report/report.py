# SPDX-License-Identifier: Apache-2.0
"""The report: Markdown for people, JSON for programs, and a log of all outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_report.machine import slug
from gpu_report.running import NOT_RUN, SKIPPED, Outcome
from gpu_report.targets import Target, targets

_LONGEST_LIST = 12
_LOG_BYTES = 1 << 20  # The log has only so many bytes of each part, from its end.


class Report:
    """The report of the parts that have run so far.

    Args:
        facts: Facts about the machine by name; "GPU" gives the file names.
        folder: Folder of the report's files.
        logs: Folder of the parts' outputs.

    Attributes:
        markdown: Path of the Markdown file.
    """

    def __init__(self, facts: dict[str, object], folder: Path, logs: Path) -> None:
        self._facts, self._logs = facts, logs
        self._outcomes: list[Outcome] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.markdown = folder / f"{slug(str(facts['GPU']))}.md"
        self._json = self.markdown.with_suffix(".json")

    @property
    def good(self) -> bool:
        """Whether no part failed, timed out or had no time left."""
        return all(outcome.good for outcome in self._outcomes)

    def add(self, outcome: Outcome) -> None:
        """Adds a part's outcome and writes all files, as the next part may end the whole run."""
        self._outcomes.append(outcome)
        found = {
            "machine": self._facts,
            "good": self.good,
            "targets": [asdict(target) for target in self._targets()],
            "parts": [asdict(part) for part in self._outcomes],
        }
        _replace(self._json, json.dumps(found, indent=1) + "\n")
        _replace(self.markdown, self.text())
        _replace(self.markdown.with_suffix(".log"), self._log())

    def text(self) -> str:
        """Returns the report in Markdown."""
        lines = [f"# {self._facts['GPU']}", ""]
        lines += ["Written by `make gpu-test`; [README.md](README.md) tells what is checked.", ""]
        lines += table(("machine", ""), [(name, str(value)) for name, value in self._facts.items()])
        lines += ["", "## Verdicts", ""]
        rows = [
            (part.title, part.verdict, f"{part.seconds:.0f}", part.reason)
            for part in self._outcomes
        ]
        lines += table(("part", "verdict", "s", "why"), rows)
        lines += ["", "## Targets", ""]
        wanted = [(t.what, t.measured, t.wanted, t.verdict) for t in self._targets()]
        lines += table(("what", "measured", "target", ""), wanted)
        for part in self._outcomes:
            lines += ["", *_section(part)]
        lines += ["", "## Not run", "", *(self._left_out() or ["Everything was run."])]
        text = "\n".join(lines) + "\n"
        return re.sub(r"\n{3,}", "\n\n", text)

    def summary(self) -> str:
        """Returns a few lines for the terminal."""
        rows = [("part", "verdict", "why")]
        rows += [(part.name, part.verdict, part.reason) for part in self._outcomes]
        goals = [("target", "measured", "wanted", "")]
        goals += [(t.what, t.measured, t.wanted, t.verdict) for t in self._targets()]
        return "\n".join(
            ["", *_aligned(rows), "", *_aligned(goals), "", f"report: {self.markdown}"]
        )

    def _log(self) -> str:
        """Returns the outputs of all parts, in order."""
        found = []
        for part in self._outcomes:
            path = self._logs / f"{part.name}.log"
            if path.exists():
                text = path.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
                found.append(f"===== {part.name}: {part.verdict}\n{text}\n")
        return "".join(found)

    def _targets(self) -> list[Target]:
        return targets({part.name: part for part in self._outcomes})

    def _left_out(self) -> list[str]:
        lines = [
            f"- {part.title} ({part.verdict}): {part.reason}. `{part.command}`"
            for part in self._outcomes
            if part.verdict in (SKIPPED, NOT_RUN)
        ]
        for part in self._outcomes:
            skipped = part.data.get("skipped", {}) if isinstance(part.data, dict) else {}
            lines += [f"- {part.title}, {what}: {why}" for what, why in skipped.items()]
        return lines


def _section(part: Outcome) -> list[str]:
    lines = [f"## {part.title}", ""]
    if part.command:
        lines += [f"`{part.command}`", ""]
    if part.meaning:
        lines += ["```", part.meaning, "```"] if "\n" in part.meaning else [part.meaning]
    lines += [f"- {line}" for line in part.quoted]
    data = part.data if isinstance(part.data, dict) else {}
    if columns := data.get("columns"):
        lines += ["", *(f"- {name}: {meaning}" for name, meaning in columns.items())]
    for note in data.get("notes", []):
        lines += ["", str(note).replace("\n", " ")]
    numbers = {k: v for k, v in data.items() if isinstance(v, int | float | str)}
    if numbers:
        lines += ["", *table(("", ""), [(_heading(k), shown(k, v)) for k, v in numbers.items()])]
    for name, rows in data.items():
        tabular = isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
        if tabular and name != "targets":  # The targets have their own section.
            lines += ["", *([f"{name}:", ""] if name != "rows" else []), *_of_rows(rows)]
    return lines


def _of_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row if not _long(row[name])))
    cells = [tuple(shown(name, row.get(name)) for name in names) for row in rows]
    return table([_heading(name) for name in names], cells)


def _long(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and len(value) > _LONGEST_LIST)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    cells = ((cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows)
    return lines + [f"| {' | '.join(row)} |" for row in cells]


def _heading(name: str) -> str:
    """Returns a column's name without its unit, which is in the cells."""
    if name == "bytes_per_s":
        return "rate"
    if name.endswith("_per_s") and not name.endswith("bytes_per_s"):
        return name.replace("_", " ")
    for unit in ("_bytes_per_s", "_s", "_bytes"):
        if name.endswith(unit):
            return name.removesuffix(unit).replace("_", " ")
    return name.replace("_", " ")


def shown(name: str, value: object) -> str:
    """Formats a value with the unit that its name ends with."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("bytes_per_s"):
        return f"{value / 1e9:.4g} GB/s"
    if name.endswith("_s") and not name.endswith("_per_s"):
        return seconds(value)
    if name.endswith("bytes"):
        return _bytes(int(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def seconds(value: float) -> str:
    """Formats a time in us, ms or s."""
    for limit, unit, scale in ((1e-3, "us", 1e6), (1.0, "ms", 1e3)):
        if abs(value) < limit:
            return f"{value * scale:.4g} {unit}"
    return f"{value:.4g} s"


def _bytes(value: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << shift:
            return f"{value / (1 << shift):.4g} {unit}"
    return f"{value} B"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _replace(path: Path, text: str) -> None:
    """Writes the file atomically, since the run may be killed at any time."""
    fresh = path.with_name(f".{path.name}.part")
    fresh.write_text(text)
    fresh.replace(path)

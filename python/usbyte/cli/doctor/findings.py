# SPDX-License-Identifier: Apache-2.0
"""The findings of `usbyte doctor`, and their output as a table, plain text or JSON."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES = {"ok": "", "warning": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: Heading of the line.
        name: The thing that was examined.
        value: The result.
        status: "ok"; "warning": may be a problem; "broken": usbyte does not work here.
        remedy: What the user should do; "" for nothing.
    """

    section: str
    name: str
    value: str
    status: Literal["ok", "warning", "broken"] = "ok"
    remedy: str = ""


def guarded(section: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yields the findings of `look`; an exception becomes a finding, so that others still run."""
    try:
        yield from look()
    except Exception as error:
        text = f"cannot be examined: {type(error).__name__}: {error}"
        yield Finding(section, section, text, "warning", "Report this bug of the doctor.")


def show(findings: Sequence[Finding], as_json: bool) -> None:
    """Prints the findings as JSON, or as a table on a terminal, or else as plain lines."""
    broken = [finding for finding in findings if finding.status == "broken"]
    if as_json:
        found = {"healthy": not broken, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(found, indent=2))
        return
    console = Console()
    if console.is_terminal:
        console.print(_table(findings))
    else:
        for line in _lines(findings):
            click.echo(line)
    names = ", ".join(f"{finding.section}: {finding.name}" for finding in broken)
    click.echo(f"broken: {names}" if broken else "everything works")


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    width = max((len(finding.name) for finding in findings), default=0)
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            yield section
        mark = "" if finding.status == "ok" else f"{finding.status.upper()}: "
        yield f"  {finding.name:{width}}  {mark}{finding.value}"
        if finding.remedy:
            yield f"  {'':{width}}  remedy: {finding.remedy}"


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("", "", "", show_header=False)
    section = ""
    for finding in findings:
        if finding.section != section and section:
            table.add_section()
        heading = finding.section if finding.section != section else ""
        section = finding.section
        # As Text: rich reads brackets in plain strings as markup.
        value = Text(finding.value, style=_STYLES[finding.status])
        if finding.remedy:
            value.append(f"\n{finding.remedy}", style="italic")
        table.add_row(Text(heading, style="bold"), finding.name, value)
    return table

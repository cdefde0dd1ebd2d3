# SPDX-License-Identifier: Apache-2.0
"""Measures the figures of the documentation, and renders them into its pages.

    python tools/docs_data.py measure NAME...   # runs the command of docs/data/NAME.json
    python tools/docs_data.py render            # writes all tables into the pages
    python tools/docs_data.py check             # fails where a page differs, or a figure is old

A figure is a file of docs/data. Its command, what runs before and after it, and the paths that it
measures are written by hand; the rest is written by `measure`. Pages, the README among them, show
tables of a figure between two comments:

    <!-- data: NAME -->            all tables, with the command and where it was measured
    <!-- data: NAME 2 bare -->     the second table alone
    <!-- end of data -->
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
#: A figure is old once this many commits have changed what it measures.
OLD_COMMITS = 200
_MARKED = re.compile(
    r"(<!-- data: (?P<name>[\w.-]+)(?: (?P<table>\d+))?(?P<bare> bare)? -->\n)"
    r".*?(?P<end>^<!-- end of data -->$)",
    re.DOTALL | re.MULTILINE,
)
_RANK = re.compile(r"^\[\d+\] ?")  # which rank has printed a line, by a launcher


class DataError(click.ClickException):
    """A figure or a page is not as it should be; the message says which, and what to do."""


def tables_of(output: str) -> list[dict[str, Any]]:
    """Finds the tables of a command's output.

    They are in Markdown, in boxes as rich draws them, or in columns two spaces apart as the C++
    benchmarks print them.

    Returns:
        For each table `heading`, the line of text before it, or ""; `columns`; `rows`.
    """
    lines = [_RANK.sub("", line).strip() for line in output.splitlines()]
    found: list[dict[str, Any]] = []
    heading = ""
    for is_row, group in groupby(lines, key=lambda line: line[:1] in tuple("|┃│┏┡├└")):
        block = list(group)
        if not is_row:
            heading = next((line for line in reversed(block) if line), "")
            continue
        cells = [
            [cell.strip() for cell in re.split("[|┃│]", line[1:-1])]
            for line in block
            if line[0] in "|┃│" and not re.fullmatch(r"\|(:?-+:?\|)+", line.replace(" ", ""))
        ]
        found.append({"heading": heading, "columns": cells[0], "rows": cells[1:]})
    return found or _in_columns(lines)


def _in_columns(lines: list[str]) -> list[dict[str, Any]]:
    """The table of a C++ benchmark; its lines with # are remarks."""
    rows = [re.split(r"\s{2,}", line) for line in lines if line and line[0] != "#"]
    if len(rows) < 2 or len({len(row) for row in rows}) > 1 or len(rows[0]) < 2:
        return []
    remarks = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    return [{"heading": "; ".join(remarks), "columns": rows[0], "rows": rows[1:]}]


def _git(*arguments: str, root: Path) -> str | None:
    """Output of a git command; None if it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _machine() -> str:
    """Cores, memory and system of this machine, in words."""
    cpu = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = platform.release().partition("-")[0]
    return f"{cores} cores of {cpu}, {gib:.0f} GiB, Linux {system}"


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "torch": version("torch")}
    with contextlib.suppress(ModuleNotFoundError):
        found["Horovod"] = version("horovod")
    return found


def load(name: str, root: Path = ROOT) -> dict[str, Any]:
    """Reads a figure.

    Raises:
        DataError: There is none of that name, or it is not complete.
    """
    path = root / "docs" / "data" / f"{name}.json"
    try:
        figure: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = sorted(each.stem for each in path.parent.glob("*.json"))
        raise DataError(f"no figure '{name}' in docs/data; there are {', '.join(known)}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"docs/data/{name}.json is no JSON: {error}") from None
    for key in ("command", "measures"):
        if not figure.get(key):
            raise DataError(f"docs/data/{name}.json has no '{key}'; write it by hand")
    return figure


def measure(name: str, root: Path = ROOT) -> None:
    """Runs the command of a figure and writes what it has printed into its file.

    Raises:
        DataError: Something measured is not committed, or a command fails or prints no table.
    """
    figure = load(name, root)
    changed = _git("status", "--porcelain", "--", *figure["measures"], root=root)
    if changed != "":
        raise DataError(
            f"commit or undo these changes first, as '{name}' measures them:\n{changed}"
        )
    environment = {
        **os.environ,
        "PATH": f"{root / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    if figure.get("environment"):
        environment |= figure["environment"]

    def run(command: str) -> str:
        click.echo(f"$ {command}", err=True)
        done = subprocess.run(
            command, shell=True, executable="/bin/bash", cwd=root, env=environment,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        click.echo(done.stdout, nl=False)
        if done.returncode:
            raise DataError(f"'{command}' ended with {done.returncode}")
        return done.stdout

    try:
        for command in figure.get("before", ()):
            run(command)
        output = run(figure["command"])
    finally:
        for command in figure.get("after", ()):
            run(command)
    tables = tables_of(output)
    if not tables:
        raise DataError(f"'{figure['command']}' has printed no table")
    figure["measured"] = {
        "date": datetime.date.today().isoformat(),
        "commit": _git("rev-parse", "--short=10", "HEAD", root=root),
        "machine": _machine(),
        "versions": _versions(),
    }
    figure["tables"] = tables
    path = root / "docs" / "data" / f"{name}.json"
    path.write_text(json.dumps(figure, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _text(name: str, number: int | None, bare: bool, root: Path) -> str:
    """What a page shows of a figure."""
    figure = load(name, root)
    tables = figure.get("tables", [])
    if not tables or (number is not None and not 1 <= number <= len(tables)):
        raise DataError(
            f"docs/data/{name}.json has {len(tables)} tables: run "
            f"`python tools/docs_data.py measure {name}`, or show another one"
        )
    parts = []
    for table in tables if number is None else [tables[number - 1]]:
        lines = [f"| {' | '.join(table['columns'])} |", "|---" * len(table["columns"]) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in table["rows"]]
        heading = table["heading"].rstrip(":.")
        parts += [f"{heading}:\n"] if heading and not bare else []
        parts.append("\n".join(lines) + "\n")
    if not bare:
        commands = (*figure.get("before", ()), figure["command"], *figure.get("after", ()))
        parts.insert(0, "```sh\n" + "\n".join(commands) + "\n```\n")
        measured = figure["measured"]
        versions = ", ".join(f"{what} {number}" for what, number in measured["versions"].items())
        parts.append(
            f"*{measured['date']}, version {measured['commit']}: {measured['machine']}, "
            f"{versions}.*\n"
        )
    return "\n".join(parts)


def pages(root: Path = ROOT) -> Iterator[Path]:
    """All pages that may show figures."""
    yield root / "README.md"
    yield from sorted((root / "docs").rglob("*.md"))


def rendered(text: str, root: Path = ROOT) -> str:
    """Returns a page with its tables as docs/data has them."""

    def shown(found: re.Match[str]) -> str:
        number = int(found["table"]) if found["table"] else None
        body = _text(found["name"], number, bool(found["bare"]), root)
        return f"{found[1]}\n{body}\n{found['end']}"

    if text.count("<!-- data:") != len(_MARKED.findall(text)):
        raise DataError("a table has no line `<!-- end of data -->`, or a line before is malformed")
    return _MARKED.sub(shown, text)


def problems(root: Path = ROOT, old_commits: int = OLD_COMMITS) -> Iterator[str]:
    """Where pages and data differ, and figures that are old or that no page shows."""
    used = set()
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        place = page.relative_to(root)
        used |= {found["name"] for found in _MARKED.finditer(text)}
        try:
            new = rendered(text, root)
        except DataError as error:
            yield f"{place}: {error.message}"
            continue
        for number, (is_, should) in enumerate(
            zip(text.splitlines(), new.splitlines(), strict=False), 1
        ):
            if is_ != should:
                yield (
                    f"{place}:{number} differs from docs/data; run `python tools/docs_data.py "
                    f"render`\n  page: {is_}\n  data: {should}"
                )
                break
        else:
            if text != new:
                yield f"{place}: lines are missing; run `python tools/docs_data.py render`"
    shallow = _git("rev-parse", "--is-shallow-repository", root=root) != "false"
    for path in sorted((root / "docs" / "data").glob("*.json")):
        if path.stem not in used:
            yield f"docs/data/{path.name} is shown by no page; delete it"
            continue
        figure = load(path.stem, root)
        if shallow or "measured" not in figure:  # Without its history an age is not known.
            continue
        commit = figure["measured"]["commit"]
        count = _git("rev-list", "--count", f"{commit}..HEAD", "--", *figure["measures"], root=root)
        again = f"measure it again: `python tools/docs_data.py measure {path.stem}`"
        if count is None:
            yield f"docs/data/{path.name} was measured at {commit}, which is no commit; {again}"
        elif int(count) > old_commits:
            yield f"docs/data/{path.name} is {count} commits old, more than {old_commits}; {again}"


@click.group()
def main() -> None:
    """Measure the figures of the documentation, render them, and check them."""


@main.command("measure")
@click.argument("names", nargs=-1, required=True)
def measure_command(names: tuple[str, ...]) -> None:
    """Run the commands of figures, write docs/data, and render the pages."""
    for name in names:
        measure(name)
    render_command.callback()  # type: ignore[misc]


@main.command("render")
def render_command() -> None:
    """Write the tables of docs/data into the pages."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        try:
            new = rendered(text)
        except DataError as error:
            raise DataError(f"{page.relative_to(ROOT)}: {error.message}") from None
        if new != text:
            page.write_text(new, encoding="utf-8")
            click.echo(f"wrote {page.relative_to(ROOT)}")


@main.command("check")
def check_command() -> None:
    """Fail where pages and data differ, and where a figure is old."""
    found = list(problems())
    for problem in found:
        click.echo(problem, err=True)
    if found:
        sys.exit(1)
    count = len(list((ROOT / "docs" / "data").glob("*.json")))
    click.echo(f"docs/data: {count} figures, all as in the pages, none more than {OLD_COMMITS} "
               "commits old")  # fmt: skip


if __name__ == "__main__":
    main()

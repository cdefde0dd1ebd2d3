# SPDX-License-Identifier: Apache-2.0
"""`tools/docs_data.py`: figures of docs/data, measured, rendered into pages, and checked."""

from __future__ import annotations

import importlib
import json
import subprocess
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PAGE = "# Numbers\n\n<!-- data: speed -->\n<!-- end of data -->\n"
TABLE = "two jobs:\n\n| job | ms |\n|---|---|\n| a | 1.5 |\n| b | 2.5 |\n"


@pytest.fixture
def data(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("docs_data")


def git(root, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)
    return done.stdout.decode().strip()


def commit(root, content):
    (root / "code.py").write_text(content)
    git(root, "add", "-A")
    git(root, "commit", "-qm", content)


@pytest.fixture
def project(tmp_path, data):
    """A repository whose page shows one figure, measured at its first commit."""
    (tmp_path / "docs" / "data").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Project\n")
    (tmp_path / "docs" / "numbers.md").write_text(PAGE)
    (tmp_path / "table.md").write_text(TABLE)
    figure = {"before": ["echo up >>log"], "command": "cat table.md", "after": ["echo down >>log"],
              "measures": ["code.py"]}  # fmt: skip
    (tmp_path / "docs" / "data" / "speed.json").write_text(json.dumps(figure))
    git(tmp_path, "init", "-q")
    commit(tmp_path, "first")
    data.measure("speed", tmp_path)
    page = tmp_path / "docs" / "numbers.md"
    page.write_text(data.rendered(page.read_text(), tmp_path))
    return tmp_path


def test_a_figure_is_measured_and_shown(project, data):
    figure = data.load("speed", project)
    assert figure["tables"] == [
        {"heading": "two jobs:", "columns": ["job", "ms"], "rows": [["a", "1.5"], ["b", "2.5"]]}
    ]
    assert figure["measured"]["commit"] == git(project, "rev-parse", "--short=10", "HEAD")
    assert (project / "log").read_text() == "up\ndown\n"
    text = (project / "docs" / "numbers.md").read_text()
    assert "echo up >>log\ncat table.md\necho down >>log" in text
    assert "| a | 1.5 |\n| b | 2.5 |\n" in text
    assert figure["measured"]["machine"] in text
    assert list(data.problems(project)) == []


def test_one_table_alone(project, data):
    page = project / "docs" / "numbers.md"
    page.write_text(PAGE.replace("speed", "speed 1 bare"))
    text = data.rendered(page.read_text(), project)
    assert text == PAGE.replace("speed", "speed 1 bare").replace(
        "bare -->\n", "bare -->\n\n| job | ms |\n|---|---|\n| a | 1.5 |\n| b | 2.5 |\n\n"
    )
    page.write_text(PAGE.replace("speed", "speed 2"))
    with pytest.raises(data.DataError, match=r"docs/data/speed.json has 1 tables"):
        data.rendered(page.read_text(), project)


def test_a_changed_figure_is_found(project, data):
    page = project / "docs" / "numbers.md"
    page.write_text(page.read_text().replace("2.5", "1.2"))
    [problem] = data.problems(project)
    assert problem.startswith("docs/numbers.md:")
    assert "page: | b | 1.2 |" in problem
    assert "data: | b | 2.5 |" in problem


def test_an_old_figure_is_found(project, data):
    commit(project, "second")
    commit(project, "third")
    assert list(data.problems(project, old_commits=2)) == []
    [problem] = data.problems(project, old_commits=1)
    assert problem.startswith(
        "docs/data/speed.json is 2 commits old, more than 1; measure it again"
    )


def test_commits_to_other_files_do_not_age_a_figure(project, data):
    (project / "other.py").write_text("x")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "other")
    assert list(data.problems(project, old_commits=0)) == []


def test_uncommitted_code_is_not_measured(project, data):
    (project / "code.py").write_text("changed")
    with pytest.raises(data.DataError, match=r"commit or undo these changes first.*\n.*code\.py"):
        data.measure("speed", project)


def test_what_ran_before_is_undone_after_a_failure(project, data):
    path = project / "docs" / "data" / "speed.json"
    figure = json.loads(path.read_text())
    path.write_text(json.dumps({**figure, "command": "false"}))
    with pytest.raises(data.DataError, match="'false' ended with 1"):
        data.measure("speed", project)
    assert (project / "log").read_text() == "up\ndown\n" * 2
    assert json.loads(path.read_text())["tables"] == figure["tables"]


def test_figures_and_pages_that_miss_each_other_are_found(project, data):
    page = project / "docs" / "numbers.md"
    page.write_text("<!-- data: sped -->\n<!-- end of data -->\n")
    first, second = data.problems(project)
    assert "no figure 'sped' in docs/data; there are speed" in first
    assert second == "docs/data/speed.json is shown by no page; delete it"


def test_a_table_without_an_end_is_found(project, data):
    page = project / "docs" / "numbers.md"
    page.write_text(page.read_text() + "\n<!-- data: speed 1 bare -->\n")
    problems = list(data.problems(project))
    assert any("no line `<!-- end of data -->`" in problem for problem in problems)


def test_tables_of_all_programs_are_read(data):
    of_rank = "[0] 4 ranks\n[0]\n[0] | a | b |\n[0] |---|---|\n[0] | 1 | |\n[1] noise\n"
    assert data.tables_of(of_rank) == [
        {"heading": "4 ranks", "columns": ["a", "b"], "rows": [["1", ""]]}
    ]
    console = Console(width=60, file=StringIO())
    for size in (1, 4):
        table = Table(title=f"{size} MiB")
        table.add_column("way")
        table.add_column("ms", justify="right")
        table.add_row("flat", str(128 * size))
        table.add_row("fixed", "")
        console.print(table)
    assert data.tables_of(console.file.getvalue()) == [
        {"heading": f"{size} MiB", "columns": ["way", "ms"],
         "rows": [["flat", str(128 * size)], ["fixed", ""]]} for size in (1, 4)
    ]  # fmt: skip
    columns = "  policy  plan ms\n     ddp     0.01\n# 80 tensors\n"
    assert data.tables_of(columns) == [
        {"heading": "80 tensors", "columns": ["policy", "plan ms"], "rows": [["ddp", "0.01"]]}
    ]
    assert data.tables_of("no table\n") == []

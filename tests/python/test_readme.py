# SPDX-License-Identifier: Apache-2.0
"""The README and the pages of docs: what they name exists, and their figures are their pages'."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import usbyte.torch as ub
from usbyte import _core
from usbyte.cli import main
from usbyte.planning import tuning

ROOT = Path(__file__).parents[2]
COLUMNS = ("system", "in usbyte", "tests", "measured by", "published", "here")


def table(text):
    """Rows of docs/systems.md, by name of the system; cells by name of the column."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tuple(rows[0]) == COLUMNS
    assert all(len(row) == len(COLUMNS) for row in rows)
    found = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in rows[2:]}
    assert len(found) == len(rows) - 2
    return found


DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = table((DOCS / "systems.md").read_text(encoding="utf-8"))
PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")]
PAGES += sorted(DOCS.rglob("*.md"))


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def named(rows, kind):
    """What stands behind `policy`, `policies`, ... up to the end of the list."""
    plural = kind[:-1] + "ies" if kind.endswith("y") else kind + "s"
    lists = [
        part
        for row in rows.values()
        for part in re.findall(rf"\b(?:{kind}|{plural}) ((?:`[^`]+`[^`:;]*)+)", row["in usbyte"])
    ]
    return [name for part in lists for name in quoted(part)]


def declared_in(path):
    """Names of the tests of a file: functions, or those of TEST, TEST_F, TEST_P and TYPED_TEST."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return set(re.findall(r"^def (test_\w+)\(", text, flags=re.M))
    pairs = re.findall(r"^(?:TYPED_)?TEST(?:_[FP])?\((\w+),\s*(\w+)\)", text, flags=re.M)
    return {f"{suite}.{name}" for suite, name in pairs}


def wrong_tests(rows):
    """Tests that are named and do not exist, and rows that should have some."""
    wrong = []
    for system, row in rows.items():
        if not quoted(row["tests"]) and not row["in usbyte"].startswith("not here"):
            wrong.append(f"{system}: no test")
        for text in quoted(row["tests"]):
            file, _, name = text.partition(" ")
            path = ROOT / "tests" / ("cpp" if file.endswith(".cc") else "python") / file
            if not path.is_file() or (name and name not in declared_in(path)):
                wrong.append(f"{system}: {text}")
    return wrong


def test_policies_codecs_and_schemes_are_those_there_are():
    policies = named(ROWS, "policy")
    assert sorted(policies) == sorted(tuning.policies())
    assert set(_core.policies()) < set(policies)
    codecs = named(ROWS, "codec")
    assert sorted(["none", *codecs]) == sorted({"none", *_core.codec_names()})
    assert sorted(named(ROWS, "scheme")) == sorted(_core.sparse_schemes())


def test_tests_exist():
    assert wrong_tests(ROWS) == []


@pytest.mark.parametrize("system", ROWS)
def test_names_and_files_exist(system):
    row = ROWS[system]
    for name in quoted(row["in usbyte"] + row["measured by"]):
        if name.startswith(("_core.", "ub.")):
            module, attribute = name.split(".")
            assert hasattr({"_core": _core, "ub": ub}[module], attribute), name
        elif name.startswith("benchmarks/"):
            assert (ROOT / name).is_file(), name
        elif name.startswith("usbyte "):
            assert name.split()[1] in main.list_commands(click.Context(main)), name
    for page in re.findall(r"\]\(([^)#]+)\)", "".join(row.values())):
        assert (DOCS / page).is_file(), page


@pytest.mark.parametrize("system", ROWS)
def test_figures_stand_on_their_pages(system):
    """Every factor, percentage and time, on the next page that is linked behind it."""
    assert missing_figures(ROWS[system]["here"]) == []


def missing_figures(cell):
    missing, figures = [], r"(\d+(?:\.\d+)?)(?:x\b| ?%| ms\b| s\b)"
    for text, page in re.findall(r"(.*?)\]\(([^)]+)\)", cell):
        path = DOCS / page
        if not path.is_file():
            continue
        content = path.read_text(encoding="utf-8")
        for figure in re.findall(figures, text):
            if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", content):
                missing.append(f"{figure} on {page}")
    return missing


def test_what_is_not_so_is_found():
    rows = {name: dict(row) for name, row in ROWS.items()}
    rows["DDP"]["tests"] = "`policy_test.cc Ddp.DoesNotExist`, `test_none.py test_it`"
    rows["P3"] |= {"tests": "", "in usbyte": "policies `p3`, `p4`; by `ub.none`"}
    del rows["WFBP"]
    wrong = {"DDP: policy_test.cc Ddp.DoesNotExist", "DDP: test_none.py test_it", "P3: no test"}
    assert wrong <= {*wrong_tests(rows)}
    assert {*named(rows, "policy")} == {*named(ROWS, "policy"), "p4"} - {"wfbp"}
    assert missing_figures("1.30x, 9.87x, 6.29x ([page](reproduced.md)), 3.21x") == [
        "9.87 on reproduced.md"
    ]


def test_gains_are_those_of_their_page():
    page = (DOCS / "when-it-pays.md").read_text(encoding="utf-8")
    found = re.findall(r"\((\d+) cases, median gain ([\d.]+), most ([\d.]+)\)", page)
    section = README.partition("## How much faster?")[2].partition("## Install")[0]
    assert re.findall(r"\| (\d+) \| ([\d.]+)x \| ([\d.]+)x \|", section) == found
    counts = re.search(r"predicts the steps of (\d+ published jobs) on (\d+) assumed", page)
    assert counts is not None
    assert f"Of {counts[1]} on {counts[2]} simulated rings" in section
    jobs = {"ResNet-101": "espresso_resnet101", "ResNet-50": "resnet50", "BERT": "bert",
            "GPT-2": "gpt2"}  # fmt: skip
    simulated = re.findall(
        r"\| ([\w-]+) \| (\d+) ranks, (\d+) Gb/s \| [\d.]+ "
        r"\| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+)x \|",
        section,
    )
    assert len(simulated) >= 4
    for job, ranks, gbit, ddp, auto, gain in simulated:
        [row] = re.findall(rf"^\| {jobs[job]} \| {ranks} x {gbit}G, 25 us \| .*$", page, re.M)
        assert row.strip("| ").split(" | ")[-4:-2] == [ddp, auto]
        assert row.endswith(f"| {gain} |")


def test_planning_lists_every_policy():
    table = (DOCS / "planning.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", table, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert set(_core.policies()) <= listed


def test_options_lists_every_variable():
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(USBYTE_\w+)` \|", page, re.M))
    known = {variable.name for variable in _core.Env.read().variables}
    assert listed == known


def test_the_changelog_counts_what_there_is():
    page = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    codecs = {*_core.codec_names()} - {"none"}
    assert f"takes {len(codecs)} lossy codecs" in page
    assert f"takes {len(_core.policies())} policies" in page
    assert f"and {len(tuning.TUNED)} tuned ones" in page
    assert f"the extra for {['none', 'one', 'two'][len(tuning.BAYESIAN)]} of these" in page
    [commands] = re.findall(r"^- `usbyte (demo`.*`lab`)", page, re.M)
    assert quoted(f"`{commands}") == main.list_commands(click.Context(main))


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200
    assert len(README.split()) <= 1300


def anchors(text):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_the_quickstart_trains(tmp_path):
    [script] = re.findall(r"```python\n(.*?)```", README, re.S)
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "usbyte.launch", "-np", "2", sys.executable, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(x) for x in re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[2] < losses[0] < 2.3  # of ten classes by chance
    assert (tmp_path / "model.pt").is_file()


def test_files_of_the_architecture_exist():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/.]+\.(?:py|h|cc)\b", text))
    assert len(named) > 30
    there = [p for part in ("csrc", "python", "tests") for p in (ROOT / part).rglob("*")]
    assert [n for n in named if not any(str(p).endswith(f"/{n}") for p in there)] == []
    folders = re.findall(r"(?:csrc|python/usbyte)/\w+", text)
    assert [n for n in folders if not (ROOT / n).is_dir()] == []

# SPDX-License-Identifier: Apache-2.0
"""The site's sources: pages at their places, links that lead somewhere, generated references."""

import importlib.util
import sys
from pathlib import Path

import pytest

import usbyte.torch as ub
from usbyte import _core

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools/docs_site.py")
docs_site = importlib.util.module_from_spec(spec)
sys.modules["docs_site"] = docs_site
spec.loader.exec_module(docs_site)


@pytest.mark.parametrize(
    ("source", "link", "there"),
    [
        ("README.md", "docs/limits.md", "limits.md"),
        ("README.md", "docs/step.svg", "step.svg"),
        ("README.md", "CONTRIBUTING.md", "contributing.md"),
        ("docs/install.md", "gpu/README.md#what-was-seen", "gpu/README.md#what-was-seen"),
        ("docs/design/README.md", "../glossary.md", "../glossary.md"),
        ("docs/design/README.md", "../../README.md", "../index.md"),
        ("docs/install.md", "../Dockerfile", docs_site.REPOSITORY + "Dockerfile"),
        ("docs/install.md", "#wheels", "#wheels"),
    ],
)
def test_links_fit_the_place_of_a_page(source, link, there):
    assert docs_site.relinked(f"See [it]({link}).", source) == f"See [it]({there})."


def test_code_keeps_its_brackets():
    text = "```python\nmodels[0](x.md)\n```\n"
    assert docs_site.relinked(text, "README.md") == text


def write(folder, name, text):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_dead_links_are_found(tmp_path):
    write(tmp_path, "index.html", '<h2 id="here"></h2><a href="a/"></a><a href="#here"></a>')
    write(tmp_path, "a/index.html", '<a href="../#here"></a><a href="https://example.org/x"></a>')
    assert docs_site.dead_links(tmp_path) == []
    write(tmp_path, "b/index.html", '<a href="../#gone"></a><a href="../c/"></a><img src="d.svg">')
    assert docs_site.dead_links(tmp_path) == [
        "b/index.html: ../#gone",
        "b/index.html: ../c/",
        "b/index.html: d.svg",
    ]


def test_reference_of_python_has_each_public_class_and_function():
    page = docs_site.python_reference()
    constants = {"Average", "Sum", "Max", "Min", "Product", "global_process_set"}
    named = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith(":::")}
    assert set(ub.__all__) - named <= constants
    assert named <= set(ub.__all__)


def test_reference_of_commands_has_all_of_them():
    page = docs_site.commands_reference()
    for command in ("usbyte demo", "usbyte lab up", "usbyte whatif", "usbyterun"):
        assert f"\n## {command}\n" in page
    assert "--network-interface" in page


def test_reference_of_the_environment_has_each_variable(monkeypatch):
    monkeypatch.setenv("USBYTE_BUCKET_BYTES", "77")
    page = docs_site.environment_reference()
    names = [variable.name for variable in _core.Env.read().variables]
    assert [name for name in names if f"| `{name}` |" not in page] == []
    assert "| 77 |" not in page
    assert "| `USBYTE_BUCKET_BYTES` | 26214400 | bytes |" in page


def test_each_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in navigation] == []

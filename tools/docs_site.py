# SPDX-License-Identifier: Apache-2.0
"""Makes build/docs, the sources of the site, from docs/, the README and the program itself.

python tools/docs_site.py            # then: zensical build, or mkdocs build
python tools/docs_site.py --check    # whether links of build/site lead somewhere
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SOURCES, SITE = ROOT / "build/docs", ROOT / "build/site"
REPOSITORY = "https://github.com/usbyte/usbyte/blob/main/"
#: Pages from outside of docs/, by the name that they have on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")


def page_of(path: str) -> str | None:
    """Returns where a file of the repository is on the site; None if it is not there."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def relinked(text: str, source: str) -> str:
    """Rewrites the links of a page for its place on the site.

    Args:
        text: The page, in Markdown.
        source: Its path in the repository.
    """
    place = page_of(source)
    assert place is not None

    def link(found: re.Match[str]) -> str:
        target, hash_, anchor = found[2].partition("#")
        if not target or urlsplit(target).scheme:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        there = page_of(path)
        if there is None:
            return f"{found[1]}{REPOSITORY}{path}{hash_}{anchor}{found[3]}"
        there = posixpath.relpath(there, posixpath.dirname(place) or ".")
        return f"{found[1]}{there}{hash_}{anchor}{found[3]}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if i % 2 else _LINK.sub(link, part) for i, part in enumerate(parts))


def python_reference() -> str:
    """Returns the page of `usbyte.torch`, for mkdocstrings."""
    import usbyte.torch as ub

    public = {name: getattr(ub, name) for name in ub.__all__}
    groups = {
        "Classes": [name for name, value in public.items() if inspect.isclass(value)],
        "Functions": [name for name, value in public.items() if inspect.isroutine(value)],
    }
    lines = ["# Python\n", "```python\nimport usbyte.torch as ub\n```\n"]
    for title, names in groups.items():
        lines.append(f"## {title}\n")
        lines += [f"::: usbyte.torch.{name}\n" for name in names]
    return "\n".join(lines)


def commands_reference() -> str:
    """Returns the help of each command."""
    import click

    from usbyte.cli import main as usbyte
    from usbyte.launch.cli import main as usbyterun

    lines = ["# Commands\n"]

    def add(command: click.Command, name: str) -> None:
        context = click.Context(command, info_name=name, max_content_width=100)
        context.terminal_width = 100
        lines.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```\n")
        if isinstance(command, click.Group):
            for each in command.list_commands(context):
                found = command.get_command(context, each)
                assert found is not None
                add(found, f"{name} {each}")

    add(usbyte, "usbyte")
    add(usbyterun, "usbyterun")
    return "\n".join(lines)


def environment_reference() -> str:
    """Returns the table of environment variables, from the one that reads them."""
    from usbyte import _core

    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("USBYTE_")]:
            del os.environ[name]
        variables = _core.Env.read().variables
    lines = ["# Environment variables\n", "| variable | default | unit | what it is |"]
    lines.append("|---|---|---|---|")
    for variable in variables:
        cells = (variable.value or "none", variable.unit, variable.description)
        shown = " | ".join(cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| `{variable.name}` | {shown} |")
    lines.append("\n`usbyte doctor` lists those that are set. A wrong value or name is an error.\n")
    return "\n".join(lines)


def make() -> None:
    """Writes all pages."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCES, ignore=shutil.ignore_patterns("*.log"))
    pages = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    for source in [*pages, *OUTSIDE]:
        place = page_of(source)
        assert place is not None
        text = (ROOT / source).read_text(encoding="utf-8")
        (SOURCES / place).write_text(relinked(text, source), encoding="utf-8")
    reference = {
        "python": python_reference,
        "commands": commands_reference,
        "environment": environment_reference,
    }
    (SOURCES / "reference").mkdir()
    for name, page in reference.items():
        (SOURCES / "reference" / f"{name}.md").write_text(page(), encoding="utf-8")


class _Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes in the start of an element."""
        values = dict(attrs)
        self.anchors |= {value for value in (values.get("id"), values.get("name")) if value}
        if link := values.get("src" if tag in ("img", "script") else "href"):
            self.links.append(link)


def dead_links(site: Path) -> list[str]:
    """Returns "page: link" for each link inside a site that leads nowhere."""
    pages = {path: _Page(path) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        # The page for addresses that do not exist is shown at any of them.
        for link in [] if path.name == "404.html" else page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = path
            if address.path:
                target = Path(os.path.normpath(path.parent / unquote(address.path)))
                target = target / "index.html" if target.is_dir() else target
            lost = not target.exists()
            if not lost and address.fragment and target in pages:
                lost = unquote(address.fragment) not in pages[target].anchors
            if lost:
                dead.append(f"{path.relative_to(site)}: {link}")
    return sorted(set(dead))


def main() -> int:
    """Makes the sources, or checks the site."""
    if sys.argv[1:] != ["--check"]:
        make()
        return 0
    dead = dead_links(SITE)
    print(*dead, sep="\n", end="\n" if dead else "")
    pages = len(list(SITE.rglob("*.html")))
    print(f"build/site: {pages} pages, {len(dead)} dead links")
    return 1 if dead or not pages else 0


if __name__ == "__main__":
    sys.exit(main())

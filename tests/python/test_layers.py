# SPDX-License-Identifier: Apache-2.0
"""The import contract of pyproject.toml, and the size of source files and folders."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "usbyte"
CORE = ROOT / "csrc"
LONGEST_CHAIN = 12
MOST_LINES = 500
MOST_FILES = 20
TYPING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"


def contract(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder / "python"), "PATH": "/usr/bin:/bin", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "bin")
    shutil.copytree(PACKAGE, tmp_path / "python" / "usbyte", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contract_is_kept(copy: Path) -> None:
    done = contract(copy)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "added", "broken"),
    [
        ("torch/runtime/store.py", "import usbyte.torch.plan.job", "Layers of usbyte.torch"),
        ("torch/plan/job.py", "import usbyte.lab.netns", "Layers of usbyte"),
        ("planning/whatif.py", "import usbyte.torch.layout", "Layers of usbyte"),
        ("torch/eager/request.py", "import usbyte.torch.eager.queue", "No cycles"),
        ("torch/eager/request.py", f"{TYPING}    import usbyte.torch.eager.queue", "No cycles"),
    ],
)
def test_an_import_against_the_order_fails(
    copy: Path, module: str, added: str, broken: str
) -> None:
    path = copy / "python" / "usbyte" / module
    path.write_text(path.read_text() + f"\n{added}\n")
    done = contract(copy)
    assert done.returncode == 1
    assert any(line.startswith(broken) and "BROKEN" in line for line in done.stdout.splitlines())


def test_chains_of_imports_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "python"))
    graph = grimp.build_graph("usbyte", cache_dir=None)

    @cache
    def longest(module: str) -> tuple[str, ...]:
        imported = graph.find_modules_directly_imported_by(module)
        chains = [longest(other) for other in imported if other.startswith("usbyte.torch")]
        return (module, *max(chains, key=len, default=()))

    chain = max((longest(m) for m in graph.modules if m.startswith("usbyte.torch")), key=len)
    assert len(chain) <= LONGEST_CHAIN, " -> ".join(chain)


def test_modules_and_folders_are_small() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts]
    modules += [path for path in CORE.rglob("*") if path.suffix in (".h", ".cc", ".cu")]
    lines = {path: len(path.read_text().splitlines()) for path in modules}
    found = {str(path.relative_to(ROOT)): n for path, n in lines.items()}
    assert not {path: n for path, n in found.items() if n > MOST_LINES}
    folders: dict[Path, int] = {}
    for path in modules:
        folders[path.parent] = folders.get(path.parent, 0) + 1
    too_full = {str(path.relative_to(ROOT)): n for path, n in folders.items() if n > MOST_FILES}
    assert not too_full

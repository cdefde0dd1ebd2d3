# SPDX-License-Identifier: Apache-2.0
"""The Python of the pages in docs runs on two ranks; an error names page and line.

Blocks find these names prepared: `torch`, `nn`, `contextlib`, `DistributedSampler`, `ub` after
`ub.init()`, a `model` with its `opt`, `loss_fn`, `data`, a `loader` and its `batches`, and `args`.
A block that uses `optimizer` and makes none finds a `DistributedOptimizer` of `opt`. A block that
imports torch and starts the job by itself finds nothing prepared. Assignments to one name that
follow each other are alternatives: the block runs once with each.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte import _core

DOCS = Path(__file__).parents[2] / "docs"
MAKES_OPTIMIZER = re.compile(r"\b(ub|hvd)\.\w+Optimizer\(")
# Each rank is on a host of its own, so that there are two nodes.
ENV = {"USBYTE_LEARNING_STEPS": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@dataclass(frozen=True)
class Block:
    """A block of Python on a page."""

    page: Path
    line: int  # of the page, before the code
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(DOCS)}:{self.line + 1}"

    def variants(self) -> Iterator[Any]:
        """Its compiled code, once for each of the alternatives in it, with the page's lines."""
        rows = grouped("\n" * self.line + self.code)
        for i in range(max(len(row) for row in rows)):
            tree = ast.Module([row[min(i, len(row) - 1)] for row in rows], type_ignores=[])
            yield compile(tree, str(self.page.relative_to(DOCS.parent)), "exec")


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```python\n(.*?)^```", text, flags=re.M | re.S):
        yield Block(page, text[: found.start(1)].count("\n"), found[1])


def target_of(statement: ast.stmt) -> str:
    """The name that a statement gives a value that does not depend on the name; "" for others."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return ""
    name = statement.targets[0].id
    used = {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
    return "" if name in used else name


def grouped(code: str) -> list[list[ast.stmt]]:
    """Statements; assignments to one name that follow each other are alternatives in one list."""
    rows: list[list[ast.stmt]] = []
    for name, found in itertools.groupby(ast.parse(code).body, target_of):
        statements = list(found)
        rows += [statements] if name else [[statement] for statement in statements]
    return rows


def lacking(code: str) -> list[str]:
    """Packages that the code imports and that are not installed."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    packages = {name.partition(".")[0] for name in names}
    return sorted(name for name in packages if importlib.util.find_spec(name) is None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).mean(1)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def prepared(rank: int, code: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(rank)
    data = TensorDataset(torch.randint(16, (8, 3)), torch.randint(2, (8,)))
    loader = DataLoader(data, batch_size=4)
    names = {
        "torch": torch, "nn": nn, "contextlib": contextlib, "ub": ub, "model": model,
        "DistributedSampler": DistributedSampler, "opt": torch.optim.SGD(model.parameters(), 0.1),
        "loss_fn": nn.CrossEntropyLoss(), "data": data, "loader": loader, "batches": list(loader),
        "args": None,
    }  # fmt: skip
    ub.init()
    if "optimizer." in code and not MAKES_OPTIMIZER.search(code):
        names["optimizer"] = ub.DistributedOptimizer(names["opt"], model.named_parameters())
    return names


def run(rank: int, size: int, page: str, line: int, code: str, cwd: str) -> list[Any]:
    """Runs a block; what it has wrapped and not trained takes a step. Returns the parameters."""
    os.chdir(cwd)
    alone = "import torch" in code and re.search(r"\.init\(\)|init_process_group\(", code)
    found = []
    for number, variant in enumerate(Block(Path(page), line, code).variants()):
        print("alternative", number)
        names = {"__name__": "__main__"} if alone else prepared(rank, code)
        exec(variant, names)
        if (MAKES_OPTIMIZER.search(code) or "comm_hook(" in code) and "backward()" not in code:
            train(names)
        params = names["model"].parameters() if "model" in names else ()
        found.append([p.detach().flatten()[:1000].tolist() for p in params])
    return found


def train(names: dict[str, Any]) -> None:
    """Takes a step with the model and the optimizer of a block, which must change the model."""
    model = names["model"]
    if "optimizer" in names:
        ub.broadcast_parameters(model.state_dict())
    before = [p.detach().clone() for p in model.parameters()]
    x, y = names["batches"][0]
    names["loss_fn"](model(x), y).backward()
    names.get("optimizer", names["opt"]).step()
    pairs = zip(before, model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


BLOCKS = [block for page in sorted(DOCS.rglob("*.md")) for block in blocks(page)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_python_of_the_guides_runs(block, tmp_path):
    if missing := lacking(block.code):
        pytest.skip(f"{block} needs {', '.join(missing)}, which is not installed")
    dimensions = [_core.Dimension("inside", 1, 1e9), _core.Dimension("between", 2, 1e8)]
    (tmp_path / "mesh.json").write_text(_core.Topology(dimensions).to_json())
    row = (str(block.page), block.line, block.code, str(tmp_path))
    first, second = run_ranks(2, run, *row, env=ENV)
    assert first == second


def test_blocks_of_the_guides_are_found():
    pages = {block.page.name for block in BLOCKS}
    assert {"compression.md", "daso.md", "migrating.md", "overlap.md", "routes.md"} <= pages
    text = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    guides = text.partition("  - Guides:\n")[2].partition("  - Understand:\n")[0]
    for page in re.findall(r": (\S+\.md)$", guides, flags=re.M):
        marked = (DOCS / page).read_text(encoding="utf-8").count("```python\n")
        assert marked == sum(block.page == DOCS / page for block in BLOCKS), page


def test_a_block_that_fails_names_page_and_line():
    page = DOCS / "overlap.md"
    variants = list(Block(page, 30, "a = 1\n\na = 2\nraise ValueError(a)\n").variants())
    assert len(variants) == 2
    for value, variant in enumerate(variants, 1):
        with pytest.raises(ValueError, match=str(value)) as failed:
            exec(variant, {})
        assert failed.traceback[-1].path.name == page.name
        assert failed.traceback[-1].lineno + 1 == 34


def test_packages_that_a_block_lacks_are_found():
    assert lacking("import none_such.torch as hvd\nfrom os import path\n") == ["none_such"]

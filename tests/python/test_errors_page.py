# SPDX-License-Identifier: Apache-2.0
"""docs/errors.md: errors lead to its sections, and it quotes messages that exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import usbyte.torch as ub
from usbyte import _core, errors
from usbyte.cli import main
from usbyte.planning import topologies, tuning

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "usbyte"
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
BY_MODULE = {"Error", "UsageError"}  # the other classes have one section each

MISUSE = """
import torch, usbyte.torch as ub
ub.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ub.DistributedOptimizer(optimizer, model.named_parameters(), {argument})
"""


def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def entries():
    """Headings of errors, with the beginnings of messages below each."""
    found = {}
    for part in re.split(r"^### ", PAGE, flags=re.M)[1:]:
        heading, quotes = part.split("\n\n")[:2]
        found[heading] = re.findall(r"`([^`]+)`", quotes)
    return found


ENTRIES = entries()


@pytest.fixture(scope="module")
def messages():
    """The string literals of the sources, joined where the compiler joins them."""
    texts = []
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
        constants = [n for n in nodes if isinstance(n, ast.Constant) and id(n) not in docstrings]
        texts += [n.value for n in constants if isinstance(n.value, str)]
    for pattern in ("*.cc", "*.h"):
        for path in (ROOT / "csrc").rglob(pattern):
            code = re.sub(r'"\s*\n\s*"', "", path.read_text(encoding="utf-8"))
            texts += re.findall(r'"((?:[^"\\\n]|\\.)*)"', code)
    return "\n".join(texts)


def missing(quote, messages):
    """The parts of a quote, between its dots, that no message has."""
    parts = [part.strip() for part in quote.split("...")]
    assert any(" " in part for part in parts), f"{quote} fits too much"
    return [part for part in parts if part not in messages]


def test_each_section_is_led_to_and_exists():
    sections = [slug(heading) for heading in re.findall(r"^## (.*)$", PAGE, re.M)]
    named = {*errors._BY_CLASS.values(), *errors._BY_MODULE.values()} - {""}
    sources = "".join(p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py"))
    named |= set(re.findall(r"docs/errors\.md#([\w-]+)", sources))
    assert sorted(sections) == sorted(named)


def test_each_module_that_raises_leads_to_a_section():
    raising = []
    for path in sorted(PACKAGE.rglob("*.py")):
        calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
        if any(isinstance(c.func, ast.Name) and c.func.id in BY_MODULE for c in calls):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            raising.append(name.removesuffix(".__init__"))
    assert len(raising) > 80
    for module in raising:
        name = module
        while name and name not in errors._BY_MODULE:
            name = name.rpartition(".")[0]
        assert name, module


def test_modules_of_the_table_exist():
    for name in errors._BY_MODULE:
        path = PACKAGE.parent.joinpath(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


@pytest.mark.parametrize("heading", ENTRIES)
def test_quoted_messages_exist(heading, messages):
    assert ENTRIES[heading]
    assert [(quote, m) for quote in ENTRIES[heading] if (m := missing(quote, messages))] == []


def test_a_message_that_does_not_exist_is_found(messages):
    assert missing("rank ... is gone or frosted", messages) == ["is gone or frosted"]


def test_headings_are_unique():
    headings = [slug(heading) for heading in re.findall(r"^#+ (.*)$", PAGE, re.M)]
    assert len(headings) == len(set(headings))


def a_plan():
    _core.Plan.from_json("{")


def an_environment():
    _core.Env.read()


def a_policy():
    tuning.known_policy("none such")


def a_job_of_a_mesh():
    topologies.load_workload("none such.json")


def a_call_before_init():
    ub.allreduce(1)


@pytest.mark.parametrize(
    ("fails", "section"),
    [
        (a_plan, "plans"), (an_environment, "environment"), (a_policy, "plans"),
        (a_job_of_a_mesh, "plans"), (a_call_before_init, "start"),
    ],
)  # fmt: skip
def test_errors_carry_their_section(fails, section, monkeypatch):
    monkeypatch.setenv("USBYTE_NONE_SUCH", "1")
    with pytest.raises(errors.Error) as raised:
        fails()
    assert raised.value.__notes__ == [f"See docs/errors.md#{section}"]
    assert "docs/errors" not in str(raised.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes")
@pytest.mark.parametrize(
    ("argument", "section"),
    [('overlap="foward"', "wrapping"), ('compression="topk:2"', "compression")],
)
def test_a_script_that_fails_ends_with_the_section(argument, section):
    done = subprocess.run(
        [sys.executable, "-c", MISUSE.format(argument=argument)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    # torch puts the rank in front of each line.
    message, pointer = (line.removeprefix("[rank0]: ") for line in done.stderr.splitlines()[-2:])
    assert message.startswith("usbyte.errors.UsageError: ")
    assert pointer == f"See docs/errors.md#{section}"


def test_a_command_that_fails_ends_with_the_section():
    done = CliRunner().invoke(main, ["plan", "none-such", "--ring", "4,25us,10gbit"])
    assert done.exit_code == 1
    message, pointer = done.stderr.splitlines()
    assert message.startswith("Error: cannot read the profile 'none-such'")
    assert pointer == "See docs/errors.md#plans"

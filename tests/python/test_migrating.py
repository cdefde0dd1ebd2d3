# SPDX-License-Identifier: Apache-2.0
"""docs/migrating.md: its snippets do the same before and after."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from _ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


def snippets(heading):
    """What is marked as Python below a heading of the second level."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"```python\n(.*?)```", section, flags=re.S)
    return [code for code in found if "import horovod" not in code]


def _printed(rank, size, codes):
    """What each prints, one after the other in one process."""
    texts = []
    for code in codes:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
        texts.append(out.getvalue())
    return texts


def _weights(text):
    assert text.startswith("weights ")
    found = [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)]
    assert len(found) == 8
    return found


def test_the_snippets_run_and_do_the_same_before_and_after():
    ddp, horovod = snippets("From DDP"), snippets("From Horovod")
    assert (len(ddp), len(horovod)) == (2, 2)
    results = run_ranks(2, _printed, ddp + horovod)
    # Bit for bit: two ranks add up in one order only.
    before, after = (_weights(text) for text in results[0][:2])
    assert before == after == _weights(results[1][0]) == _weights(results[1][1])
    assert re.fullmatch(r"loss \d\.\d+\n", results[0][2])
    assert results[1][2] == ""
    assert results[0][3] == results[1][3] == "alone 1.0\n"

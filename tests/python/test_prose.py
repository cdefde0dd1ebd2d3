# SPDX-License-Identifier: Apache-2.0
"""The pages that users read have short sentences."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md"]
# Papers' figures and designs are for other readers.
PAGES += [
    f"docs/{path.name}"
    for path in sorted((ROOT / "docs").glob("*.md"))
    if not re.match(r"reproduced|themis|architecture|reliability|glossary", path.name)
]


def sentences(text):
    """Sentences outside of code and tables; code inside of one counts as one word."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=[-*|#])|\n(?=\d+\. )", text):
        if block.strip().startswith(("|", "#", "!")):
            continue
        words = re.sub(r"`[^`]*`", "code", block)
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words)
        for sentence in re.split(r"(?<=[.!?:])\s+", " ".join(words.split())):
            if len(sentence.split()) > 2:
                yield sentence


def test_sentences_are_found():
    text = "# Title\n\nOne two three. Four `a b c` [five](x.md) six:\n\n- seven eight nine\n"
    assert list(sentences(text)) == ["One two three.", "Four code five six:", "- seven eight nine"]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page):
    found = list(sentences((ROOT / page).read_text(encoding="utf-8")))
    lengths = [len(sentence.split()) for sentence in found]
    assert [sentence for sentence in found if len(sentence.split()) > 40] == []
    assert sum(lengths) / len(lengths) <= 18

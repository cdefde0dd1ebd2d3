# SPDX-License-Identifier: Apache-2.0
"""Tables, for terminals and for documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def for_terminal(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    left: Sequence[str] = (),
) -> RenderableType:
    """Makes a table of numbers with a title above it.

    Args:
        title: The title.
        columns: Names of the columns.
        rows: The cells of each row.
        left: Columns of text, which are left-aligned.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, "italic"), table)  # As Text: brackets in names must not be markup.


def in_markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Makes a Markdown table that ends with a line break."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"

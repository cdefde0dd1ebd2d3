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
    """A table of numbers below its title; the columns in `left` are text."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, "italic"), table)  # brackets in names are no markup


def in_markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a document; it ends with a line break."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"

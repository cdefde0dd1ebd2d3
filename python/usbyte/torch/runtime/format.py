"""Parts of messages: ranks, and what a backend says went wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SHOWN_RANKS = 8


def name_ranks(ranks: Sequence[int]) -> str:
    """For messages: "rank 3", "ranks 0, 2", or the first few of many."""
    listed = ", ".join(str(rank) for rank in ranks[:_SHOWN_RANKS])
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def brief_error(error: Exception) -> str:
    """What the backend says went wrong, without the place in its source and its general advice."""
    text = re.sub(r"^\[[^]]*\] ", "", str(error))
    return text.split(" This is typically", 1)[0].removesuffix(".")

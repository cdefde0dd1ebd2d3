# SPDX-License-Identifier: Apache-2.0
"""Formats parts of messages: lists of ranks, and errors of a backend."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SHOWN_RANKS = 8


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns "rank 3", "ranks 0, 2", or the first few of many ranks, for messages."""
    listed = ", ".join(str(rank) for rank in ranks[:_SHOWN_RANKS])
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def brief_error(error: Exception) -> str:
    """Returns the text of a backend's error without its source location and general advice."""
    text = re.sub(r"^\[[^]]*\] ", "", str(error))
    return text.split(" This is typically", 1)[0].removesuffix(".")

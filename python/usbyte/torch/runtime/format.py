# SPDX-License-Identifier: Apache-2.0
"""Formats parts of messages: lists of ranks, values by rank, and errors of a backend."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SHOWN_RANKS = 8
_SHOWN_VALUES = 8


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns "rank 3", "ranks 0, 2", or the first few of many ranks, for messages."""
    listed = ", ".join(str(rank) for rank in ranks[:_SHOWN_RANKS])
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def name_holders(values: Sequence[object], ranks: Sequence[int]) -> str:
    """Returns "8 on rank 0 but 4 on ranks 1, 2", for messages about values that differ.

    Args:
        values: A value of each rank. Values whose texts are equal are one value.
        ranks: The ranks, in the order of `values`.
    """
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(str(value), []).append(rank)
    shown = [f"{value} on {name_ranks(its)}" for value, its in holders.items()]
    if len(shown) > _SHOWN_VALUES:
        shown[_SHOWN_VALUES:] = [f"{len(shown) - _SHOWN_VALUES} other values elsewhere"]
    return " but ".join(shown)


def brief_error(error: Exception) -> str:
    """Returns the text of a backend's error without its source location and general advice."""
    text = re.sub(r"^\[[^]]*\] ", "", str(error))
    return text.split(" This is typically", 1)[0].removesuffix(".")

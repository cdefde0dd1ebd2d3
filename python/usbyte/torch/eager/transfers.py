# SPDX-License-Identifier: Apache-2.0
"""Transfers of rows and bytes among the ranks of a group; they block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from usbyte.torch.eager.descriptors import MatchResult
from usbyte.torch.eager.rank_group_ops import RankGroupOps
from usbyte.torch.eager.staging import bytes_of, row_bytes
from usbyte.torch.runtime.ring import all_gather_ranges

#: Tag of all rings. One suffices, because the queue runs one operation at a time.
TAG = 0


def shares(rows: int, size: int) -> list[tuple[int, int]]:
    """Splits `rows` into one half-open range for each rank.

    The first `rows % size` ranks get one row more than the others.
    """
    base, more = divmod(rows, size)
    return list(pairwise(accumulate((base + (r < more) for r in range(size)), initial=0)))


def gather_bytes(
    peers: RankGroupOps, mine: torch.Tensor, out: torch.Tensor, row: int, rows: Sequence[int]
) -> None:
    """Fills `out` with every rank's `mine`, in rank order.

    Args:
        peers: The ranks.
        mine: 1-d uint8 tensor of `rows[rank] * row` bytes.
        out: 1-d uint8 tensor of `sum(rows) * row` bytes.
        row: Bytes of one row.
        rows: Number of rows of each rank.
    """
    bounds = list(pairwise(accumulate((n * row for n in rows), initial=0)))
    out[slice(*bounds[peers.rank])] = mine
    if peers.size > 1:
        all_gather_ranges(out, bounds, peers.group, TAG)


def gather_rows(peers: RankGroupOps, local: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Returns the concatenated rows of all ranks; rank r contributes `rows[r]` rows."""
    out = local.new_empty(sum(rows), *local.shape[1:])
    gather_bytes(peers, bytes_of(local), bytes_of(out), row_bytes(local), rows)
    return out


def rows_by_tensor(match_result: MatchResult, size: int) -> list[Sequence[int]]:
    """Returns for each tensor the row counts of all ranks."""
    return [match_result.sizes[i : i + size] for i in range(0, len(match_result.sizes), size)]


def broadcast_flat(peers: RankGroupOps, flat: torch.Tensor, root: int) -> None:
    """Overwrites `flat` (1-d uint8) with the `flat` of the rank at position `root`."""
    if peers.size > 1 and flat.numel():
        peers.broadcast(flat, root)

# SPDX-License-Identifier: Apache-2.0
"""What ranks write about eager operations and faults: it is read, or refused."""

from __future__ import annotations

from contextlib import suppress

from usbyte.errors import Error
from usbyte.torch.eager.descriptors import Descriptor, MatchResult, match
from usbyte.torch.fault.report import behind, last_operations, read_state
from usbyte.torch.plan.decision import Decision


def one_input(data: bytes) -> None:
    """Gives the bytes to every reader, and what they take to its users.

    Args:
        data: Lines, of which each could be from another rank.
    """
    lines = data.split(b"\n")
    descriptors: dict[int, Descriptor] = {}
    for line in lines:
        with suppress(Error):
            found = Descriptor.from_json(line)
            descriptors[found.rank] = found
        with suppress(Error):
            MatchResult.from_json(line)
        with suppress(Error):
            Decision.from_json(line.decode(errors="surrogateescape"))
    if descriptors:
        for joined in ([], [max(descriptors) + 1]):
            for verdict in match("user:x", list(descriptors.values()), joined):
                MatchResult.from_json(verdict.to_json())
    states = {rank: read_state(rank, line) for rank, line in enumerate(lines)}
    behind(states)
    last_operations(states, [])

# SPDX-License-Identifier: Apache-2.0
"""Parses the `topology=` argument: the dimensions of the network."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from pathlib import Path

from usbyte import _core
from usbyte._util import files
from usbyte.errors import UsageError

#: Types of `topology=`: "hosts" (ranks in a host, and hosts); sizes such as "2x4" or [2, 4],
#: innermost dimension first; the path of a JSON file with a topology, or with a network model from
#: `usbyte probe --dimensions`; or a topology.
TopologyLike = str | Sequence[int] | _core.Topology

_SIZES = re.compile(r"\d+(x\d+)*")


def sizes_of(topology: _core.Topology | Sequence[int]) -> list[int]:
    """Returns the sizes of a mesh's dimensions, innermost first.

    Raises:
        UsageError: A size is not an integer.
    """
    if isinstance(topology, _core.Topology):
        return [dimension.size for dimension in topology.dimensions]
    try:
        return [int(operator.index(size)) for size in topology]
    except TypeError:
        raise UsageError(f"topology must be sizes such as [2, 4], not {topology!r}") from None


def parse(given: TopologyLike, ranks: int) -> str | list[int] | _core.Topology:
    """Parses a `topology=` argument.

    Args:
        given: The argument, of any type that `TopologyLike` lists.
        ranks: Number of ranks; the product of the sizes must be equal to it.

    Returns:
        "hosts", the sizes, or a topology if speeds are given too.

    Raises:
        UsageError: `given` cannot be parsed, or is no mesh of `ranks` ranks.
    """
    if isinstance(given, str) and given != "hosts":
        given = _from_text(given)
    if isinstance(given, str):
        return given
    sizes = sizes_of(given)
    if min(sizes, default=0) < 1 or math.prod(sizes) != ranks:
        shape = "x".join(map(str, sizes)) or "no dimensions"
        raise UsageError(f"topology {shape} is not one of this job's {ranks} ranks")
    return given if isinstance(given, _core.Topology) else sizes


def canonical_topology(given: TopologyLike | None, ranks: int) -> str:
    """Returns a string that is equal for arguments with the same meaning, to compare ranks.

    If `parse` raises a UsageError, the string is its message.
    """
    try:
        parsed = None if given is None else parse(given, ranks)
    except UsageError as error:
        return str(error)
    return parsed.to_json() if isinstance(parsed, _core.Topology) else str(parsed)


def _from_text(text: str) -> list[int] | _core.Topology:
    if _SIZES.fullmatch(text):
        return [int(size) for size in text.split("x")]
    try:
        content = files.read_text(Path(text))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"topology {text!r} is neither 'hosts', nor sizes such as '2x4', nor a file that can "
            f"be read ({reason})"
        ) from None
    try:
        if '"usbyte-network-1"' in content:
            measured = _core.NetworkModel.from_json(content).topology
            if measured is None:
                raise UsageError("the network has no dimensions; probe it with --dimensions")
            return measured
        return _core.Topology.from_json(content)
    except UsageError as error:
        raise UsageError(f"topology '{text}': {error}") from None


def of_sizes(sizes: Sequence[int]) -> _core.Topology:
    """Returns a mesh of these sizes whose speeds are not known yet.

    All speeds are 1 byte/s. Two dimensions are named "inside" and "between", others "d0", "d1", ...
    """
    names = ["inside", "between"] if len(sizes) == 2 else [f"d{i}" for i in range(len(sizes))]
    return _core.Topology(
        [_core.Dimension(name, size, 1.0) for name, size in zip(names, sizes, strict=True)]
    )

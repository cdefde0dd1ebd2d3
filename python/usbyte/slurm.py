# SPDX-License-Identifier: Apache-2.0
"""Parsers for the compressed lists in Slurm's variables: hosts and tasks per node."""

import itertools
import math
import re

_BRACKET = re.compile(r"\[([^][]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")
# Without a limit, a damaged list could fill the memory.
_MOST = 1 << 16
_LONGEST_NAME = 255  # The limit of Linux and of DNS.


def expand_hosts(text: str) -> list[str]:
    """Expands a host list such as `gpu[01-03,7],login2`.

    Args:
        text: Names separated by commas. Brackets hold numbers and ranges, which are zero-padded to
            the width of the range's first number. Several brackets in one name multiply.

    Returns:
        The hosts, in the list's order: `gpu[01-02,7]` is `gpu01`, `gpu02`, `gpu7`.

    Raises:
        ValueError: The text is not a host list, or has more than 65536 hosts.
    """
    hosts: list[str] = []
    for pattern in _split(text):
        hosts += _expand_one(pattern, _MOST - len(hosts))
    return hosts


def expand_counts(text: str) -> list[int]:
    """Expands a list of tasks per node: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        ValueError: The text is not such a list, or has more than 65536 nodes.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise ValueError("not a list of tasks per node such as 2(x3),1")
        nodes = int(match[2] or 1)
        _check_count(len(counts) + nodes, _MOST)
        counts += [int(match[1])] * nodes
    return counts


def _split(text: str) -> list[str]:
    """Splits the text at the commas outside brackets."""
    patterns, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            break
        if char == "," and depth == 0:
            patterns.append("")
        else:
            patterns[-1] += char
    if depth != 0 or not all(patterns):
        raise ValueError("not a host list such as gpu[01-03,7],login2")
    return patterns


def _expand_one(pattern: str, most: int) -> list[str]:
    # re.split with a group alternates: text, bracket, text, bracket, ..., text.
    pieces = _BRACKET.split(pattern)
    choices = [_numbers(piece, most) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    _check_count(math.prod(map(len, choices)), most)
    if sum(max(map(len, choice)) for choice in choices) > _LONGEST_NAME:
        raise ValueError(f"a host name of the list has more than {_LONGEST_NAME} characters")
    return ["".join(choice) for choice in itertools.product(*choices)]


def _check_count(nodes: int, most: int) -> None:
    if nodes > most:
        raise ValueError(f"the list has more than {_MOST} nodes")


def _numbers(ranges: str, most: int) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"[{ranges}] is not a list of numbers and ranges such as [01-03,7]")
        last = int(match[2] or match[1])
        _check_count(len(numbers) + last - int(match[1]) + 1, most)
        numbers += [f"{n:0{len(match[1])}d}" for n in range(int(match[1]), last + 1)]
    return numbers

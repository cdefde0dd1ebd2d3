# SPDX-License-Identifier: Apache-2.0
"""Parsing and formatting of sizes, rates and times: "25M", "10gbit", "25us".

This module needs neither the C++ core nor torch.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

_NUMBER = re.compile(r"\s*([0-9]+\.?[0-9]*(?:e[+-]?[0-9]{1,3})?)\s*([a-z/]*)\s*", re.IGNORECASE)
_SIZE = re.compile(r"([0-9]{1,19})([kmg]?)(ib)?", re.IGNORECASE)
_MOST_BYTES = (1 << 63) - 1
# "b" alone is left out: some write it for bytes.
_RATE_UNIT = re.compile(
    r"(?P<prefix>[kmgtKMGT]?)(?:(?i:bits?)(?:/s)?|b/s|bps|(?P<bytes>B)(?:/s|ps)?)"
)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"": 0, "s": 0, "ms": -3, "us": -6, "ns": -9}  # Powers of ten.


def parse_bytes(text: str) -> int:
    """Returns the bytes of "8388608", "8M" or "8MiB".

    The letters k, M and G are powers of 1024, as in the USBYTE_* variables.

    Raises:
        ValueError: The text is not a size, or the size is not from 1 to 2**63 - 1.
    """
    match = _SIZE.fullmatch(text.strip())
    # "iB" needs a letter before it, as in the parser of the C++ core.
    value = 0
    if match and not (match[3] and not match[2]):
        value = int(match[1]) << (10 * _POWERS[match[2].lower()])
    if not 1 <= value <= _MOST_BYTES:
        raise ValueError(
            f"{text!r} is no size; write a whole number of bytes from 1 to {_MOST_BYTES}, also "
            "with k, M or G (powers of 1024), such as 8388608, 8M or 8MiB"
        )
    return value


def parse_rate(text: str) -> float:
    """Returns the bytes per second of "10gbit", "25Gb/s", "200Mbps" or "1.25GB/s".

    Bits are "bit", "b/s" or "bps", bytes "B". The prefixes k, M, G and T are powers of 1000, as
    usual for networks.

    Raises:
        ValueError: The text is not a rate, or the rate is not positive and finite.
    """
    match = _NUMBER.fullmatch(text)
    unit = _RATE_UNIT.fullmatch(match[2]) if match else None
    rate = 0.0
    if match and unit:
        per_byte = 1 if unit["bytes"] else 8
        rate = _times_ten_to(match[1], 3 * _POWERS[unit["prefix"].lower()]) / per_byte
    if not 0 < rate < math.inf:
        raise ValueError(
            f"{text!r} is no rate; write a number with bit, kbit, mbit, gbit or tbit, with Mb/s, "
            "Gb/s or Gbps (bits), or with MB/s or GB/s (bytes), such as 10gbit, 25Gb/s or 1.25GB/s"
        )
    return rate


def parse_seconds(text: str) -> float:
    """Returns the seconds of "25us", "8ms", "1.5s" or "1.5".

    Raises:
        ValueError: The text is not a time of at least 0.
    """
    match = _NUMBER.fullmatch(text)
    seconds = math.inf
    if match and match[2].lower() in _SECONDS:
        seconds = _times_ten_to(match[1], _SECONDS[match[2].lower()])
    if math.isinf(seconds):
        raise ValueError(
            f"{text!r} is no time; write a number of seconds, or one with ms, us or ns, such as "
            "1.5, 8ms or 25us"
        )
    return seconds


def format_bytes(size: float) -> str:
    """Formats bytes: 65536 as "64 KiB"."""
    for power, prefix in ((3, "G"), (2, "M"), (1, "K")):
        if size >= 1024**power:
            return f"{size / 1024**power:.4g} {prefix}iB"
    return f"{size:.4g} B"


def format_rate(bytes_per_s: float) -> str:
    """Formats bytes per second: 1.25e9 as "10gbit"."""
    bits = bytes_per_s * 8
    for power, prefix in ((4, "t"), (3, "g"), (2, "m"), (1, "k")):
        if bits >= 1000**power:
            return f"{bits / 1000**power:.6g}{prefix}bit"
    return f"{bits:.6g}bit"


def spoken_rate(bytes_per_s: float) -> str:
    """Formats bytes per second for a sentence, with three digits: 1.175e9 as "9.4 Gb/s"."""
    bits = float(f"{bytes_per_s * 8:.3g}")
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if bits >= 1000**power:
            return f"{bits / 1000**power:g} {prefix}b/s"
    return f"{bits:g} b/s"


def spoken_seconds(seconds: float) -> str:
    """Formats seconds for a sentence, with three digits: 0.00011347 as "113 us"."""
    rounded = float(f"{seconds:.3g}")
    for unit in ("s", "ms", "us"):
        scaled = rounded * 10 ** -_SECONDS[unit]
        if scaled >= 1:
            return f"{scaled:.4g} {unit}"
    return f"{rounded * 1e9:.4g} ns"


def format_seconds(seconds: float) -> str:
    """Formats seconds: 25e-6 as "25us"."""
    for unit in ("s", "ms", "us"):
        scaled = seconds * 10 ** -_SECONDS[unit]
        if abs(scaled) >= 1:
            return f"{scaled:.4g}{unit}"
    return f"{seconds * 1e9:.4g}ns" if seconds else "0s"


def format_cost(alpha_s: float, beta_s_per_byte: float, overlap_s: float) -> str:
    """Formats a cost line as "6ms (overlap 5ms) + 12.6 ns/byte".

    Args:
        alpha_s: The startup, in seconds.
        beta_s_per_byte: Seconds per byte.
        overlap_s: The startup overlap, in seconds; 0 is left out.
    """
    overlap = f" (overlap {format_seconds(overlap_s)})" if overlap_s else ""
    return f"{format_seconds(alpha_s)}{overlap} + {beta_s_per_byte * 1e9:.3g} ns/byte"


def _times_ten_to(number: str, power: int) -> float:
    """Returns number * 10**power, rounded once: 25e-6 for "25us", not 2.4999999999999998e-05."""
    return float(Decimal(number).scaleb(power))

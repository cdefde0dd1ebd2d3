# SPDX-License-Identifier: Apache-2.0
"""Rates of the lab's links, which tbf shapes."""

from __future__ import annotations

import re

from usbyte.errors import UsageError
from usbyte.lab.system_commands import run_command, run_json, unusable

# The token bucket of a link holds 1 ms of its rate, and at least two of the largest packets of TCP:
# with fewer, a link of 430 Mbit/s or more does not reach its rate. Up to 215 Mbit/s one packet is
# enough, and a larger bucket would let through too many bytes at once. In between, the minimum is
# 2.6 ms of the rate. The queue holds 32 ms of the rate.
_BURST_S, _SLOW_BURST_S, _PACKET = 1e-3, 2.6e-3, 68 << 10
_QUEUE_S, _LEAST_QUEUE = 32e-3, 4 << 20


def shape_link(tc: list[str], device: str, bytes_per_s: float | None) -> None:
    """Sets the sending rate of one end of a link.

    Args:
        tc: The command that runs tc where the device is.
        device: Name of the device.
        bytes_per_s: The rate; None: no shaping.

    Raises:
        UsageError: The command failed.
    """
    if bytes_per_s is None:
        shaped = run_json(*tc, "-j", "qdisc", "show", "dev", device, "root")
        if any(q["kind"] == "tbf" for q in shaped):
            run_command(*tc, "qdisc", "del", "dev", device, "root")
        return
    least = min(max(_PACKET, bytes_per_s * _SLOW_BURST_S), 2 * _PACKET)
    burst = round(max(least, bytes_per_s * _BURST_S))
    queue = max(_LEAST_QUEUE, round(bytes_per_s * _QUEUE_S))
    options = ["rate", f"{round(bytes_per_s * 8)}bit", "burst", f"{burst}b", "limit", f"{queue}b"]
    run_command(*tc, "qdisc", "replace", "dev", device, "root", "tbf", *options)


def rate_of(link: str) -> float | None:
    """Returns the rate of a link in bytes/s; None if it is not shaped."""
    shaping = run_json("tc", "-j", "qdisc", "show", "dev", link, "root")
    return next((q["options"]["rate"] for q in shaping if q["kind"] == "tbf"), None)


def shape_own_link(bytes_per_s: float | None) -> None:
    """Sets the sending rate of this host of a lab, in all dimensions, also while ranks run.

    Call it in a process that runs on that host.

    Args:
        bytes_per_s: Rate of the links; None: no shaping.

    Raises:
        UsageError: The process does not run on a host of a lab, or labs do not work here.
    """
    if missing := unusable():
        raise UsageError(f"the lab cannot be used here: {missing}")
    found = [a["local"] for link in run_json("ip", "-j", "addr") for a in link["addr_info"]]
    if not any(address.startswith("10.98.0.") for address in found):
        raise UsageError(
            "this process is not on a host of a lab, so it has no link to shape: start it by "
            "`usbyte lab run`"
        )
    links = [link["ifname"] for link in run_json("ip", "-j", "link", "show")]
    for link in links:
        if re.fullmatch(r"eth[0-9]", link):
            shape_link(["tc"], link, bytes_per_s)

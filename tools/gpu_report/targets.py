# SPDX-License-Identifier: Apache-2.0
"""Compares measurements with the targets of the project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_report.running import PASSED, Outcome

_NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Target:
    """A target and its measurement.

    Attributes:
        what: Name of the measured quantity.
        measured: The measured value, with its unit.
        wanted: The value to reach, with its unit.
        met: Whether the target is met; None if nothing was measured.
    """

    what: str
    measured: str
    wanted: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """The result as text: "met", "MISSED" or "not measured"."""
        return {True: "met", False: "MISSED", None: _NOT_MEASURED}[self.met]


def targets(parts: Mapping[str, Outcome]) -> list[Target]:
    """Returns all targets, also those of parts that have not run.

    The results of a part can have their own targets, in the field "targets": a list of objects with
    the fields "what", "measured", "wanted" and "met".
    """
    found = [
        _verdict(parts, "tests", "the tests of tests/gpu pass"),
        _verdict(parts, "memcheck", "compute-sanitizer memcheck finds nothing in the kernels"),
        _verdict(parts, "racecheck", "compute-sanitizer racecheck finds nothing in the kernels"),
        _verdict(parts, "synccheck", "compute-sanitizer synccheck finds nothing in the kernels"),
    ]
    for name, what in _MEASURED.items():
        part = parts.get(name)
        data = part.data if part and isinstance(part.data, dict) else {}
        if own := data.get("targets"):
            found += [_from_results(target) for target in own]
        elif name == "collective" and "wrong" in data:
            wrong = int(data["wrong"])
            found.append(Target(what, f"{wrong} wrong", "0 wrong", wrong == 0))
        else:
            found.append(Target(what, _NOT_MEASURED, "", None))
    return found


_MEASURED = {
    "pack": "bandwidth and latency of packing",
    "collective": "collectives of NCCL without a wrong element",
    "step": "host time of the engine for each block",
    "overhead": "overhead of a single rank, host time for each block",
}


def _verdict(parts: Mapping[str, Outcome], name: str, what: str) -> Target:
    part = parts.get(name)
    if part is None or not part.seconds:
        return Target(what, _NOT_MEASURED, PASSED, None)
    refused = part.verdict not in (PASSED, "failed", "timed out")
    return Target(what, part.verdict, PASSED, None if refused else part.verdict == PASSED)


def _from_results(target: Mapping[str, Any]) -> Target:
    met = target.get("met")
    measured, wanted = str(target["measured"]), str(target["wanted"])
    return Target(str(target["what"]), measured, wanted, None if met is None else bool(met))

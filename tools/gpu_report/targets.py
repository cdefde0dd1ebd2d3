"""What was to be reached, beside what was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_report.running import PASSED, Outcome

_NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Target:
    """One of them.

    Attributes:
        what: Is measured.
        measured: With its unit.
        wanted: Likewise.
        met: None where nothing was measured.
    """

    what: str
    measured: str
    wanted: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """For tables."""
        return {True: "met", False: "MISSED", None: _NOT_MEASURED}[self.met]


def targets(parts: Mapping[str, Outcome]) -> list[Target]:
    """All targets, also of parts that have not run.

    A part's results tell its own ones under "targets": "what", "measured", "wanted", "met".
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
        if told := data.get("targets"):
            found += [_told(target) for target in told]
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


def _told(target: Mapping[str, Any]) -> Target:
    met = target.get("met")
    measured, wanted = str(target["measured"]), str(target["wanted"])
    return Target(str(target["what"]), measured, wanted, None if met is None else bool(met))

# SPDX-License-Identifier: Apache-2.0
"""The command of `make gpu-test`.

Exit code: 0 for success; 1 if a part failed, timed out or had no time left; 2 if torch sees no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpu_report import building, machine, parts, running
from gpu_report.report import Report

_BUILD_LIMIT_S = 240.0
_LEAST_S = 10.0  # With less time left, a part is not started.


def main() -> int:
    """Runs all parts in order, and writes the report after each; returns the exit code."""
    options = _options()
    deadline = time.monotonic() + options.budget
    try:
        facts = machine.ask(options.revision)
    except machine.NoGpuError as error:
        print(f"gpu-test: {error}", file=sys.stderr)
        return 2
    nccl = str(facts.pop("NCCL library"))  # A path of this machine, not for the report.
    place = building.Place(options.build.resolve())
    report = Report(facts, options.out, place.logs)
    print(f"gpu-test: {facts['GPU']}, torch {facts['torch']}, report: {report.markdown}")

    def run(part: running.Part) -> bool:
        left = deadline - time.monotonic()
        print(f"gpu-test: {part.name} ... ", end="", flush=True)
        outcome = running.run(part, left, place, _LEAST_S)
        print(f"{outcome.verdict}, {outcome.seconds:.0f} s {outcome.reason}".rstrip(), flush=True)
        report.add(outcome)
        return outcome.good

    command = [sys.executable, "-m", "gpu_report.building", str(place.folder), options.wheels]
    chosen = parts.all_parts(place, options.only, nccl)
    built = run(running.Part("build", "Build from source", command, _BUILD_LIMIT_S))
    for part in chosen:
        if built:
            run(part)
        else:
            report.add(running.unstarted(part, "the build failed"))
    print(report.summary())
    return 0 if report.good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu-test", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/gpu"), help="folder of the report")
    parser.add_argument("--build", type=Path, default=Path("build/gpu"), help="build folder")
    parser.add_argument(
        "--wheels", default="", help="folder of wheels, for a machine without a package index"
    )
    parser.add_argument("--revision", default="", help="revision of the sources; default: git's")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for all parts")
    parser.add_argument("--only", default="", help="parts to run, separated by commas")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

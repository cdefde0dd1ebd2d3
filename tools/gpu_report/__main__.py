"""The command behind `make gpu-test`.

Exit code: 0; 1 if a part failed, timed out or had no time left; 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpu_report import building, machine, parts, running
from gpu_report.report import Report

_BUILD_LIMIT_S = 240.0
_LEAST_S = 10.0  # a part is not begun with less


def main() -> int:
    """Runs all parts, one after the other; the report is written after each."""
    options = _options()
    deadline = time.monotonic() + options.budget
    try:
        facts = machine.ask(options.revision)
    except machine.NoGpuError as error:
        print(f"gpu-test: {error}", file=sys.stderr)
        return 2
    nccl = str(facts.pop("NCCL library"))  # where it lies is nobody else's concern
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
    parser.add_argument("--out", type=Path, default=Path("docs/gpu"), help="where the report goes")
    parser.add_argument("--build", type=Path, default=Path("build/gpu"), help="build folder")
    parser.add_argument(
        "--wheels", default="", help="folder of wheels, for a machine without a package index"
    )
    parser.add_argument("--revision", default="", help="of the sources, where git cannot tell")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--only", default="", help="names of parts, separated by commas")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

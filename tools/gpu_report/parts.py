# SPDX-License-Identifier: Apache-2.0
"""The parts of `make gpu-test`, in the order in which they run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gpu_report.building import Place
from gpu_report.running import FAILED, PASSED, SKIPPED, Part, read_json

_SANITIZED = ("--small", "1")
_FEW_ROWS = ("--batch", "20000", "--batches", "10")
_NO_SANITIZER = ("Device not supported", "not supported on this", "Insufficient permissions")


def all_parts(place: Place, only: str = "", nccl: str = "") -> list[Part]:
    """Returns the parts to run.

    Args:
        place: The build.
        only: Names of the parts to run, separated by commas; "" for all.
        nccl: Path of the NCCL library, for the C++ benchmarks; Python programs use torch's.

    Raises:
        SystemExit: A name in `only` is unknown.
    """
    found = [
        *_benchmarks(place, nccl),
        *_sanitizers(place),
        _tests(240.0 if not only else 420.0),
        _overhead(),
        _training(),
    ]
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    known = [part.name for part in found]
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    return [part for part in found if not wanted or part.name in wanted]


def _benchmarks(place: Place, nccl: str) -> list[Part]:
    rows = (
        ("pack", "Kernels", (), 60.0),
        ("collective", "Collectives of NCCL", ("--backend", "nccl", "--ranks", "0"), 45.0),
        ("step", "A synthetic step", (), 60.0),
        ("sparse", "Rows partitioned by server", ("--device", "0"), 30.0),
    )
    return [
        Part(
            name,
            title,
            [place.binary(f"usbyte_bench_{name}"), *flags, "--json", "{results}"],
            limit_s,
            env={"USBYTE_NCCL_LIB": nccl} if nccl else {},
            results=read_json,
            asks_help=True,
        )
        for name, title, flags, limit_s in rows
    ]


def _sanitizers(place: Place) -> list[Part]:
    kernels = (place.binary("usbyte_bench_pack"), *_SANITIZED)
    partition = (place.binary("usbyte_bench_sparse"), "--device", "0", *_FEW_ROWS)
    of_accesses = "Accesses out of bounds or misaligned, and errors of CUDA calls."
    rows = (
        ("memcheck", "memcheck", "the kernels", kernels, of_accesses),
        ("racecheck", "racecheck", "the kernels", kernels,
         "Accesses to shared memory that nothing orders."),
        ("synccheck", "synccheck", "the kernels", kernels,
         "Threads that miss where others wait for them."),
        ("memcheck_sparse", "memcheck", "the partition", partition, of_accesses),
    )  # fmt: skip
    return [
        Part(
            name,
            f"compute-sanitizer {tool} on {what}",
            ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", *command],
            50.0,
            unsupported=_NO_SANITIZER,
            quoted=("ERROR SUMMARY", "RACECHECK SUMMARY"),
            meaning=meaning,
        )
        for name, tool, what, command, meaning in rows
    ]


def _tests(limit_s: float) -> Part:
    return Part(
        "tests",
        "Tests on the GPU",
        [
            *(sys.executable, "-m", "pytest", "tests/gpu", "-v", "-p", "no:cacheprovider"),
            *("--device", "cuda", "--record", "{results}"),
        ],
        limit_s,
        results=read_tests,
        meaning="The tests of tests/gpu; what each has found out about this machine is beside it.",
    )


def _overhead() -> Part:
    return Part(
        "overhead",
        "What usbyte costs where it cannot help",
        [sys.executable, "benchmarks/gpu_overhead.py", "--json", "{results}"],
        140.0,
        results=read_json,
    )


def _training() -> Part:
    return Part(
        "training",
        "Training against DDP",
        [
            *(sys.executable, "benchmarks/gpu_training.py", "--rounds", "3", "--steps", "8"),
            *("--contenders", "alone,ddp:1,ddp:5,ddp:25,auto:auto", "--tune-steps", "3"),
            *("--budget", "{limit}", "--json", "{results}"),
        ],
        300.0,
        results=read_training,
    )


def read_training(path: Path) -> Any:
    """Reads the results of the training benchmark.

    Raises:
        ValueError: The results have no measurement.
    """
    found = read_json(path)
    if not found["rows"]:
        reasons = "; ".join(f"{what}: {why}" for what, why in found["skipped"].items())
        raise ValueError(f"nothing was measured: {reasons}")
    return found


def read_tests(path: Path) -> dict[str, Any]:
    """Reads the record that tests/gpu/conftest.py writes: a line of JSON for each finished test.

    Raises:
        ValueError: No test has passed.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    counts = {what: sum(line["verdict"] == what for line in lines) for what in _VERDICTS}
    if not counts[PASSED]:
        raise ValueError(f"none of {len(lines)} tests has passed")
    rows = [
        {
            "test": line["test"],
            "verdict": line["verdict"],
            "took_s": line["seconds"],
            "found": "; ".join(f"{name}: {value}" for name, value in line["found"]),
        }
        for line in lines
    ]
    skipped = {line["test"]: line["reason"] for line in lines if line["verdict"] == SKIPPED}
    failed = {line["test"]: line["reason"] for line in lines if line["verdict"] == FAILED}
    notes = [f"{what}: {why}" for what, why in failed.items()]
    return {"counts": counts, "rows": rows, "skipped": skipped, "notes": notes}


_VERDICTS = (PASSED, FAILED, SKIPPED)

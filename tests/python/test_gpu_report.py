# SPDX-License-Identifier: Apache-2.0
"""`make gpu-test` without a GPU: how parts are run and judged, and what the report says."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

from gpu_report import building, machine, parts, report, running  # noqa: E402
from gpu_report.running import FAILED, NOT_RUN, PASSED, SKIPPED, TIMED_OUT  # noqa: E402

pytestmark = pytest.mark.evidence

GPU = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def place(tmp_path):
    return building.Place(tmp_path / "gpu")


def part(code, name="part", limit_s=30.0, **options):
    return running.Part(name, name.title(), [sys.executable, "-c", code], limit_s, **options)


def test_a_part_passes_or_fails_by_its_exit_code(place):
    good = running.run(part("print('fine, 3 errors: 0')", quoted=("errors",)), 60, place)
    assert (good.verdict, good.reason, good.quoted) == (PASSED, "", ["fine, 3 errors: 0"])
    bad = running.run(part("import sys; print('a'); sys.exit('the reason')"), 60, place)
    assert (bad.verdict, bad.reason) == (FAILED, "exit code 1: the reason")
    assert (place.logs / "part.log").read_text() == "a\nthe reason\n"


def test_a_part_that_hangs_is_ended_with_what_it_has_started(place, tmp_path):
    # A shell, which begins at once however busy the machine is.
    child = tmp_path / "child"
    command = ["sh", "-c", f"sleep 600 & echo $! > {shlex.quote(str(child))}; wait"]
    hangs = running.Part("part", "Part", command, 5.0)
    begin = time.monotonic()
    outcome = running.run(hangs, 60, place)
    assert outcome.verdict == TIMED_OUT
    assert time.monotonic() - begin < running._GRACE_S + 10
    status = Path(f"/proc/{child.read_text().strip()}/status")
    while status.exists() and "Z (zombie)" not in status.read_text():
        assert time.monotonic() - begin < 60, "it lives on"
        time.sleep(0.05)


def test_a_part_is_not_begun_without_time(place):
    outcome = running.run(part("print()"), 4.0, place, least_s=10.0)
    assert (outcome.verdict, outcome.good) == (NOT_RUN, False)
    assert "4 s were left" in outcome.reason


def test_a_part_that_the_machine_cannot_run_is_skipped(place):
    missing = running.Part("part", "Part", ["no-such-program"], 5.0)
    assert running.run(missing, 60, place).verdict == SKIPPED
    unbuilt = running.Part("part", "Part", [place.binary("usbyte_bench_pack")], 5.0)
    assert running.run(unbuilt, 60, place).verdict == FAILED
    refused = part("import sys; sys.exit('Device not supported')", unsupported=("not supported",))
    assert running.run(refused, 60, place).verdict == SKIPPED


def test_results_are_read_and_needed(place):
    code = "import sys; open(sys.argv[1], 'w').write('{\"rows\": [1]}')"
    command = [sys.executable, "-c", code, "{results}"]
    wanted = running.Part("part", "Part", command, 30.0, results=running.read_json)
    assert running.run(wanted, 60, place).data == {"rows": [1]}
    nothing = part("pass", results=running.read_json)
    outcome = running.run(nothing, 60, place)
    assert outcome.verdict == FAILED
    assert "results cannot be read" in outcome.reason


def test_help_tells_what_is_measured(place, tmp_path):
    program = tmp_path / "bench"
    told = "usage: bench\\n\\nMeasures.\\n\\n  time  s\\n\\n  --json x\\n"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = --help ] && printf '{told}'\nexit 0\n")
    program.chmod(0o755)
    asked = running.Part("part", "Part", [str(program)], 30.0, asks_help=True)
    assert running.run(asked, 60, place).meaning == "Measures.\n\n  time  s"


def test_files_are_named_after_the_gpu():
    assert machine.slug(GPU) == "h100-80gb-hbm3"
    assert machine.slug("NVIDIA") == "nvidia"
    assert machine.slug("Tesla T4") == "tesla-t4"


def outcomes():
    """One of each kind."""
    pack = {
        "benchmark": "pack",
        "rows": [
            {"list": "gpt2", "size_bytes": 8 << 20, "bytes_per_s": 1.25e12, "time_s": 6e-6}
        ],
        "targets": [
            {"what": "pack, 8 MiB", "measured": "93 %", "wanted": "at least 90 %", "met": True},
            {"what": "pack, 64 KiB", "measured": "12 us", "wanted": "at most 10 us", "met": False},
        ],
    }  # fmt: skip
    training = {"rows": [], "skipped": {"25gbit": "no tc"}, "columns": {"median": "s of a step"}}
    return [
        running.Outcome("build", "Build", PASSED, 40.0),
        running.Outcome("pack", "Kernels", PASSED, 9.0, command="usbyte_bench_pack", data=pack),
        running.Outcome("memcheck", "Memcheck", SKIPPED, 1.0, "no such tool", "compute-sanitizer"),
        running.Outcome("tests", "Tests", TIMED_OUT, 200.0, "not over after 200 s"),
        running.Outcome("training", "Training", PASSED, 90.0, data=training),
    ]


def written(tmp_path):
    found = report.Report({"GPU": GPU, "driver": "580"}, tmp_path / "out", tmp_path)
    (tmp_path / "pack.log").write_text("the log\n")
    for outcome in outcomes():
        found.add(outcome)
    return found


def test_the_report_tells_everything(tmp_path):
    found = written(tmp_path)
    text = found.markdown.read_text()
    assert found.markdown.name == "h100-80gb-hbm3.md"
    assert "| driver | 580 |" in text
    assert "| Tests | timed out | 200 | not over after 200 s |" in text
    assert "| pack, 8 MiB | 93 % | at least 90 % | met |" in text
    assert "| pack, 64 KiB | 12 us | at most 10 us | MISSED |" in text
    assert "| compute-sanitizer memcheck finds nothing in the kernels | skipped |" in text
    assert "| host time of the engine for each block | not measured |" in text
    assert "| list | size | rate | time |" in text
    assert "| gpt2 | 8 MiB | 1250 GB/s | 6 us |" in text
    assert "- median: s of a step" in text
    not_run = text[text.index("## Not run") :]
    assert "Memcheck (skipped): no such tool. `compute-sanitizer`" in not_run
    assert "Training, 25gbit: no tc" in not_run
    told = json.loads((tmp_path / "out" / "h100-80gb-hbm3.json").read_text())
    assert not told["good"]
    assert [p["verdict"] for p in told["parts"]] == [o.verdict for o in outcomes()]
    assert "===== pack: passed\nthe log" in (tmp_path / "out" / "h100-80gb-hbm3.log").read_text()
    assert "MISSED" in found.summary()


def test_the_report_is_there_after_the_first_part(tmp_path):
    found = report.Report({"GPU": GPU}, tmp_path, tmp_path)
    found.add(outcomes()[0])
    assert "| Build | passed |" in found.markdown.read_text()
    assert found.good


def test_skipping_is_good_and_a_timeout_is_not(tmp_path):
    found = report.Report({"GPU": GPU}, tmp_path, tmp_path)
    for outcome in outcomes()[:3]:
        found.add(outcome)
    assert found.good
    found.add(outcomes()[3])
    assert not found.good


def test_tests_that_all_skip_do_not_pass(tmp_path):
    line = {"test": "a", "verdict": "skipped", "seconds": 0.0, "reason": "no GPU", "found": []}
    path = tmp_path / "tests.json"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="none of 1 tests has passed"):
        parts.read_tests(path)
    path.write_text(
        "\n".join(json.dumps(line | {"verdict": v}) for v in ("skipped", "passed", "failed")) + "\n"
    )
    found = parts.read_tests(path)
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["skipped"] == {"a": "no GPU"}


def test_parts_can_be_chosen(place):
    names = [p.name for p in parts.all_parts(place)]
    assert names == [
        "pack", "collective", "step", "sparse", "memcheck", "racecheck", "synccheck",
        "memcheck_sparse", "tests", "overhead", "training",
    ]  # fmt: skip
    assert [p.name for p in parts.all_parts(place, "tests,pack")] == ["pack", "tests"]
    with pytest.raises(SystemExit, match="no part pick"):
        parts.all_parts(place, "pick")


def wheel(folder, name, version):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", f"version = {version!r}\n")
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        file.writestr(f"{info}/METADATA", about)
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr(f"{info}/WHEEL", kind)
        file.writestr(f"{info}/RECORD", "")
    return path


def test_what_is_missing_comes_from_a_folder_of_wheels(tmp_path):
    site, wheels = tmp_path / "site", tmp_path / "wheels"
    wheels.mkdir()
    wanted = ["usbyte-made-up>=2", "pytest>=8.0", "torch>=2.4"]
    assert building.missing(wanted, site) == ["usbyte-made-up>=2"]
    with pytest.raises(SystemExit, match="no wheels in"):
        building.provide(wanted, site, str(wheels))
    old = wheel(wheels, "usbyte_made_up", "1.0")
    with pytest.raises(SystemExit, match="do not hold usbyte-made-up>=2"):
        building.provide(wanted, site, str(wheels))
    old.unlink()
    wheel(wheels, "usbyte_made_up", "2.1")
    building.provide(wanted, site, str(wheels))
    assert building.missing(wanted, site) == []
    code = "import usbyte_made_up; print(usbyte_made_up.version)"
    env = {**os.environ, "PYTHONPATH": building.Place(tmp_path).environ()["PYTHONPATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "2.1\n", done.stderr


def test_without_a_gpu_it_says_so_at_once():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = ["make", "gpu-test", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "gpu-test: torch " in done.stderr
    assert "PYTHON=/path/to/python3" in done.stderr

# SPDX-License-Identifier: Apache-2.0
"""`usbyte doctor`: what it reports, and what it says where something is broken."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click.testing
import pytest

import usbyte
from usbyte import cluster_env
from usbyte.cli import main
from usbyte.cli.doctor import findings, machine, nccl, selftest


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in cluster_env.usbyte_variables():
        monkeypatch.delenv(name)


@pytest.fixture
def no_self_test(monkeypatch):
    monkeypatch.setattr(selftest, "run", lambda timeout_s: "")


def invoke(*arguments):
    return click.testing.CliRunner().invoke(main, arguments)


def examine():
    """Runs the doctor in this process; returns its exit status and its findings by name."""
    result = invoke("doctor", "--json")
    report = json.loads(result.output)
    assert report["healthy"] == (result.exit_code == 0)
    return result.exit_code, {finding["name"]: finding for finding in report["findings"]}


def fresh(code, *arguments):
    """Runs `code` and then the doctor in a fresh process."""
    command = [sys.executable, "-c", f"{code}; from usbyte.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def test_version():
    assert invoke("--version").output == f"usbyte, version {usbyte.__version__}\n"


def test_healthy_machine_with_a_real_all_reduce():
    usbyte_command = Path(sys.executable).with_name("usbyte")
    run = subprocess.run(
        [usbyte_command, "doctor"], capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "everything works"
    assert "\x1b" not in run.stdout  # plain where it is no terminal
    for word in ("extension", "torch", "cores", "USBYTE_CREDIT_BYTES", "works, "):
        assert word in run.stdout


@pytest.mark.usefixtures("no_self_test")
def test_json_has_the_build_and_the_variables(monkeypatch):
    monkeypatch.setenv("USBYTE_CREDIT_BYTES", "2M")
    status, found = examine()
    assert status == 0
    assert usbyte.__version__ in found["extension"]["value"]
    assert found["CUDA part"]["value"].startswith(("on (", "off ("))
    assert found["USBYTE_CREDIT_BYTES"]["value"] == "2097152 bytes (set)"
    assert found["USBYTE_BUCKET_BYTES"]["value"] == "26214400 bytes"


@pytest.mark.usefixtures("no_self_test")
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("USBYTE_CREDITS", "2M", "did you mean USBYTE_CREDIT_BYTES"),
        ("USBYTE_STALL_LIMIT_S", "soon", "seconds"),
    ],
)
def test_bad_variable(monkeypatch, name, text, words):
    monkeypatch.setenv(name, text)
    status, found = examine()
    assert status == 1
    assert found["USBYTE_*"]["status"] == "broken"
    assert words in found["USBYTE_*"]["value"]
    assert found[name]["value"] == f"{text} (set)"


@pytest.mark.usefixtures("no_self_test")
def test_bad_launcher_variables(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    status, found = examine()
    assert status == 1
    assert "WORLD_SIZE=(unset)" in found["place"]["value"]
    assert "torchrun" in found["place"]["remedy"]


@pytest.mark.parametrize("missing", [["torch"], ["usbyte._core"], ["usbyte._core", "torch"]])
def test_runs_without(missing):
    hide = "; ".join(f"sys.modules[{name!r}] = None" for name in missing)
    run = fresh(f"import sys; {hide}", "doctor", "--json")
    assert run.returncode == 1, run.stderr
    found = {finding["name"]: finding for finding in json.loads(run.stdout)["findings"]}
    for name in missing:
        broken = found["extension" if name == "usbyte._core" else name]
        assert broken["status"] == "broken"
        assert "pip install" in broken["remedy"]
    assert "not run" in found["2-rank all_reduce"]["value"]
    assert "cores" in found


def test_failing_self_test(monkeypatch):
    monkeypatch.setattr(selftest, "_WORKER", "import sys; sys.exit('no such luck')")
    status, found = examine()
    assert status == 1
    assert "no such luck" in found["2-rank all_reduce"]["value"]
    assert "usbyterun" in found["2-rank all_reduce"]["remedy"]


def test_self_test_ends_in_time_and_leaves_no_process(monkeypatch, tmp_path):
    sleeper = f"import os, time; open(r'{tmp_path}/' + str(os.getpid()), 'w'); time.sleep(60)"
    monkeypatch.setattr(selftest, "_WORKER", sleeper)
    assert "no result within 2 s" in selftest.run(2)
    for process in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(process.name), 0)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.usefixtures("no_self_test")
def test_nccl_library_of_the_variable(monkeypatch, tmp_path):
    source, library = tmp_path / "fake.c", tmp_path / nccl.SONAME
    source.write_text("int ncclGetVersion(int* version) { *version = 22703; return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("USBYTE_NCCL_LIB", str(library))
    found = next(iter(nccl.libraries(None)))
    assert found == findings.Finding("NCCL", "by USBYTE_NCCL_LIB", f"2.27.3, {library}")

    monkeypatch.setenv("USBYTE_NCCL_LIB", str(tmp_path / "none.so"))
    status, report = examine()
    assert status == 1
    assert "none.so cannot be opened" in report["by USBYTE_NCCL_LIB"]["value"]


@pytest.mark.skipif(not Path("/sys/class/net").exists(), reason="needs Linux")
def test_loopback_is_listed():
    assert any("127.0.0.1" in finding.value for finding in machine.interfaces())


def test_a_failing_look_is_reported():
    def look():
        yield findings.Finding("network", "lo", "up")
        raise OSError("gone")

    found = list(findings.guarded("network", look))
    assert [finding.status for finding in found] == ["ok", "warning"]
    assert "OSError: gone" in found[1].value


def test_table_on_a_terminal():
    pty = pytest.importorskip("pty")
    code = "from usbyte.cli.doctor.findings import Finding, show; "
    code += "show([Finding('job', 'place', 'value [1]', 'broken', 'do it')], False)"
    parent, child = pty.openpty()
    subprocess.run([sys.executable, "-c", code], stdout=child, check=True, timeout=60)
    os.close(child)
    text = os.read(parent, 65536).decode()
    os.close(parent)
    assert "│" in text
    assert "value [1]" in text
    assert "broken: job: place" in text

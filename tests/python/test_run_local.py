# SPDX-License-Identifier: Apache-2.0
"""usbyterun on this host, as a process with real ranks."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from run_support import Running, Starter, starter

PYTHON = [sys.executable, "-S", "-c"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    with starter(tmp_path) as start:
        yield start


def printed(running: Running) -> dict[int, Any]:
    """What each rank printed as one line of JSON."""
    lines = (line.split("] ", 1) for line in running.out.splitlines())
    return {int(mark[1:]): json.loads(text) for mark, text in lines}


def test_ranks_get_their_place_and_environment(start: Starter) -> None:
    # Nothing in the user's directory may hide a module from the agent.
    (start.cwd / "torch.py").write_text("raise SystemExit('not this one')")
    code = """
import json, os, sys
print(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "stdin": sys.stdin.read()}))
"""
    running = start(
        *["-np", "3", "--timeline", "t.json", "--env", "A=b=c d", "--env", "E="],
        *[*PYTHON, code],
        USBYTE_LEVEL="3",
        RANK="99",
        WORLD_SIZE="100",
        TORCH_ELASTIC_WORKER_IDENTICAL="1",
    )
    assert running.finish() == 0, running.err
    ranks = printed(running)
    assert sorted(ranks) == [0, 1, 2]
    expected = {
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "USBYTE_TIMELINE": "t.json",
        "USBYTE_LEVEL": "3",
        "A": "b=c d",
        "E": "",
    }
    for rank, answer in ranks.items():
        env = answer["env"]
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank))
        assert {name: env.get(name) for name in expected} == expected
        assert 0 < int(env["MASTER_PORT"]) < 65536
        assert (answer["cwd"], answer["stdin"]) == (str(start.cwd), "")
    assert running.err == ""


def test_options_of_horovodrun(start: Starter) -> None:
    options = ["-np", "1", "--gloo", "--timeline-filename", "t.json", "--log-level", "INFO"]
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    running = start(*options, "--network-interfaces", "lo,lo", *PYTHON, code)
    assert running.finish() == 0, running.err
    env = printed(running)[0]
    expected = {
        "USBYTE_TIMELINE": "t.json",
        "USBYTE_LOG_LEVEL": "info",
        "GLOO_SOCKET_IFNAME": "lo,lo",
        "NCCL_SOCKET_IFNAME": "lo,lo",
    }
    assert {name: env.get(name) for name in expected} == expected


def test_python_is_the_one_of_the_launcher(start: Starter) -> None:
    own = Path(sys.executable)
    (start.cwd / own.name).write_text("#!/bin/sh\necho another\n")
    (start.cwd / own.name).chmod(0o755)
    path = f"{start.cwd}{os.pathsep}{os.environ['PATH']}"
    code = "import sys; print(sys.executable)"
    running = start("-np", "2", own.name, "-S", "-c", code, PATH=path)
    assert running.finish() == 0, running.err
    assert sorted(running.out.splitlines()) == [f"[{rank}] {own}" for rank in range(2)]


def test_arguments_arrive_as_they_are(start: Starter) -> None:
    arguments = ["", "a b", "-np", "--", "'\"`", "two\nlines", "$HOME $$ ${local_rank} $(id)", "*"]
    arguments += ["\\n", "é", os.fsdecode(b"\xff")]
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    running = start("-np", "1", "--", *PYTHON, code, *arguments)
    assert running.finish() == 0, running.err
    assert printed(running)[0] == arguments


def test_output_comes_at_once_in_whole_lines_and_into_files(start: Starter) -> None:
    code = """
import os, sys, time
from pathlib import Path
sys.stderr.write("warning\\n")
sys.stdout.buffer.write(b"begun \\xff\\n")
while not Path("seen").exists():
    time.sleep(0.02)
for i in range(300):
    print(*["word"] * 200)
print("no end", end="")
"""
    running = start("-np", "3", "--output-filename", "logs", *PYTHON, code)
    running.expect("[0] begun", "[1] begun", "[2] begun", "[0] warning")
    (start.cwd / "seen").touch()
    assert running.finish() == 0, running.err
    long_line = " ".join(["word"] * 200)
    for rank in range(3):
        lines = [ln for ln in running.out.splitlines() if ln.startswith(f"[{rank}] ")]
        assert lines[0] == f"[{rank}] begun \udcff"
        assert lines[1:-1] == [f"[{rank}] {long_line}"] * 300
        assert lines[-1] == f"[{rank}] no end"
        files = start.cwd / "logs" / f"rank.{rank}"
        expected = b"begun \xff\n" + f"{long_line}\n".encode() * 300 + b"no end"
        assert (files / "stdout").read_bytes() == expected
        assert (files / "stderr").read_bytes() == b"warning\n"
    assert sorted(running.err.splitlines()) == [f"[{rank}] warning" for rank in range(3)]


def test_the_first_failure_ends_all_that_others_started(start: Starter) -> None:
    script = """
trap '' TERM
if [ $RANK = 1 ]; then
  while [ ! -e 0 ] || [ ! -e 2 ]; do sleep 0.05; done
  echo last words; exit 7
fi
(setsid sh -c 'trap "" TERM; sleep 600' &)
touch $RANK
while :; do sleep 600; done
"""
    running = start("-np", "3", "bash", "-c", script)
    assert running.finish() == 7
    assert running.out == "[1] last words\n"
    assert running.err.splitlines()[-1] == "usbyterun: rank 1 on host localhost exited with code 7"


def test_a_rank_that_fails_because_another_did_is_not_blamed(start: Starter) -> None:
    code = """
import os, sys, time
from pathlib import Path
pid = Path("pid")
if os.environ["RANK"] == "1":
    pid.with_suffix(".new").write_text(str(os.getpid()))
    pid.with_suffix(".new").rename(pid)
    time.sleep(0.3)
    os.abort()
while not pid.exists():
    time.sleep(0.01)
stat = Path("/proc", pid.read_text(), "stat")
while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
    pass
sys.exit(3)
"""
    running = start("-np", "2", *PYTHON, code)
    assert running.finish() == 128 + signal.SIGABRT
    message = "usbyterun: rank 1 on host localhost was killed by signal 6 (SIGABRT)"
    assert running.err.splitlines()[-1] == message


def test_a_rank_that_is_done_does_not_end_the_others(start: Starter) -> None:
    script = "(setsid sleep 600 &); [ $RANK = 0 ] || { sleep 0.5; echo done; }"
    running = start("-np", "2", "sh", "-c", script)
    assert running.finish() == 0, running.err
    assert (running.out, running.err) == ("[1] done\n", "")


def test_a_command_that_does_not_exist(start: Starter) -> None:
    running = start("-np", "1", "no-such-command")
    assert running.finish() == 127
    assert "cannot run 'no-such-command': No such file or directory" in running.err


WAITING = "(setsid sleep 600 &); echo up; while :; do sleep 600; done"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_job(start: Starter, number: signal.Signals, code: int) -> None:
    running = start("-np", "2", "bash", "-c", WAITING)
    running.expect("[0] up", "[1] up")
    running.process.send_signal(number)
    assert running.finish() == code
    assert running.err.splitlines()[-1] == f"usbyterun: ended by {number.name}"


def test_a_second_signal_cuts_the_grace_short(start: Starter) -> None:
    beats = "while :; do sleep 0.05; [ ! -e second ] || echo beat; done"
    script = f"trap 'echo told' TERM; echo up; {beats}"
    running = start("-np", "1", "bash", "-c", script)
    running.expect("[0] up")
    running.process.send_signal(signal.SIGINT)
    running.expect("told")
    (start.cwd / "second").touch()
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 130
    # The full grace of four seconds would be about 80 of them.
    assert running.out.count("beat") < 60


def test_a_signal_before_anything_runs(start: Starter) -> None:
    running = start("-np", "1", "--verbose", "sleep", "600")
    running.expect("usbyte.launch.agent")
    running.process.send_signal(signal.SIGTERM)
    assert running.finish() == 143


def test_a_signal_while_the_hosts_are_read(start: Starter) -> None:
    os.mkfifo(start.cwd / "hosts")
    running = start("--hostfile", "hosts", "sleep", "600")
    # Opens once the launcher reads, which then waits for what is never written.
    with (start.cwd / "hosts").open("w"):
        running.process.send_signal(signal.SIGINT)
        assert running.finish() == -signal.SIGINT
    assert running.err == ""


def test_nothing_outlives_a_launcher_that_is_killed(start: Starter) -> None:
    running = start("-np", "2", "bash", "-c", f"trap '' TERM HUP; {WAITING}")
    running.expect("[0] up", "[1] up")
    running.process.kill()
    assert running.finish() == -signal.SIGKILL


def test_nothing_outlives_an_agent_that_is_killed(start: Starter) -> None:
    running = start("-np", "2", "bash", "-c", f"trap '' TERM HUP; {WAITING}")
    running.expect("[0] up", "[1] up")
    (agent,) = running.children()
    os.kill(agent, signal.SIGKILL)
    assert running.finish() == 1
    assert "lost host localhost" in running.err


def test_an_agent_that_is_told_to_end_says_so(start: Starter) -> None:
    running = start("-np", "1", "bash", "-c", WAITING)
    running.expect("[0] up")
    (agent,) = running.children()
    os.kill(agent, signal.SIGTERM)
    assert running.finish() == 1
    assert "host localhost: the agent was sent SIGTERM" in running.err


def test_a_reader_that_stops_reading_ends_the_job(start: Starter) -> None:
    running = start("-np", "1", "sh", "-c", "while :; do echo line; done")
    running.expect("[0] line")
    running.hang_up()
    assert running.finish() == 128 + signal.SIGPIPE


def test_a_reader_that_pauses_does_not_keep_the_job_from_ending(start: Starter) -> None:
    running = start("-np", "1", "sh", "-c", "while :; do echo line; done")
    running.expect("[0] line")
    time.sleep(1)  # now every pipe on the way is full
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(60) == 130
    running.finish()
    assert running.err.splitlines() == [LOST, "usbyterun: ended by SIGINT"]


LOST = "usbyterun: some of the ranks' last output is lost, as nobody read it"
# What a rank leaves behind prints on once it has ended, more than the reader's pipe takes.
LATE = "while kill -0 $$; do sleep 0.05; done 2>/dev/null; seq 10000 30000"


def late_output(start: Starter, code: int) -> Running:
    running = start("-np", "1", "bash", "-c", f"trap '' TERM; ({LATE}) & exit {code}")
    fcntl.fcntl(running.process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    running.expect("[0] 10000\n")
    return running


def test_a_job_that_succeeds_waits_for_its_reader(start: Starter) -> None:
    running = late_output(start, 0)
    time.sleep(16)  # longer than agents are waited for
    assert running.finish() == 0, running.err
    assert running.out.splitlines() == [f"[0] {n}" for n in range(10000, 30001)]
    assert running.err == ""


def test_a_signal_ends_the_wait_for_a_reader(start: Starter) -> None:
    running = late_output(start, 0)
    time.sleep(3)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 143
    running.finish()
    assert running.err.splitlines() == [LOST, "usbyterun: ended by SIGTERM"]


def test_a_job_that_fails_does_not_wait_for_its_reader_and_says_so(start: Starter) -> None:
    running = late_output(start, 3)
    assert running.process.wait(60) == 3
    running.finish()
    failed = "usbyterun: rank 0 on host localhost exited with code 3"
    assert running.err.splitlines() == [LOST, failed]


def test_an_interface_that_does_not_exist(start: Starter) -> None:
    running = start("-np", "1", "--network-interface", "nosuch0", "true")
    assert running.finish() == 1
    assert "host localhost: no network interface 'nosuch0'; this host has lo" in running.err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_descriptors_are_those_of_nothing_else(tmp_path: Path, closed: str) -> None:
    speaks = "echo out; echo err >&2; sleep 0.2; echo done >ran"
    run = f"exec {sys.executable} -m usbyte.launch -np 1 bash -c '{speaks}' {closed}"
    assert subprocess.run(["bash", "-c", run], cwd=tmp_path, timeout=60).returncode == 0
    assert (tmp_path / "ran").read_text() == "done\n"


# The second ends before anybody sees that its output is lost.
@pytest.mark.parametrize("command", ["while :; do echo line; done", "echo line"])
def test_output_that_cannot_be_written_ends_the_job(command: str) -> None:
    run = [sys.executable, "-m", "usbyte.launch", "-np", "1", "sh", "-c", command]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            run, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr == ("usbyterun: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--start-timeout", "nan", "true"], "not above 0"),
        (["--start-timeout", "inf", "true"], "not above 0"),
        (["--start-timeout", "0", "true"], "not above 0"),
        ([""], "COMMAND is empty"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], complaint: str) -> None:
    run = [sys.executable, "-m", "usbyte.launch", "-np", "1", *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert complaint in done.stderr

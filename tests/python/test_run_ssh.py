# SPDX-License-Identifier: Apache-2.0
"""usbyterun over ssh: a real sshd on the loopback addresses 127.0.0.2, 127.0.0.3 and ::1."""

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from run_support import PATIENCE_SECONDS, Running, Starter, has_ipv6, parents, starter

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
pytestmark = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="needs OpenSSH's sshd and ssh"
)
PYTHON = [sys.executable, "-S", "-c"]

_SSHD_CONFIG = """
Port {port}
ListenAddress 127.0.0.2
ListenAddress 127.0.0.3
{ipv6}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
PasswordAuthentication no
StrictModes no
UsePAM no
# A login that prints something where the agent's greeting is expected.
Match LocalAddress 127.0.0.3
    ForceCommand echo Welcome; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"
"""
_SSH_CONFIG = """
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile none
IdentitiesOnly yes
Host only-ssh-knows-me
    HostName 127.0.0.3
"""


@dataclass(frozen=True)
class Server:
    """A running sshd and what the launcher needs to reach it."""

    process: subprocess.Popen[bytes]
    port: int
    options: list[str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    port = free_port()
    ipv6 = "ListenAddress ::1" if has_ipv6() else ""
    (folder / "sshd_config").write_text(_SSHD_CONFIG.format(port=port, folder=folder, ipv6=ipv6))
    (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists, as root
    log = (folder / "log").open("wb")
    process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
    try:
        wait_until_it_listens(port, process, folder / "log")
        options = ["-p", str(port), "-i", str(folder / "user_key")]
        options += ["--ssh-options", f"-F {folder}/ssh_config"]
        yield Server(process, port, options)
    finally:
        process.terminate()
        process.wait()
        log.close()


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Iterator[Starter]:
    with starter(tmp_path) as start:
        yield start


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        return int(probe.getsockname()[1])


def wait_until_it_listens(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.2", port), timeout=1).close()
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        else:
            return


def printed(running: Running) -> dict[int, Any]:
    """What each rank printed as one line of JSON."""
    lines = (line.split("] ", 1) for line in running.out.splitlines())
    return {int(mark[1:]): json.loads(text) for mark, text in lines}


def ssh_to(running: Running, host: str) -> int:
    """Process id of the launcher's connection to a host."""
    (found,) = [
        pid
        for pid in running.children()
        if host.encode() in Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
    ]
    return found


def test_ranks_of_two_hosts_reduce(start: Starter, server: Server) -> None:
    (start.cwd / "train.py").write_text("""
import json, os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(total)
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
print(json.dumps({"sum": total.unique().tolist(), "env": [os.environ.get(n) for n in names]}))
dist.destroy_process_group()
""")
    (start.cwd / "hosts").write_text("127.0.0.1 slots=1  # here\n127.0.0.2 slots=2\n")
    running = start(
        *[*server.options, "-np", "3", "--hostfile", "hosts", "--verbose", "--start-timeout", "60"],
        *[sys.executable, "train.py"],
    )
    assert running.finish() == 0, running.err
    ranks = printed(running)
    assert [ranks[rank]["sum"] for rank in range(3)] == [[6.0]] * 3
    assert [ranks[rank]["env"] for rank in range(3)] == [
        ["0", "3", "0", "1", "127.0.0.1", None],
        ["1", "3", "0", "2", "127.0.0.1", "1"],
        ["2", "3", "1", "2", "127.0.0.1", "1"],
    ]
    assert "127.0.0.1 (this host): rank 0" in running.err
    assert "127.0.0.2 (ssh): ranks 1-2" in running.err
    assert f"-p {server.port}" in running.err


def test_arguments_environment_and_directory_arrive(start: Starter, server: Server) -> None:
    arguments = ["", "a b", "'\"`", "two\nlines", "$HOME $$ ${local_rank} $(id)", "*", "\\n", "é"]
    arguments += ["~", "--np", "#", ";&|<>", os.fsdecode(b"\xff")]
    start.cwd = start.cwd / "it's a $dir"
    start.cwd.mkdir()
    code = """
import json, os, shutil, sys
found = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}
print(json.dumps({**found, "python": shutil.which("python"), "stdin": sys.stdin.read()}))
"""
    path = os.pathsep.join(["relative dir", *filter(None, [os.environ.get("PYTHONPATH")])])
    running = start(
        *[*server.options, "-H", "127.0.0.2:1", "--env", "A=two\nlines 'x' $y"],
        *[*PYTHON, code, *arguments],
        USBYTE_X="1 'x",
        NCCL_X="2",
        GLOO_X="3",
        OMP_NUM_THREADS="5",
        OTHER="no",
        PYTHONPATH=path,
    )
    assert running.finish() == 0, running.err
    answer = printed(running)[0]
    assert answer["argv"] == arguments
    assert (answer["cwd"], answer["stdin"]) == (str(start.cwd), "")
    bin_folder = Path(sys.executable).parent
    if (bin_folder / "python").exists():
        assert answer["python"] == str(bin_folder / "python")
    expected = {
        "USBYTE_X": "1 'x",
        "NCCL_X": "2",
        "GLOO_X": "3",
        "OMP_NUM_THREADS": "5",
        "OTHER": None,
        "PYTHONPATH": path,
        "A": "two\nlines 'x' $y",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert {name: answer["env"].get(name) for name in expected} == expected


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on the loopback interface")
@pytest.mark.parametrize("hosts", ["localhost:1,[::1]:1", "[::1]:1,localhost:1"])
def test_hosts_that_ssh_reaches_over_ipv6(start: Starter, server: Server, hosts: str) -> None:
    (start.cwd / "train.py").write_text("""
import os, torch, usbyte.torch as ub
ub.init()
print(os.environ["MASTER_ADDR"], ub.allreduce(torch.ones(1), op=ub.Sum).item())
""")
    running = start(*server.options, "-H", hosts, sys.executable, "train.py")
    assert running.finish() == 0, running.err
    assert sorted(running.out.splitlines()) == ["[0] ::1 2.0", "[1] ::1 2.0"]


WAITING = "(setsid sleep 600 &); touch $RANK; echo up; while :; do sleep 600; done"


def test_a_failure_on_another_host_ends_all(start: Starter, server: Server) -> None:
    script = f"""
if [ $RANK = 1 ]; then
  while [ ! -e 0 ] || [ ! -e 2 ]; do sleep 0.05; done
  kill -SEGV $$
fi
trap '' TERM HUP
{WAITING}
"""
    hosts = "localhost:1,127.0.0.2:2"
    running = start(*server.options, "-H", hosts, "bash", "-c", script)
    assert running.finish() == 128 + signal.SIGSEGV
    message = "usbyterun: rank 1 on host 127.0.0.2 was killed by signal 11 (SIGSEGV)"
    assert running.err.splitlines()[-1] == message


def test_two_remote_hosts_and_a_signal(start: Starter, server: Server) -> None:
    script = "echo at $MASTER_ADDR $GROUP_RANK $LOCAL_RANK; (setsid sleep 600 &); sleep 600"
    hosts = f"only-ssh-knows-me:1,{getpass.getuser()}@127.0.0.2:1"
    running = start(*server.options, "-H", hosts, "bash", "-c", script)
    running.expect("[0] at 127.0.0.3 0 0\n", "[1] at 127.0.0.3 1 0\n")
    running.process.send_signal(signal.SIGTERM)
    assert running.finish() == 143
    assert "Welcome" not in running.out


def test_nothing_outlives_a_launcher_that_is_killed(start: Starter, server: Server) -> None:
    hosts = "localhost:1,127.0.0.2:1"
    running = start(*server.options, "-H", hosts, "bash", "-c", WAITING)
    running.expect("[0] up", "[1] up")
    running.process.kill()
    assert running.finish() == -signal.SIGKILL


def test_nothing_outlives_a_connection_that_is_killed(start: Starter, server: Server) -> None:
    hosts = "127.0.0.2:1,127.0.0.3:1"
    running = start(*server.options, "-H", hosts, "bash", "-c", WAITING)
    running.expect("[0] up", "[1] up")
    os.kill(ssh_to(running, "127.0.0.3"), signal.SIGKILL)
    assert running.finish() == 1
    assert "usbyterun: lost host 127.0.0.3" in running.err


def test_nothing_outlives_a_remote_agent_that_is_killed(start: Starter, server: Server) -> None:
    script = f"echo parent $PPID; {WAITING}"
    running = start(*server.options, "-H", "127.0.0.2:1", "bash", "-c", script)
    running.expect("[0] up")
    os.kill(int(running.out.split()[2]), signal.SIGKILL)
    assert running.finish() == 1
    assert "usbyterun: lost host 127.0.0.2" in running.err


def test_nothing_outlives_a_remote_agent_that_is_killed_amid_signals(
    start: Starter, server: Server
) -> None:
    script = f"echo parent $PPID; {WAITING}"
    running = start(*server.options, "-H", "127.0.0.2:1", "bash", "-c", script)
    running.expect("[0] up")
    agent = int(running.out.split()[2])
    guardian = parents()[agent]
    os.kill(agent, signal.SIGKILL)
    with suppress(ProcessLookupError):
        while True:
            os.kill(guardian, signal.SIGHUP)
    assert running.finish() == 1
    assert running.err == "usbyterun: lost host 127.0.0.2; see docs/errors.md#launcher\n"


def test_a_host_that_refuses(start: Starter, server: Server) -> None:
    options = [*server.options, "-p", str(free_port())]
    running = start(*options, "-H", "localhost:1,127.0.0.2:1", "sleep", "600")
    assert running.finish() == 1
    assert "cannot reach host 127.0.0.2 (ssh failed)" in running.err
    assert "Connection refused" in running.err


def test_a_host_that_never_answers(start: Starter, server: Server) -> None:
    with socket.create_server(("127.0.0.2", 0)) as silent:
        patient = server.options[-1] + " -o ConnectTimeout=600"  # more than usbyterun is
        options = [*server.options[:-1], patient, "-p", str(silent.getsockname()[1])]
        where = ["--start-timeout", "3", "-H", "localhost:1,127.0.0.2:1"]
        running = start(*options, *where, "sleep", "600")
        assert running.finish() == 1
    last = running.err.splitlines()[-1]
    told = "usbyterun: host 127.0.0.2 did not answer within 3 s; check that ssh gets there without"
    assert last.startswith(told)
    assert last.endswith("; see docs/errors.md#launcher")


def test_a_python_without_usbyte(start: Starter, server: Server) -> None:
    (start.cwd / "python").write_text("#!/bin/sh\necho No module named usbyte >&2; exit 1\n")
    (start.cwd / "python").chmod(0o755)
    options = [*server.options, "--remote-python", str(start.cwd / "python")]
    running = start(*options, "-H", "127.0.0.2:1", "true")
    assert running.finish() == 1
    assert "cannot start the agent on host 127.0.0.2 (exit code 1)" in running.err
    assert "No module named usbyte; is usbyte installed there" in running.err


COUNTED = "echo rank $RANK of $WORLD_SIZE in $GROUP_RANK, start $TORCHELASTIC_RESTART_COUNT; "


def test_a_host_that_is_lost_is_left_out_of_the_next_start(start: Starter, server: Server) -> None:
    hosts = "127.0.0.2:1,127.0.0.3:2"
    options = [*server.options, "-H", hosts, "--nnodes", "1:2", "--max-restarts", "2"]
    script = f"{COUNTED} until [ -e fail ]; do sleep 0.1; done; rm fail; exit 3"
    running = start(*options, "--output-filename", "out", "bash", "-c", script)
    running.expect(*(f"[{n}] rank {n} of 3 in {n // 2 + n % 2}, start 0\n" for n in range(3)))
    os.kill(ssh_to(running, "127.0.0.2"), signal.SIGKILL)
    running.expect("[0] rank 0 of 2 in 0, start 1\n", "[1] rank 1 of 2 in 0, start 1\n")
    assert "lost host 127.0.0.2; restart 1 of 2\n" in running.err
    (start.cwd / "fail").touch()
    running.expect(*(f"[{n}] rank {n} of 3 in {n // 2 + n % 2}, start 2\n" for n in range(3)))
    running.process.send_signal(signal.SIGTERM)
    assert running.finish() == 143
    files = [start.cwd / "out" / f"rank.{n}" / "stdout" for n in range(3)]
    starts = [[line[-1] for line in file.read_text().splitlines()] for file in files]
    assert starts == [["0", "1", "2"], ["0", "1", "2"], ["0", "2"]]


def test_a_host_without_which_there_is_no_job_is_tried_again(
    start: Starter, server: Server
) -> None:
    options = [*server.options, "-H", "127.0.0.2:1,127.0.0.3:1", "--max-restarts", "1"]
    script = f"{COUNTED} [ $TORCHELASTIC_RESTART_COUNT = 1 ] || sleep 600"
    running = start(*options, "bash", "-c", script)
    running.expect("[0] rank 0 of 2 in 0, start 0\n", "[1] rank 1 of 2 in 1, start 0\n")
    os.kill(ssh_to(running, "127.0.0.3"), signal.SIGKILL)
    assert running.finish() == 0, running.err
    assert "[1] rank 1 of 2 in 1, start 1\n" in running.out


def test_a_spare_host_takes_the_place_of_one_that_is_lost(start: Starter, server: Server) -> None:
    options = [*server.options, "-H", "127.0.0.2:1,127.0.0.3:1", "--nnodes", "1"]
    script = f"{COUNTED} [ $TORCHELASTIC_RESTART_COUNT = 1 ] || sleep 600"
    running = start(*options, "--max-restarts", "1", "--verbose", "bash", "-c", script)
    running.expect("[0] rank 0 of 1 in 0, start 0\n")
    os.kill(ssh_to(running, "127.0.0.2"), signal.SIGKILL)
    assert running.finish() == 0, running.err
    assert "[0] rank 0 of 1 in 0, start 1\n" in running.out
    assert "usbyterun: 127.0.0.3 (ssh): rank 0\n" in running.err


def test_hosts_that_cannot_be_reached_are_left_out(start: Starter, server: Server) -> None:
    # Nothing listens at .4 and .5.
    options = [*server.options, "-H", "127.0.0.4:1,127.0.0.2:1,127.0.0.5:1,127.0.0.3:1"]
    running = start(*options, "--nnodes", "2:4", "bash", "-c", COUNTED)
    assert running.finish() == 0, running.err
    assert sorted(running.out.splitlines()) == [
        f"[{n}] rank {n} of 2 in {n}, start 0" for n in range(2)
    ]
    assert running.err.count("; going on without\n") == 2
    running = start(*options, "--nnodes", "3:4", "bash", "-c", COUNTED)
    assert running.finish() == 1
    assert "cannot reach host 127.0.0." in running.err.splitlines()[-1]
    assert running.out == ""

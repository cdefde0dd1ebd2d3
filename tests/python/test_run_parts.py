# SPDX-License-Identifier: Apache-2.0
"""The launcher's parts that need no running job: hosts, lines, frames, the command line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from run_support import PATIENCE_SECONDS
from usbyte._util import files
from usbyte.launch import hosts, protocol
from usbyte.launch.agent_channel import Channel
from usbyte.launch.cli import main
from usbyte.launch.job import Job
from usbyte.launch.launcher import Launcher
from usbyte.launch.output import Output
from usbyte.launch.process_tree import ExitOrder, SignalWake


def listed(parsed: list[hosts.Host]) -> list[tuple[str, int, bool]]:
    return [(host.name, host.slots, host.local) for host in parsed]


def test_processes_are_told_in_the_order_of_their_ends() -> None:
    children = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(3)]
    pids = [child.pid for child in children]
    order = ExitOrder(pids)
    assert order.take() == []
    for i in (2, 0, 1):
        stdin = children[i].stdin
        assert stdin is not None
        stdin.close()
        os.waitid(os.P_PID, pids[i], os.WEXITED | os.WNOWAIT)
    assert order.take() == [pids[2], pids[0], pids[1]]
    assert order.take() == []
    assert [child.wait() for child in children] == [0, 0, 0]


def test_hosts_are_parsed_in_order() -> None:
    parsed = hosts.parse_hosts("a:2, user@b.example:3,[fe80::1]:1,c")
    assert listed(parsed) == [
        ("a", 2, False),
        ("user@b.example", 3, False),
        ("fe80::1", 1, False),
        ("c", 1, False),
    ]


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", os.uname().nodename])
def test_own_names_are_local(name: str) -> None:
    assert listed(hosts.parse_hosts(f"{name}:2,127.0.0.2:1")) == [
        (name, 2, True),
        ("127.0.0.2", 1, False),
    ]


def test_a_host_that_is_listed_twice_is_one_host() -> None:
    assert listed(hosts.parse_hosts("a:1,localhost:1,a:2,127.0.0.1:3")) == [
        ("a", 3, False),
        ("localhost", 4, True),
    ]


@pytest.mark.parametrize(
    "text", ["", "a:", "a:b", "a:0", "a,,b", "-oProxyCommand=x", "a b:1", "a;b"]
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="-H"):
        hosts.parse_hosts(text)


def test_hostfile_formats(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "\ufeffa slots=1\n# cluster\n\na slots=1\n"
        "b:3 # rack 2\nc\nd max-slots=8 slots=4\na slots=1\n"
    )
    parsed = hosts.parse_hostfile(file)
    assert [(host.name, host.slots) for host in parsed] == [("a", 3), ("b", 3), ("c", 1), ("d", 4)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a slots=2\nb cpus=3\n", r"hosts, line 2: 'cpus=3'"),
        ("a slots=x\n", r"line 1: 'slots=x'"),
        ("a slots=0\n", r"line 1: .* at least one slot"),
        ("a slots=65537\n", r"line 1: .* 65536 slots at most, not 65537"),
        ("a:99999999999999999999\n", r"65536 slots at most"),
        ("a:" + "9" * 5000, r"line 1: .* 65536 slots at most, not a number of 5000 digits"),
        ("a slots=" + "9" * 5000, r"line 1: .* 65536 slots at most, not a number of 5000 digits"),
        ("a slots=\u0663\n", r"line 1: 'slots=\u0663' is not understood; write 'host slots=N'"),
        ("a slots=1 max-slots=\u0663\n", r"line 1: 'max-slots=\u0663' is not understood"),
        ("a:\u0663\n", r"line 1: 'a:\u0663' is no host"),
        ("a cpus=" + "x" * 5000, r"line 1: 'a?.{0,3}cpus=x+\.\.\.' is not understood"),
        ("a:65536\nb:1\na:1\n", r"hosts: host a is listed .* more than 65536 slots together"),
        ("# nobody\n", r"names no host"),
    ],
)
def test_bad_hostfiles_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        hosts.parse_hostfile(tmp_path / "hosts")


def test_a_file_that_is_no_hostfile_does_not_fill_memory(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    with file.open("wb") as large:
        large.truncate(files.MOST_BYTES + 1)
    with pytest.raises(ValueError, match=r"host file .*checkpoint.pt: .*File too large"):
        hosts.parse_hostfile(file)


def test_slots_are_filled_in_order() -> None:
    placed = hosts.place(hosts.parse_hosts("a:2,b:4,c:1"), 3)
    assert [(p.host.name, p.first_rank, p.count) for p in placed] == [("a", 0, 2), ("b", 2, 1)]
    with pytest.raises(ValueError, match=r"-np 8 asks for more ranks than the 7 slots of a:2,b:4"):
        hosts.place(hosts.parse_hosts("a:2,b:4,c:1"), 8)


def test_frames_survive_being_cut_and_noise_before_them() -> None:
    frames = [
        protocol.Frame(protocol.STDOUT, 70000, b"\x00\n\xff"),
        protocol.Frame(protocol.EVENT, 0, b"{}"),
    ]
    stream = b"Welcome!" + protocol.GREETING + b"".join(frame.encode() for frame in frames)
    for size in range(1, len(stream)):
        reader = protocol.FrameReader()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [frame for piece in pieces for frame in reader.feed(piece)] == frames
    reader = protocol.FrameReader()
    assert not list(reader.feed(b"This account is not available.\n"))
    assert (reader.greeted, reader.noise) == (False, b"This account is not available.\n")
    with pytest.raises(ValueError, match="another version"):
        list(protocol.FrameReader().feed(b"usbyte-agent 999\n"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["true"], "-np"),
        (["-np", "0", "true"], "-np"),
        (["-np", "2"], "COMMAND"),
        (["-np", "3", "-H", "a:1,b:1", "true"], "lower -np or give the hosts more slots"),
        (["-np", "2", "-H", "", "true"], "-H: '' is no host"),
        (["-np", "2", "-H", "::1:2", "true"], "write '[address]:slots'"),
        (["-H", "a:1", "--hostfile", "f", "true"], "exclude each other"),
        (["-H", "", "--hostfile", "f", "true"], "exclude each other"),
        (["--hostfile", "no-such-file", "true"], "no-such-file"),
        (["-np", "1", "--env", "NAME", "true"], "'NAME' is not of the form NAME=VALUE"),
        (["-np", "1", "--env", "RANK=7", "true"], "RANK is set by usbyterun for each rank"),
        (["-np", "1", "--env", "MASTER_PORT=1", "true"], "MASTER_PORT is set by usbyterun"),
        (["-np", "1", "--ssh-options", "'", "true"], "--ssh-options"),
        (["-np", "1", "-p", "0", "true"], "-p"),
        (["-H", "a:1,b:1", "--nnodes", "3:4", "true"], "--nnodes needs 3 hosts or more, and 2 are"),
        (["-H", "a:1,b:1", "--nnodes", "2:1", "true"], "1 <= MIN <= MAX"),
        (["-H", "a:1,b:1", "--nnodes", "0:1", "true"], "1 <= MIN <= MAX"),
        (["-H", "a:1,b:1", "--nnodes", "few", "true"], "'few' is not MIN:MAX"),
        (["-H", "a:1,b:1", "-np", "2", "--nnodes", "1:2", "true"], "leave out -np"),
        (["-np", "1", "--max-restarts", "-1", "true"], "--max-restarts"),
        (["-np", "1", "--max-restarts", "9" * 30, "true"], "--max-restarts"),
        (["-np", "9" * 5000, "true"], "-np"),
        (["-np", "1", "-p", "9" * 5000, "true"], "-p"),
        (["-np", "1", "--start-timeout", "1e18", "true"], "up to 604800 seconds"),
        (["-H", "a:1", "--nnodes", "9" * 5000, "true"], "1 <= MIN <= MAX"),
        (["-H", "a:1", "--nnodes", "1:" + "9" * 30, "true"], "1 <= MIN <= MAX"),
        (["-H", "a:65536,a:1", "true"], "-H: host a is listed several times"),
        (["-H", "a:65536,b:1", "true"], "65537 slots, and a job may have 65536 ranks at most"),
        (["-H", "a:" + "9" * 5000, "true"], "not a number of 5000 digits"),
        (["-np", "1", "--log-level", "TRACE", "true"], "'debug', 'info', 'warning', 'error'"),
        (["-np", "1", "--no-such-option", "true"], "--no-such-option"),
    ],
)
def test_wrong_options_are_explained(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert complaint in result.output


def test_help_and_version() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    for option in main.params[:-1]:
        assert option.hidden or option.opts[0] in text
    assert "[default: 30.0" in text
    assert "usbyterun -np 4 python train.py" in text
    for option in ("-v", "--version"):
        assert CliRunner().invoke(main, [option]).output.startswith("usbyterun ")


def test_the_options_of_horovodrun_that_are_documented_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    known = {name for option in main.params for name in option.opts}
    ((options, usbyterun),) = re.findall(r"^\| (`-np.*`) \| (the same.*) \|$", page, re.MULTILINE)
    assert {name for name in re.findall(r"--?[a-z][a-z-]*|-H", options)} <= known
    others = page.partition(usbyterun)[2].partition("\n\n")[0]
    for left, right in re.findall(r"^\| (.*) \| (.*) \|$", others, re.MULTILINE):
        assert not known & set(re.findall(r"--[a-z-]+", left))
        assert set(re.findall(r"--[a-z-]+", right)) <= known


def plant_link(folder: Path, victim: Path) -> None:
    folder.mkdir()
    (folder / "stdout").symlink_to(victim)


def plant_dangling_link(folder: Path, victim: Path) -> None:
    folder.mkdir()
    (folder / "stderr").symlink_to(victim.with_name("new"))


def plant_hard_link(folder: Path, victim: Path) -> None:
    folder.mkdir()
    (folder / "stdout").hardlink_to(victim)


def plant_directory_link(folder: Path, victim: Path) -> None:
    folder.symlink_to(victim.parent)


def plant_pipe(folder: Path, victim: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "stderr")


@pytest.mark.parametrize(
    "plant",
    [plant_link, plant_dangling_link, plant_hard_link, plant_directory_link, plant_pipe],
)
def test_links_are_not_followed_by_output_files(
    tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "logs").mkdir()
    victim = tmp_path / "home" / "stdout"
    victim.write_text("precious")
    plant(tmp_path / "logs" / "rank.0", victim)
    with pytest.raises(OSError, match=r"link or no plain file: remove it, .*rank\.0"):
        Output(1, 0, tmp_path / "logs")
    assert victim.read_text() == "precious"
    assert os.listdir(tmp_path / "home") == ["stdout"]


def test_output_files_may_be_there_and_their_directory_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "scratch")
    for text in (b"a long line\n", b"short\n"):
        output = Output(1, 0, tmp_path / "logs")
        output._files[protocol.STDOUT, 0].write(text)
        output.close()
    assert (tmp_path / "scratch" / "rank.0" / "stdout").read_bytes() == b"short\n"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"event": 1}',
        b'{"event": "boom"}',
        b'{"event": "exit", "rank": 0}',
        b'{"event": "exit", "rank": "0", "code": 1}',
        b'{"event": "exit", "rank": 0, "code": ' + b"9" * 5000 + b"}",
        b'{"event": "exit", "rank": 0, "code": 99999999999999999999}',
        b'{"event": "end", "left": [null]}',
        b'{"event": "started", "more": 1}',
        b'{"event": "ready", "address": null, "ssh": null}',
    ],
)
def test_what_is_no_event_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"is no|knows no event|other fields"):
        protocol.decode_event(payload)


def test_events_commands_and_specs_are_read_as_they_were_written() -> None:
    event = {"event": "ready", "port": 1, "address": None, "ssh": "a b c d"}
    assert protocol.decode_event(json.dumps(event).encode()) == event
    command = {"command": "go", "address": "::1", "port": 2}
    assert protocol.decode_command(protocol.encode_message(command)) == command
    env = {"A": os.fsdecode(b"\xff")}
    spec = protocol.AgentSpec("node7", False, 1, 2, 1, 3, ["true"], env, "/", None, "run", 30)
    assert protocol.AgentSpec.decode(spec.encode()) == spec
    for line in (b"{}", spec.encode().replace(b"true", b"\\u0000").replace(b"[", b"[1,")):
        with pytest.raises(ValueError, match="same version on all hosts"):
            protocol.AgentSpec.decode(line)


@pytest.mark.parametrize("line", [b"{\n", b"[]\n", b'{"command": "go"}\n', b"\xff\n"])
def test_an_agent_that_is_sent_no_command_says_so_and_ends(line: bytes) -> None:
    commands, frames = os.pipe(), os.pipe()
    os.write(commands[1], line)
    assert Channel(commands[0], frames[1]).next_command() == {}
    (frame,) = greeted().feed(os.read(frames[0], 4096))
    assert protocol.decode_event(frame.payload)["event"] == "error"
    for fd in (*commands, *frames):
        os.close(fd)


def greeted() -> protocol.FrameReader:
    reader = protocol.FrameReader()
    assert not list(reader.feed(protocol.GREETING))
    return reader


AGENT = """
import sys
from usbyte.launch import protocol
sys.stdin.buffer.readline()
sys.stdout.buffer.write(protocol.GREETING + FRAME)
sys.stdout.buffer.flush()
sys.stdin.buffer.read()
"""


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        ('protocol.Frame(protocol.EVENT, 0, b"{}").encode()', "knows no event such as b'{}'"),
        ('protocol.Frame(protocol.EVENT, 0, b"[" * 100_000).encode()', "is no JSON"),
        (
            'protocol.Frame(protocol.STDOUT, 7, b"x").encode()',
            "reported rank 7, which is not on that",
        ),
        ('b"\\xff" * 9', "no agent sends frames of kind 255"),
        (
            'protocol.Frame(protocol.EVENT, 0, b"'
            + r"{\"event\":\"exit\",\"rank\":9,\"code\":0}"
            + '").encode()',
            "reported rank 9",
        ),
        (
            'protocol.Frame(protocol.EVENT, 0, b"'
            + r"{\"event\":\"exit\",\"rank\":0,\"code\":256}"
            + '").encode()',
            "reported exit code 256",
        ),
    ],
)
def test_an_agent_that_sends_anything_else_loses_its_host(frame: str, complaint: str) -> None:
    placement = hosts.Placement(hosts.Host("node7", 1, local=True), 0, 1)
    job = Job(["true"], {}, "/", [placement])
    wake = SignalWake()
    try:
        with pytest.MonkeyPatch.context() as patch:
            code = AGENT.replace("FRAME", frame)
            patch.setattr(Job, "agent_command", lambda *_: [sys.executable, "-c", code])
            verdict = Launcher(job, Output(1, wake.fd), wake).run()
    finally:
        signal.set_wakeup_fd(-1)
    assert verdict.code == 1
    assert verdict.message is not None
    assert complaint in verdict.message
    assert "host node7" in verdict.message


def agent_events(cwd: str, *commands: dict[str, Any]) -> list[dict[str, Any]]:
    """What the second agent of a job says until something goes wrong."""
    spec = protocol.AgentSpec("node7", False, 1, 2, 1, 3, ["true"], {}, cwd, None, "run", 30.0)
    command = [sys.executable, "-m", "usbyte.launch.agent"]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    guard = threading.Timer(PATIENCE_SECONDS, agent.kill)
    guard.start()
    with agent, agent.stdin as stdin, agent.stdout as stdout:
        stdin.write(spec.encode() + b"".join(map(protocol.encode_message, commands)))
        stdin.flush()
        reader = protocol.FrameReader()
        events: list[dict[str, Any]] = []
        while not any(event["event"] == "error" for event in events):
            data = stdout.read1()
            assert data, "the agent has ended without an error"
            events += [json.loads(frame.payload) for frame in reader.feed(data)]
        stdin.close()
        events += [json.loads(frame.payload) for frame in reader.feed(stdout.read())]
    guard.cancel()
    assert agent.returncode == 0
    return events


def test_agent_without_its_directory_says_so() -> None:
    error, end = agent_events("/no/such/directory")
    assert "cannot enter the working directory /no/such/directory" in error["message"]
    assert "make it there" in error["message"]
    assert end == {"event": "end", "left": []}


def test_agent_that_cannot_reach_the_first_host_says_so() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # it does not listen
        port = nobody.getsockname()[1]
        events = agent_events("/", {"command": "go", "address": "127.0.0.1", "port": port})
    assert [event["event"] for event in events] == ["ready", "error", "end"]
    assert f"cannot reach the first host at 127.0.0.1, port {port}" in events[1]["message"]
    assert "--network-interface" in events[1]["message"]


def test_the_launcher_needs_neither_torch_nor_the_extension() -> None:
    code = "import sys, usbyte.launch.cli, usbyte.launch.agent; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"torch", "numpy", "usbyte._core", "usbyte.torch"} & set(loaded)

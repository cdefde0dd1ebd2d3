# SPDX-License-Identifier: Apache-2.0
"""What a process that is not part of a job, or somebody's text, can do to it."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import usbyte
import usbyte.torch as ub
from _ranks import run_ranks
from _template import start_template
from run_support import Running, Starter, starter
from usbyte._util import files
from usbyte.cluster_env import job_mark
from usbyte.errors import PlanError, UsageError
from usbyte.launch.hosts import parse_hosts
from usbyte.launch.protocol import GREETING, FrameReader
from usbyte.launch.torch_elastic import serve_store
from usbyte.planning import profiles

PACKAGE = Path(usbyte.__file__).parent


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    start_template()  # for intruders; what is started from here on must end with the test
    with starter(tmp_path) as start:
        yield start


# Two ranks that wait for a file between two sums, and print where they listen.
JOB = """
import os, sys, time
import psutil, torch
import usbyte.torch as ub
ub.init()
first = ub.allreduce(torch.ones(1), op=ub.Sum).item()
listens = {
    c.laddr.ip
    for p in psutil.Process(os.getppid()).children(recursive=True) + [psutil.Process(os.getppid())]
    for c in p.net_connections() if c.status == psutil.CONN_LISTEN
}
print("listens", sorted(listens), flush=True)
print("port", os.environ["MASTER_PORT"], flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
print("sums", first, ub.allreduce(torch.ones(1), op=ub.Sum).item(), flush=True)
"""


def running_job(start: Starter, *options: str) -> tuple[Running, str]:
    (start.cwd / "job.py").write_text(JOB)
    running = start("-np", "2", *options, sys.executable, "job.py")
    running.expect("[0] port ", "[1] port ")
    line = next(text for text in running.out.splitlines() if text.startswith("[0] port "))
    return running, line.split()[-1]


def joins(_rank: int, _size: int) -> str:
    try:
        ub.init()
    except UsageError as error:
        return str(error)
    return "joined"


def intrude(port: str, rank: int, token: str | None, **more: str) -> str:
    """Has another process join a job of two ranks as `rank`. Returns the error, or "joined"."""
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | more
    if token is not None:
        env["USBYTE_JOB_TOKEN"] = token
    assert "USBYTE_JOB_TOKEN" not in os.environ
    answer: str = run_ranks(1, joins, env=env)[0]
    return answer


def test_processes_without_the_jobs_token_are_refused_and_the_job_goes_on(start: Starter) -> None:
    running, port = running_job(start)
    for rank, token, problem in [
        (0, None, "this process has no USBYTE_JOB_TOKEN"),
        (1, None, "this process has no USBYTE_JOB_TOKEN"),
        (1, "0" * 32, "this process has the USBYTE_JOB_TOKEN of another job"),
        (0, "0" * 32, "this process has the USBYTE_JOB_TOKEN of another job"),
    ]:
        answer = intrude(port, rank, token)
        assert f"not part of the job at 127.0.0.1, port {port}: {problem}" in answer
    (start.cwd / "go").touch()
    assert running.finish() == 0, running.err
    assert running.out.count("sums 2.0 2.0") == 2
    assert "USBYTE_JOB_TOKEN" not in running.out + running.err


def meets(rank: int, size: int) -> float:
    ub.init()
    total: float = ub.allreduce(torch.ones(1), op=ub.Sum).item()
    ub.shutdown()
    return total


def test_a_process_without_the_jobs_token_that_comes_first_takes_no_rank() -> None:
    store = serve_store(60, "127.0.0.1", "ab" * 16)
    answer = intrude(str(store.port), 0, None, TORCHELASTIC_USE_AGENT_STORE="True")
    assert "not part of the job" in answer
    job = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert run_ranks(2, meets, env=job | {"USBYTE_JOB_TOKEN": "ab" * 16}) == [2, 2]


def test_the_mark_in_the_store_does_not_tell_the_token() -> None:
    assert job_mark("abc") == job_mark("abc") != job_mark("abd")
    assert "abc" not in job_mark("abc")


@pytest.mark.parametrize("options", [[], ["--network-interface", "lo"]])
def test_sockets_listen_at_the_interface_only(start: Starter, options: list[str]) -> None:
    running, _ = running_job(start, *options)
    (start.cwd / "go").touch()
    assert running.finish() == 0, running.err
    assert "listens ['127.0.0.1']" in running.out


_words = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20
)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.one_of(
            _words, st.sampled_from(["$(touch bad)", "`touch bad`", "; touch bad", "-rf", "'"])
        ),
        min_size=1,
        max_size=6,
    )
)
def test_arguments_reach_the_command_as_they_are(start: Starter, words: list[str]) -> None:
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    running = start("-np", "1", sys.executable, "-c", code, *words)
    assert running.finish() == 0, running.err
    assert f"[0] {__import__('json').dumps(words)}" in running.out
    assert not (start.cwd / "bad").exists()


@pytest.mark.parametrize(
    "text", ["-oProxyCommand=touch bad", "a;b", "a b", "$(a)", "`a`", "a|b", "a'b", "a\nb", "a&b"]
)
def test_host_names_that_a_shell_or_ssh_would_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no host; write"):
        parse_hosts(text)


def test_streams_that_no_agent_sends_end_at_once() -> None:
    for bad in (b"\x01" + b"\0" * 4 + b"\xff" * 4, b"\x09" + b"\0" * 8):
        reader = FrameReader()
        with pytest.raises(ValueError, match="no agent sends"):
            list(reader.feed(GREETING + bad))
    noise = FrameReader()
    for _ in range(100):
        assert list(noise.feed(b"x" * 65536)) == []
    assert len(noise.noise) <= 65536 + 4096  # is not kept


def test_nothing_in_the_package_unpickles_or_asks_a_shell() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not forbidden & set(names), path
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "os.system", "os.popen", "tempfile.mktemp"), path
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert given.get("shell", "False") == "False", path
            if called.endswith("torch.load"):
                assert given.get("weights_only") == "True", path


FILES = """
import os, sys
import torch
import usbyte.torch as ub
os.umask(int(sys.argv[1], 8))
ub.init()
ub.start_timeline("timeline.json")
model = torch.nn.Linear(2, 2)
opt = ub.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    opt.zero_grad(); model(torch.ones(2)).sum().backward(); opt.step()
ub.stop_timeline()
ub.shutdown()
"""


@pytest.mark.parametrize(("mask", "mode"), [("077", 0o600), ("027", 0o640)])
def test_files_have_the_users_mode(start: Starter, mask: str, mode: int) -> None:
    (start.cwd / "files.py").write_text(FILES)
    running = start("-np", "2", sys.executable, "files.py", mask)
    assert running.finish() == 0, running.err
    files = [path for path in start.cwd.iterdir() if path.name != "files.py"]
    assert files
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 200_000, "malformed JSON|deep"),
        ('{"columns": ' + "[" * 200_000, "deep|malformed"),
        (
            '{"columns": ["tensor", "elements", "backward_gap_us"], "tensors": [["a", 1e999, 1]]}',
            "not a trace",
        ),
        ('{"format": "usbyte-profile-1", "step_s": NaN, "tensors": []}', "malformed JSON"),
        (" " * (files.MOST_BYTES + 1), "File too large"),
    ],
)
def test_hostile_profiles_end_quickly(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises((UsageError, PlanError), match=told):
        profiles.load(str(path))

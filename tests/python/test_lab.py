# SPDX-License-Identifier: Apache-2.0
"""`usbyte lab`: real network namespaces, of a name that no other lab has."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import usbyte
from usbyte.errors import UsageError
from usbyte.lab import cores, netns, shaping
from usbyte.lab.netns import Lab
from usbyte.lab.system_commands import unusable

ROOT = Path(usbyte.__file__).parents[1]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAME = f"t{os.getpid() % 10_000_000}"
METRICS = "/proc/sys/net/ipv4/tcp_no_metrics_save"


def command(*arguments, **options):
    """Runs `usbyte lab` in a fresh process."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    verb, *rest = arguments
    return subprocess.run(
        [sys.executable, "-c", "from usbyte.cli import main; main(prog_name='usbyte')",
         "lab", verb, "--name", NAME, *rest],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False, **options,
    )  # fmt: skip


def left():
    """What is still there of the lab."""
    text = "".join(
        subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout
        for words in (["netns", "list"], ["link", "show"])
    )
    groups = (Path("/sys/fs/cgroup").glob(f"{level}usbyte-lab-{NAME}") for level in ("", "cpu/"))
    files = (Path("/etc/netns").glob(f"{NAME}*"), *groups)
    return re.findall(rf"\b{NAME}\S*", text) + [file for found in files for file in found]


@pytest.fixture(scope="module")
def own_lab():
    if reason := unusable():
        pytest.skip(reason)
    lab = Lab(NAME)
    try:
        lab.up(2, 125e6)
    except UsageError as error:
        pytest.skip(f"no right to make network namespaces: {error}")
    yield lab
    if lab.hosts():
        lab.down(kill=True)
    assert left() == []


@pytest.fixture
def lab(own_lab):
    """Two hosts at 1 Gbit/s, whatever tests before have made of them, and in which order."""
    if own_lab.hosts() == 2 and own_lab.dimensions() == 1:
        own_lab.rate(125e6)
    else:
        if own_lab.hosts():
            own_lab.down(kill=True)
        own_lab.up(2, 125e6)
    return own_lab


_RANK = """
import os, socket, sys, torch, usbyte.torch as ub
ub.init()
print(ub.allreduce(torch.tensor([ub.rank() + 1.0]), op=ub.Sum).item(),
      socket.gethostbyname(socket.gethostname()), socket.gethostbyname(sys.argv.pop()),
      ub.local_rank(), ub.local_size(), sys.argv[1:])
ub.shutdown()
"""


@pytest.mark.netns
def test_ranks_meet_over_the_shaped_links(lab):
    done = command("run", "--", sys.executable, "-c", _RANK, "$HOME *", "--name", f"{NAME}-1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] 3.0 10.98.0.{rank + 1} 10.98.0.2 0 1 ['$HOME *', '--name']" for rank in range(2)
    ]


@pytest.mark.netns
def test_hosts_have_their_own_cores(lab):
    cores = os.sched_getaffinity(0)
    code = """if True:
        import json, os
        inherited = any(name.startswith("LAB_") for name in os.environ)
        policy = os.sched_getscheduler(0)
        print(json.dumps([sorted(os.sched_getaffinity(0)), policy, inherited]))
    """
    done = command("run", "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line[4:]) for line in sorted(done.stdout.splitlines())]
    policy = os.SCHED_OTHER if len(cores) > 1 else os.SCHED_BATCH
    assert [line[1:] for line in lines] == [[policy, False]] * 2
    first, second = (set(line[0]) for line in lines)
    assert len(first) == len(second) == max(len(cores) // 2, 1)
    assert first | second <= cores
    assert first == second if len(cores) == 1 else not first & second


@pytest.mark.netns
def test_ranks_that_share_a_core_are_batch_jobs(lab):
    core = min(os.sched_getaffinity(0))
    code = "import os; print(os.sched_getaffinity(0), os.sched_getscheduler(0), end=' ')"
    code += f"; print('/{lab._control_group.path.name}' in open('/proc/self/cgroup').read())"
    # Of the lab, not of this process.
    alone = lambda: os.sched_setaffinity(0, {core})  # noqa: E731
    done = command("run", "--", sys.executable, "-c", code, preexec_fn=alone)
    assert done.returncode == 0, done.stderr
    expected = f"{{{core}}} {os.SCHED_BATCH} {lab._control_group.path.is_dir()}"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {expected}" for rank in range(2)]


@pytest.mark.parametrize(
    ("hosts", "shares"),
    [
        (1, [[1, 4, 5, 6, 7]]),
        (2, [[1, 4], [5, 6]]),
        (5, [[1], [4], [5], [6], [7]]),
        (7, [[1], [4], [5], [6], [7], [1], [4]]),
    ],
)
def test_cores_are_shared_out_evenly(monkeypatch, hosts, shares):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 1, 5, 6, 4})
    monkeypatch.setattr(cores, "_place", lambda core: (0, core))
    assert cores.core_shares(hosts) == shares


@pytest.mark.netns
def test_the_first_failing_rank_gives_its_code_and_ends_the_others(lab):
    done = command("run", "--", "sh", "-c", '[ "$RANK" = 1 ] && exit 7; sleep 1000')
    assert done.returncode == 7
    assert "rank 1" in done.stderr
    assert [host.pids for host in lab.status()] == [[], []]


@contextmanager
def sleeper(lab, host):
    """A process that runs in a host and does nothing."""
    process = subprocess.Popen(["ip", "netns", "exec", f"{NAME}-{host}", "sleep", "1000"])
    try:
        while not lab.status()[host].pids:
            assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.netns
def test_rates_change_while_ranks_run(lab):
    rates = lambda: [host.bytes_per_s for host in lab.status()]  # noqa: E731
    assert rates() == [[125e6], [125e6]]
    with sleeper(lab, 1) as process:
        done = command("rate", "200mbit")
        assert done.returncode == 0, done.stderr
        assert rates() == [[25e6], [25e6]]
        shown = command("status")
        assert "200mbit" in shown.stdout
        assert str(process.pid) in shown.stdout
        # What still runs is not taken its network away.
        refused = command("down")
        assert refused.returncode == 1
        assert str(process.pid) in refused.stderr
        assert "--kill" in refused.stderr
    assert command("rate", "unlimited").returncode == 0
    assert rates() == [[None], [None]]


@pytest.mark.netns
@pytest.mark.skipif(not os.access(METRICS, os.W_OK), reason="/proc/sys is read-only")
def test_connections_inherit_nothing_from_earlier_ones(lab):
    done = subprocess.run(
        ["ip", "netns", "exec", f"{NAME}-1", "cat", METRICS], capture_output=True, check=True
    )
    assert done.stdout == b"1\n"


@pytest.mark.netns
def test_up_twice_and_down_twice(lab):
    again = command("up", "--hosts", "2")
    assert again.returncode == 1
    assert "up already, with 2 hosts" in again.stderr
    with sleeper(lab, 0) as process:
        assert command("down", "--kill").returncode == 0
        assert process.wait(60) == -signal.SIGKILL
    assert left() == []
    for verb in (["down"], ["rate", "1gbit"], ["run", "--", "true"]):
        gone = command(*verb)
        assert gone.returncode == 1
        assert f"lab '{NAME}' is not up; start it with `usbyte lab up" in gone.stderr
    assert command("status").returncode == 1


@pytest.mark.netns
def test_a_failing_up_leaves_nothing(lab, monkeypatch):
    lab.down()
    monkeypatch.setattr(netns, "INTERFACE", "a-name-that-is-too-long")
    with pytest.raises(UsageError, match=r"ip -n .* addr add"):
        lab.up(2)
    assert left() == []


@pytest.mark.netns
def test_down_removes_what_an_interrupted_up_left(lab):
    lab.down()
    subprocess.run(["ip", "netns", "add", f"{NAME}-0"], check=True)
    assert command("down").returncode == 0
    assert left() == []


@pytest.mark.netns
def test_without_control_groups_a_lab_is_up_all_the_same(lab, monkeypatch, tmp_path, caplog):
    (tmp_path / "autogroup").write_text("1\n")
    monkeypatch.setattr(cores, "_AUTOGROUP", tmp_path / "autogroup")
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path)
    lab.down()
    bare = netns.Lab(NAME)
    bare.up(1)
    assert bare.hosts() == 1
    assert "no control groups can be made" in caplog.text
    bare.down()
    assert [file.name for file in tmp_path.iterdir()] == ["autogroup"]
    assert left() == []


@pytest.mark.netns
def test_congestion_control_is_that_of_choice(lab):
    lab.down()
    unknown = command("up", "--congestion", "no_such")
    assert unknown.returncode == 1
    assert "does not take 'no_such' as TCP's congestion control; it knows " in unknown.stderr
    assert left() == []
    assert command("up", "--hosts", "2", "--congestion", "reno").returncode == 0
    done = subprocess.run(
        ["ip", "-n", f"{NAME}-1", "route"], capture_output=True, text=True, check=True
    )
    assert "src 10.98.0.2 congctl reno" in done.stdout
    lab.down()


_WAY = """
import re, subprocess, torch, usbyte.torch as ub
ub.init()
total = ub.allreduce(torch.tensor([ub.rank() + 1.0]), op=ub.Sum).item()
ways = [subprocess.run(["ip", "route", "get", f"10.98.0.{k + 1}"], capture_output=True, text=True,
                       check=True).stdout for k in range(ub.size()) if k != ub.rank()]
print(total, ub.local_rank(), ub.local_size(), *(re.search("eth[0-9]", way)[0] for way in ways))
ub.shutdown()
"""
# In the processes that have told their ways, as most of what each takes is to import torch.
_BENCHMARKS = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import compressed_routes, routes
shape = ["--topology", "2x2", "--rounds", "1", "--largest", "256K"]
routes.main(["--sizes", "256K,1M", *shape], standalone_mode=False)
compressed_routes.main(["--size", "256K", *shape], standalone_mode=False)
"""


@pytest.mark.netns
def test_hosts_of_two_dimensions_meet_over_the_outermost_that_differs(lab):
    lab.down()
    done = command("up", "--topology", "2x2:10gbit,1gbit")
    assert done.returncode == 0, done.stderr
    assert "2x2 hosts, 10gbit, 1gbit" in done.stdout
    assert [host.bytes_per_s for host in lab.status()] == [[1.25e9, 125e6]] * 4
    # Sums over routes that the rates of the links ask for, and by codecs in one dimension or both;
    # each is checked, the latter to lose nothing.
    done = command("run", "--", sys.executable, "-c", _WAY + _BENCHMARKS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r".*eth\d.*", done.stdout)) == [
        "[0] 10.0 0 2 eth0 eth1 eth1",
        "[1] 10.0 1 2 eth0 eth1 eth1",
        "[2] 10.0 0 2 eth1 eth1 eth0",
        "[3] 10.0 1 2 eth1 eth1 eth0",
    ]
    assert "themis" in done.stdout
    assert done.stdout.count("topk") > 10
    assert command("rate", "5gbit,unlimited").returncode == 0
    assert [host.bytes_per_s for host in lab.status()] == [[625e6, None]] * 4
    refused = command("rate", "5gbit,1gbit,1gbit")
    assert refused.returncode == 1
    assert "has 2 dimensions" in refused.stderr
    lab.down()
    assert left() == []


@pytest.mark.netns
def test_eight_hosts_add_up_on_routes_through_three_dimensions(lab):
    lab.down()
    assert command("up", "--topology", "2x2x2:200mbit,200mbit,200mbit").returncode == 0
    routes = [sys.executable, str(BENCHMARKS / "routes.py")]
    quick = ["--sizes", "256K,1M", "--rounds", "1", "--largest", "256K"]
    done = command("run", "--", *routes, *quick, "--topology", "2x2x2")
    lab.down()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "themis" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--topology", "2x0:1gbit"], "not 2x0"),
        (["--topology", "2x:1gbit"], "is no topology"),
        (["--topology", "2x2:1gbit,1gbit,1gbit"], "has 2 dimensions"),
        (["--topology", "2x2:1gbit", "--hosts", "4"], "leave out --hosts"),
        (["--topology", "100x3"], "1 to 250 hosts"),
    ],
)
@pytest.mark.netns
def test_topologies_that_make_no_sense_are_refused(lab, arguments, what):
    done = command("up", *arguments)
    assert done.returncode in (1, 2)
    assert what in " ".join(done.stderr.split())


@pytest.mark.netns
def test_only_a_host_of_a_lab_shapes_its_own_link(lab):
    with pytest.raises(UsageError, match="not on a host of a lab"):
        shaping.shape_own_link(1e6)
    code = "from usbyte.lab import shaping; shaping.shape_own_link(25e6)"
    assert command("run", "--", sys.executable, "-c", code).returncode == 0
    shaped = subprocess.run(
        ["ip", "netns", "exec", f"{NAME}-1", "tc", "qdisc", "show", "dev", "eth0"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "rate 200Mbit" in shaped.stdout
    lab.down()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    with pytest.raises(UsageError, match=r"root.*sudo"):
        Lab()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UsageError, match="'ip' is missing; install iproute2"):
        Lab()
    found = {"ip": "/sbin/ip", "tc": "/sbin/tc", "taskset": "/bin/taskset"}
    monkeypatch.setattr("shutil.which", found.get)
    with pytest.raises(UsageError, match="'chrt' is missing; install util-linux"):
        Lab()
    with pytest.raises(UsageError, match="8 lower-case"):
        Lab("Not a name")


@pytest.mark.parametrize(
    ("bit_per_s", "burst"),
    [(1e6, 68 << 10), (2e8, 68 << 10), (3e8, 97500), (5e8, 136 << 10), (1e10, 1250000)],
)
def test_buckets_hold_a_packet_two_or_a_millisecond(bit_per_s, burst, monkeypatch):
    commands = []
    monkeypatch.setattr(shaping, "run_command", lambda *command: commands.append(command))
    shaping.shape_link(["tc"], "eth0", bit_per_s / 8)
    (options,) = commands
    assert options[options.index("burst") + 1] == f"{burst}b"


_AGENT = """
set -- -m torch.distributed.run --nnodes 2 --node-rank $RANK --nproc-per-node 2 --max-restarts 1 \
  --master-addr $MASTER_ADDR --master-port $MASTER_PORT "$@"
exec env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE "$PYTHON" "$@"
"""
_RESTARTED = """
import json, os, pathlib, signal, sys, torch, usbyte.torch as ub
ub.init()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = ub.DistributedOptimizer(optimizer, model.named_parameters(), overlap="forward")
ub.broadcast_parameters(model.state_dict(), 0)
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(4):
    optimizer.zero_grad()
    model(torch.full((1, 3), ub.rank() + 1.0)).sum().backward()
    optimizer.step()
    if step == 2 and restarts == 0 and ub.rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
total = ub.allreduce(torch.tensor(ub.rank() + 1.0), op=ub.Sum).item()
same = ub.allgather(model.weight.detach()[None])
assert (same == same[0]).all()
answer = [restarts, total, ub.local_rank(), ub.local_size(), ub.cross_rank()]
pathlib.Path(sys.argv[1], f"rank-{ub.rank()}.json").write_text(json.dumps(answer))
ub.shutdown()
"""


@pytest.mark.netns
def test_torchrun_over_hosts_starts_anew_and_goes_on(lab, monkeypatch, tmp_path):
    """Its agents keep one store over restarts, in which ranks find what dead ones have left."""
    script = tmp_path / "script.py"
    script.write_text(_RESTARTED)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("USBYTE_STALL_LIMIT_S", "20")
    done = command("run", "--", "sh", "-c", _AGENT, "sh", str(script), str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert answers == [[1, 10.0, rank % 2, 2, rank // 2] for rank in range(4)]

# SPDX-License-Identifier: Apache-2.0
"""The cluster as launchers describe it, and the USBYTE_* knobs as Python sees them."""

import logging

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte import _core, cluster_env, slurm
from usbyte.errors import EnvError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_TASK_PID": "16360",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_NODELIST": "gpu[01-03,7]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node0-4711@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def without(environ, *names):
    return {name: text for name, text in environ.items() if name not in names}


def error(environ):
    with pytest.raises(EnvError) as caught:
        cluster_env.detect(environ)
    return str(caught.value)


def test_single_process():
    assert cluster_env.detect({}) == cluster_env.Cluster(0, 1, 0, 1, "127.0.0.1", 0, "single")
    assert cluster_env.detect({"MASTER_ADDR": "node0", "RANK": ""}).source == "single"


def test_torchrun():
    assert cluster_env.detect(TORCHRUN) == cluster_env.Cluster(
        3, 4, 1, 2, "node0", 29500, "torchrun"
    )
    kept = cluster_env.detect(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert kept == cluster_env.Cluster(3, 4, 1, 2, "node0", 29500, "torchrun", kept_store=True)


def test_torchrun_without_local_variables():
    plain = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    there = cluster_env.detect(plain)
    assert (there.local_rank, there.local_size) == (None, None)  # counted when the ranks meet
    some = cluster_env.detect(without(TORCHRUN, "LOCAL_WORLD_SIZE"))
    assert (some.local_rank, some.local_size) == (1, None)
    some = cluster_env.detect(without(TORCHRUN, "LOCAL_RANK"))
    assert (some.local_rank, some.local_size) == (None, 2)


def test_the_job_id_is_the_launchers():
    assert cluster_env.detect(TORCHRUN).job_id == ""
    assert cluster_env.detect(TORCHRUN | {"TORCHELASTIC_RUN_ID": "run 7"}).job_id == "run 7"
    assert cluster_env.detect(SLURM).job_id == "4711.0"
    assert cluster_env.detect(OPEN_MPI).job_id == "prterun-node0-4711@1"
    with pytest.raises(EnvError, match="MASTER_PORT"):  # which no such id replaces
        cluster_env.detect(without(TORCHRUN, "MASTER_PORT") | {"TORCHELASTIC_RUN_ID": "none"})


def test_torchrun_of_one_needs_no_master():
    assert cluster_env.detect({"RANK": "0", "WORLD_SIZE": "1"}).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": ""}, ["RANK=(unset), WORLD_SIZE=4", "only some"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE=(unset)", "only some", "torchrun"]),
        ({"LOCAL_WORLD_SIZE": "0"}, ["LOCAL_RANK=1, LOCAL_WORLD_SIZE=0"]),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_RANK": "4"}, ["LOCAL_RANK=4, LOCAL_WORLD_SIZE=(unset)"]),
        ({"RANK": "4"}, ["RANK=4, WORLD_SIZE=4"]),
        ({"RANK": "-1"}, ["RANK=-1"]),
        ({"RANK": "three"}, ["RANK=three", "whole number"]),
        ({"RANK": "\u0663"}, ["RANK=\u0663", "whole number"]),
        ({"WORLD_SIZE": "9" * 5000}, ["WORLD_SIZE=999", "whole number"]),
        ({"WORLD_SIZE": "9" * 18}, ["WORLD_SIZE=999", "the size at most 65536"]),
        ({"MASTER_PORT": "9" * 18}, ["MASTER_PORT=999", "65535"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"]),
        ({"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE=8"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR=(unset)", "host of rank 0"]),
        ({"MASTER_PORT": ""}, ["MASTER_PORT=(unset)", "port"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "65535"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT=http"]),
        ({"RANK": "", "WORLD_SIZE": ""}, ["RANK=(unset)", "LOCAL_RANK=1", "only some"]),
    ],
)
def test_torchrun_errors_name_variables_and_remedy(change, words):
    text = error(TORCHRUN | change)
    assert all(word in text for word in words), text


def test_slurm():
    cluster = cluster_env.detect(SLURM)
    assert cluster.source == "slurm"
    assert (cluster.rank, cluster.size) == (5, 7)
    assert (cluster.local_rank, cluster.local_size) == (1, 2)
    assert cluster.master_addr == "gpu01"
    assert 1024 < cluster.master_port < 32768


def test_slurm_port_is_the_same_on_every_rank_and_differs_between_jobs_and_steps():
    port = cluster_env.detect(SLURM).master_port
    other_rank = {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    assert cluster_env.detect(SLURM | other_rank).master_port == port
    assert cluster_env.detect(SLURM | {"SLURM_JOB_ID": "4712"}).master_port != port
    assert cluster_env.detect(SLURM | {"SLURM_STEP_ID": "1"}).master_port != port


def test_slurm_step_wins_over_job():
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "gpu03",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "0",
    }
    cluster = cluster_env.detect(SLURM | step)
    assert (cluster.size, cluster.local_size, cluster.master_addr) == (2, 2, "gpu03")


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_size"), [(0, 0, 2), (3, 1, 2), (4, 0, 2), (6, 0, 1)]
)
def test_slurm_node_follows_from_rank(rank, local_rank, local_size):
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank), "SLURM_NODEID": ""}
    assert cluster_env.detect(SLURM | place).local_size == local_size


def test_slurm_ntasks_per_node():
    place = {"SLURM_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NTASKS": "8"}
    assert cluster_env.detect(SLURM | place).local_size == 4


def test_slurm_without_what_tells_of_hosts():
    counts = ("SLURM_TASKS_PER_NODE", "SLURM_LOCALID")
    cluster = cluster_env.detect(without(SLURM, *counts))
    assert (cluster.rank, cluster.local_rank, cluster.local_size) == (5, None, None)
    cluster = cluster_env.detect(without(SLURM, "SLURM_LOCALID"))
    assert (cluster.local_rank, cluster.local_size) == (None, 2)
    cluster = cluster_env.detect(without(SLURM, "SLURM_LOCALID", "SLURM_NODEID"))
    assert (cluster.local_rank, cluster.local_size) == (None, None)
    cluster = cluster_env.detect(without(SLURM, "SLURM_TASKS_PER_NODE"))
    assert (cluster.local_rank, cluster.local_size) == (1, None)


def test_slurm_master_variables_win():
    cluster = cluster_env.detect(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (cluster.master_addr, cluster.master_port) == ("10.0.0.1", 4000)


def test_shell_of_a_batch_script_is_a_single_process(caplog):
    with caplog.at_level(logging.WARNING, logger="usbyte"):
        shell = SLURM | {"SLURM_STEP_ID": "", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        assert cluster_env.detect(shell).source == "single"
    assert "srun" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_NTASKS": ""}, ["SLURM_NTASKS=(unset)"]),
        ({"SLURM_PROCID": "7"}, ["SLURM_PROCID=7, SLURM_NTASKS=7"]),
        ({"SLURM_LOCALID": "2"}, ["SLURM_LOCALID=2"]),
        ({"SLURM_TASKS_PER_NODE": "2x3"}, ["SLURM_TASKS_PER_NODE=2x3", "2(x3),1"]),
        ({"SLURM_NODEID": "9"}, ["SLURM_NODEID=9"]),
        ({"SLURM_NODEID": "", "SLURM_LOCALID": "0"}, ["SLURM_NODEID=(unset)"]),
        ({"SLURM_JOB_NODELIST": "gpu[01-"}, ["SLURM_JOB_NODELIST=gpu[01-"]),
        ({"SLURM_JOB_NODELIST": ""}, ["MASTER_ADDR"]),
        ({"SLURM_NTASKS": "9" * 18}, ["SLURM_NTASKS=999", "the size at most 65536"]),
        ({"SLURM_TASKS_PER_NODE": "2(x999999999999)"}, ["x999999999999)", "more than 65536"]),
        ({"SLURM_TASKS_PER_NODE": "9" * 5000}, ["SLURM_TASKS_PER_NODE=99", "2(x3),1"]),
        ({"SLURM_JOB_NODELIST": "n[1-999999999999]"}, ["n[1-9999", "more than 65536"]),
        ({"SLURM_JOB_NODELIST": "n[1-2000][1-2000]"}, ["[1-2000]", "more than 65536"]),
        ({"SLURM_JOB_ID": ""}, ["MASTER_PORT"]),
    ],
)
def test_slurm_errors_name_variables(change, words):
    text = error(SLURM | change)
    assert all(word in text for word in words), text


def test_open_mpi_on_one_host():
    cluster = cluster_env.detect(OPEN_MPI)
    assert (cluster.source, cluster.rank, cluster.local_size) == ("openmpi", 1, 2)
    assert cluster.master_addr == "127.0.0.1"
    older = without(OPEN_MPI, "PMIX_NAMESPACE") | {"OMPI_MCA_ess_base_jobid": "123456"}
    assert cluster_env.detect(older).master_port != cluster.master_port


def test_open_mpi_on_several_hosts_needs_the_master():
    several = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    text = error(several)
    assert "MASTER_ADDR=(unset)" in text
    assert "mpirun -x MASTER_ADDR" in text
    assert cluster_env.detect(several | {"MASTER_ADDR": "node0"}).master_addr == "node0"


def test_mpirun_under_slurm_is_open_mpi():
    daemon = SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert cluster_env.detect(daemon | OPEN_MPI).source == "openmpi"
    assert cluster_env.detect(TORCHRUN | daemon | OPEN_MPI).source == "torchrun"


def test_open_mpi_set_in_part():
    assert "OMPI_COMM_WORLD_SIZE=(unset)" in error(without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"))


def test_hydra_has_no_job_id():
    assert "MASTER_PORT" in error(HYDRA)
    cluster = cluster_env.detect(HYDRA | {"MASTER_PORT": "4000"})
    assert cluster == cluster_env.Cluster(1, 2, 1, 2, "127.0.0.1", 4000, "pmi")


def test_open_mpi_without_its_local_rank():
    cluster = cluster_env.detect(without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"))
    assert (cluster.local_rank, cluster.local_size) == (None, 2)


def test_pmi_without_local_variables():
    plain = without(HYDRA, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    assert "MASTER_ADDR" in error(plain)
    cluster = cluster_env.detect(plain | {"MASTER_ADDR": "node0", "MASTER_PORT": "4000"})
    assert (cluster.rank, cluster.local_rank, cluster.local_size) == (1, None, None)
    assert cluster_env.detect(SLURM | plain).source == "slurm"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login2", ["login2"]),
        ("gpu[01-03,7],login2", ["gpu01", "gpu02", "gpu03", "gpu7", "login2"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("a-1,b.example", ["a-1", "b.example"]),
    ],
)
def test_expand_hosts(text, hosts):
    assert slurm.expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *["", "a,,b", "a[1", "a]1", "a[[1]]", "a[1-]", "a[3-1]", "a[x]", "a[\u0663]"],
        *[
            "a" * 300,
            "a[" + "0" * 5000 + "]",
            "a[1-" + "9" * 5000 + "]",
            ",".join(["a[1-60000]"] * 2),
        ],
    ],
)
def test_expand_hosts_rejects(text):
    with pytest.raises(ValueError, match=r"not a (host )?list|has more than"):
        slurm.expand_hosts(text)


def test_environ_of_replaces_the_launchers_variables(monkeypatch):
    for name, text in (SLURM | OPEN_MPI | {"PYTHONHASHSEED": "0"}).items():
        monkeypatch.setenv(name, text)
    cluster = cluster_env.Cluster(1, 2, 1, 2, "127.0.0.1", 4000, "torchrun")
    environ = cluster_env.environ_of(cluster)
    assert cluster_env.detect(environ) == cluster
    assert environ["PYTHONHASHSEED"] == "0"
    assert not any(name.startswith(("SLURM_", "OMPI_")) for name in environ)


@pytest.fixture
def no_knobs(monkeypatch):
    for name in cluster_env.usbyte_variables():
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_knobs")
def test_knobs(monkeypatch):
    monkeypatch.setenv("USBYTE_CREDIT_BYTES", "2M")
    monkeypatch.setenv("USBYTE_STALL_LIMIT_S", "1.5")
    knobs = _core.Env.read()
    assert (knobs.credit_bytes, knobs.stall_limit_s, knobs.learning_steps) == (2 << 20, 1.5, 5)
    in_force = {variable.name: variable for variable in knobs.variables}
    assert in_force["USBYTE_CREDIT_BYTES"].set
    assert not in_force["USBYTE_POLICY"].set
    assert in_force["USBYTE_BUCKET_BYTES"].value == str(25 << 20)
    assert in_force["USBYTE_BUCKET_BYTES"].unit == "bytes"
    assert cluster_env.usbyte_variables() == {
        "USBYTE_CREDIT_BYTES": "2M",
        "USBYTE_STALL_LIMIT_S": "1.5",
    }


@pytest.mark.usefixtures("no_knobs")
def test_knobs_of_the_start_and_of_checks(monkeypatch):
    knobs = _core.Env.read()
    assert (knobs.start_limit_s, knobs.check_steps) == (60.0, 50)
    monkeypatch.setenv("USBYTE_START_LIMIT_S", "7.5")
    monkeypatch.setenv("USBYTE_CHECK_STEPS", "0")
    knobs = _core.Env.read()
    assert (knobs.start_limit_s, knobs.check_steps) == (7.5, 0)


@pytest.mark.usefixtures("no_knobs")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[("USBYTE_STALL_LIMIT_S", text) for text in ("1e18", "1e10", "1e400", "-1", "nan", "inf")],
        ("USBYTE_STALL_WARNING_S", "1e18"),
        ("USBYTE_START_LIMIT_S", "0"),
        ("USBYTE_START_LIMIT_S", "1e10"),
        ("USBYTE_CHECK_STEPS", "-1"),
        ("USBYTE_STALL_WARNING_S", "\u0663"),
        ("USBYTE_CHUNK_BYTES", "8589934591G"),
        ("USBYTE_CREDIT_BYTES", "9" * 5000),
        ("USBYTE_LEARNING_STEPS", "9" * 19),
        ("USBYTE_NCCL_COMMUNICATORS", "9"),
        ("USBYTE_NCCL_MAX_CTAS", "4294967297"),
        ("USBYTE_ONE_SHOT_BYTES", "2M"),
        ("USBYTE_TIMELINE_STEPS", "0:" + "9" * 30),
    ],
)
def test_numbers_out_of_range_are_refused(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(EnvError, match=f'{name}="{text[:20]}.* cannot be used; accepted: '):
        _core.Env.read()


@pytest.mark.usefixtures("no_knobs")
def test_knob_errors(monkeypatch):
    monkeypatch.setenv("USBYTE_CREDIT_BYTES", "2MB")
    with pytest.raises(EnvError, match=r'USBYTE_CREDIT_BYTES="2MB".*powers of 1024'):
        _core.Env.read()
    monkeypatch.setenv("USBYTE_CREDITS", "2M")
    monkeypatch.delenv("USBYTE_CREDIT_BYTES")
    with pytest.raises(EnvError, match="did you mean USBYTE_CREDIT_BYTES"):
        _core.Env.read()


def train_a_little(rank, size):
    ub.init()
    model = nn.Linear(3, 3)
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    ub.barrier()
    return optimizer.settled


@pytest.mark.parametrize(
    ("policy", "steps", "number"),
    [("bytescheduler", "1", "8589934591G"), ("ddp", str(2**63 - 1), "1")],
)
def test_numbers_at_their_bounds_serve(policy, steps, number):
    sizes = {f"USBYTE_{name}_BYTES": number for name in ("PARTITION", "CREDIT", "BUCKET")}
    knobs = {
        "USBYTE_STALL_LIMIT_S": "1e8",
        "USBYTE_STALL_WARNING_S": "1e8",
        "USBYTE_LEARNING_STEPS": steps,
        "USBYTE_TIMELINE_STEPS": "9223372036854775806:9223372036854775807",
        "USBYTE_POLICY": policy,
    }
    assert run_ranks(2, train_a_little, env=knobs | sizes) == [steps == "1"] * 2

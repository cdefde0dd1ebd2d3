# SPDX-License-Identifier: Apache-2.0
"""Rank, size and master address of this process, read from the launcher's environment variables.

No other module of the Python package reads these variables. The class `Env` of the C++ core reads,
parses and documents the USBYTE_* variables.
"""

import hashlib
import hmac
import logging
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from usbyte import slurm

_LOOPBACK = "127.0.0.1"
_REMEDY = (
    "Start the job with usbyterun, torchrun, srun or mpirun, or set RANK, WORLD_SIZE, LOCAL_RANK, "
    "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; unset them all to run a single process."
)
_LAUNCHERS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_RANK|NODE_RANK)$"
    r"|(SLURM|OMPI|PMI|PMIX|MPI|PRTE|HYDRA|HYDI|TORCHELASTIC)_|USBYTE_JOB_TOKEN$"
)

#: The most ranks of a job; a larger number is taken for a typing error.
MOST_RANKS = 1 << 16

#: Key in the launcher's store; its value is `job_mark` of the job token.
JOB_KEY = "usbyte/job"


@dataclass(frozen=True)
class Cluster:
    """The rank of this process, and the facts that it needs for the rendezvous.

    Attributes:
        rank: Number of this process in the job, from 0.
        size: Number of processes in the job.
        local_rank: Number of this process on its host, from 0. None if the launcher does not set
            it; `usbyte.torch.init` then counts the ranks of each host.
        local_size: Number of processes on this host; None if the launcher does not set it.
        master_addr: Host of rank 0.
        master_port: Port for the rendezvous; 0, any free port, for a single process.
        source: "torchrun" (any launcher or user that sets RANK and WORLD_SIZE), "slurm", "openmpi",
            "pmi" or "single".
        kept_store: Whether the launcher serves the store of the rendezvous, which then outlives a
            restart of the ranks.
        job_id: The launcher's name for this job, the same on all ranks; "" if there is none.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    master_addr: str
    master_port: int
    source: str
    kept_store: bool = False
    job_id: str = ""


def detect(environ: Mapping[str, str] | None = None) -> Cluster:
    """Reads the variables of the launcher that started this process.

    MASTER_ADDR and MASTER_PORT take precedence over values that follow from other variables of the
    launcher.

    Args:
        environ: The variables; None for the environment of this process.

    Raises:
        EnvError: Variables are missing, contradict each other or are not numbers.
    """
    env = _Environment(os.environ if environ is None else environ)
    # Slurm comes last. mpirun under Slurm starts its daemons with srun, and every rank inherits the
    # daemon's SLURM_PROCID, which counts hosts. The inner launcher has the numbers of the ranks.
    for launcher in (_torchrun, _open_mpi, _pmi, _slurm):
        place = launcher(env)
        if place is not None:
            return _cluster(env, place)
    if env.text("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        raise env.error(names, "only some of these variables are set")
    return Cluster(0, 1, 0, 1, _LOOPBACK, 0, "single")


def environ_of(cluster: Cluster) -> dict[str, str]:
    """Returns the environment for a new process that `detect` shall read as `cluster`.

    It is the environment of this process without the variables of its own launcher.
    """
    inherited = {name: text for name, text in os.environ.items() if not _LAUNCHERS.match(name)}
    place = {
        "RANK": cluster.rank,
        "WORLD_SIZE": cluster.size,
        "LOCAL_RANK": cluster.local_rank,
        "LOCAL_WORLD_SIZE": cluster.local_size,
        "MASTER_ADDR": cluster.master_addr,
        "MASTER_PORT": cluster.master_port,
    }
    return inherited | {name: str(value) for name, value in place.items() if value is not None}


def job_mark(token: str) -> str:
    """Returns an HMAC of the job token: it proves the token and does not reveal it."""
    return hmac.new(token.encode(), b"usbyte job", hashlib.sha256).hexdigest()


def usbyte_variables() -> dict[str, str]:
    """Returns the USBYTE_* variables that are set, unparsed; the job token is masked."""
    return {
        name: "(secret)" if name == "USBYTE_JOB_TOKEN" else text
        for name, text in sorted(os.environ.items())
        if name.startswith("USBYTE_")
    }


class _Environment:
    """Reads variables; each error names the variables, their values and a remedy."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # Job scripts write NAME="${X:-}": empty means unset.
        self._environ = {name: text for name, text in environ.items() if text}

    def text(self, *names: str) -> str:
        """Returns the first of the variables that is set, or ""."""
        return next((self._environ[name] for name in names if name in self._environ), "")

    def integer(self, *names: str) -> int | None:
        """Returns the first of the variables that is set; None if none is."""
        name = next((name for name in names if name in self._environ), None)
        if name is None:
            return None
        if not re.fullmatch(r"-?[0-9]{1,18}", self._environ[name]):
            raise self.error([name], "not a whole number")
        return int(self._environ[name])

    def integers(self, *names: str) -> list[int] | None:
        """Returns all of the variables, or None if none is set.

        Raises:
            EnvError: Some of the variables are set and others are not.
        """
        values = [self.integer(name) for name in names]
        numbers = [value for value in values if value is not None]
        if numbers and len(numbers) < len(names):
            raise self.error(names, "only some of these variables are set")
        return numbers or None

    def error(self, names: Iterable[str], problem: str, remedy: str = _REMEDY) -> Exception:
        # Imported here: it needs the C++ core, and `usbyte doctor` must run without it.
        from usbyte.errors import EnvError

        found = ", ".join(f"{name}={self._environ.get(name, '(unset)')}" for name in names)
        return EnvError(f"{found}: {problem}. {remedy}")


@dataclass(frozen=True)
class _Place:
    """The unchecked values of one launcher's variables."""

    source: str
    names: tuple[str, ...]  # Names of the variables of `job`, then those of `local`.
    job: list[int]  # Rank and size.
    local: tuple[int | None, int | None]  # Local rank and local size; None: not set.
    host: str = ""  # Host of rank 0; "": not set.
    job_id: str = ""


def _cluster(env: _Environment, place: _Place) -> Cluster:
    rank, size = place.job
    if not 0 <= rank < size <= MOST_RANKS:
        problem = f"the rank must be from 0 to the size - 1, and the size at most {MOST_RANKS}"
        raise env.error(place.names[:2], problem)
    local_rank, local_size = (0, 1) if size == 1 else place.local
    one_host = local_size == size
    address = env.text("MASTER_ADDR") or place.host or (_LOOPBACK if one_host else "")
    if not address:
        raise env.error(
            ["MASTER_ADDR", *place.names],
            f"MASTER_ADDR is needed, as the {size} processes are not all known to be on one host",
            "Set it to the host of rank 0 on all of them, as in: mpirun -x MASTER_ADDR=HOST ...",
        )
    most = size if local_size is None else local_size
    if not (0 <= (local_rank or 0) < most <= size):
        problem = "the local rank must be from 0 to the local size - 1, that at most the size"
        raise env.error(place.names, problem)
    torchrun = place.source == "torchrun"
    # torchrun's run id cannot serve for a port: the user chooses it, and the default is "none".
    port = _port(env, size, "" if torchrun else place.job_id)
    kept = torchrun and env.text("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Cluster(
        rank, size, local_rank, local_size, address, port, place.source, kept, place.job_id
    )


def _port(env: _Environment, size: int, job_id: str) -> int:
    port = env.integer("MASTER_PORT")
    if port is not None:
        if not 0 < port < 65536:
            raise env.error(["MASTER_PORT"], "not a port", "Set it to a free port from 1 to 65535.")
        return port
    if size == 1:
        return 0
    if not job_id:
        # With a fixed default, two jobs on one host would share one rendezvous.
        raise env.error(
            ["MASTER_PORT"],
            f"needed by {size} processes, as no job id is set to derive it from",
            "Set it on all of them to a port that is free on the host of rank 0.",
        )
    # Stay below 32768, the first of Linux's ephemeral ports.
    return 12000 + zlib.crc32(job_id.encode()) % 20000


def _torchrun(env: _Environment) -> _Place | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    job = env.integers(*names[:2])
    if job is None:
        return None
    run = env.text("TORCHELASTIC_RUN_ID")
    return _Place("torchrun", names, job, _told(env, names[2:]), job_id=run)


def _told(env: _Environment, names: Sequence[str]) -> tuple[int | None, int | None]:
    """Returns the local rank and the local size; None for each that is not set."""
    rank, size = (env.integer(name) for name in names)
    return rank, size


def _mpi_job_id(env: _Environment) -> str:
    return env.text("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID")


def _open_mpi(env: _Environment) -> _Place | None:
    names = tuple(f"OMPI_COMM_WORLD_{end}" for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    job = env.integers(*names[:2])
    if job is None:
        return None
    return _Place("openmpi", names, job, _told(env, names[2:]), job_id=_mpi_job_id(env))


def _pmi(env: _Environment) -> _Place | None:
    """Reads the variables of the launcher of MPICH and Intel MPI."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    local = _told(env, names[2:])
    # srun sets PMI_RANK and PMI_SIZE as well; `_slurm` reads its own variables.
    if local == (None, None) and env.text("SLURM_PROCID"):
        return None
    job = env.integers(*names[:2])
    return _Place("pmi", names, job, local, job_id=_mpi_job_id(env)) if job else None


def _slurm(env: _Environment) -> _Place | None:
    if not env.text("SLURM_PROCID"):
        return None
    step = env.text("SLURM_STEP_ID", "SLURM_STEPID")
    total = "SLURM_STEP_NUM_TASKS" if env.text("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    names = ("SLURM_PROCID", total, "SLURM_LOCALID")
    rank, size = env.integers(*names[:2]) or []
    local_rank = env.integer("SLURM_LOCALID")
    # Only srun sets the step id. In the shell of an sbatch script, SLURM_PROCID is 0 for any
    # allocation, and a wait for SLURM_NTASKS processes that were never started would hang.
    if env.text("SLURM_TASK_PID") and not step:
        if size > 1:
            text = "in a Slurm job of %d tasks, but not started by srun: this is a single process"
            logging.getLogger("usbyte").warning(text, size)
        return None
    tasks = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    nodes = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    try:
        local_size = _local_size(env, tasks, rank, size, local_rank)
        host = slurm.expand_hosts(env.text(*nodes))[0] if env.text(*nodes) else ""
    except ValueError as error:
        raise env.error((*names, *tasks, "SLURM_NODEID", *nodes), str(error)) from error
    # Several steps of one Slurm job may run at the same time.
    job_id = env.text("SLURM_JOB_ID", "SLURM_JOBID")
    job_id = job_id and f"{job_id}.{step}"
    return _Place("slurm", (*names, *tasks), [rank, size], (local_rank, local_size), host, job_id)


def _local_size(
    env: _Environment, variables: tuple[str, ...], rank: int, size: int, local_rank: int | None
) -> int | None:
    """Returns the number of tasks on this Slurm node; None if no variable has it."""
    if size == 1 or not env.text(*variables):
        return None
    counts = slurm.expand_counts(env.text(*variables))
    if len(set(counts)) == 1:
        return counts[0]
    node = env.integer("SLURM_NODEID")
    if node is None:
        if local_rank is None:
            return None
        # Slurm's default distribution fills the nodes in order.
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        node = firsts.index(rank - local_rank) if rank - local_rank in firsts else -1
    if not 0 <= node < len(counts):
        raise ValueError("the node of this task is not in the list of tasks for each node")
    return counts[node]

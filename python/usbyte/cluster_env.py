"""The cluster as the launcher's environment variables describe it.

Nothing else in the Python package reads the environment; USBYTE_* knobs are read, parsed and
documented by the C++ core's `Env`.
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

#: Ranks of a job; more is a slip of the keyboard.
MOST_RANKS = 1 << 16

#: In the launcher's store: `job_mark` of the job's token.
JOB_KEY = "usbyte/job"


@dataclass(frozen=True)
class Cluster:
    """This process's place among the processes of the job.

    Attributes:
        rank: Number of this process in the job, from 0.
        size: Processes in the job.
        local_rank: Number of this process on its host, from 0; None if the launcher does not tell:
            `usbyte.torch.init` then counts the ranks of each host.
        local_size: Processes on this host; None if the launcher does not tell.
        master_addr: Host of rank 0.
        master_port: Port for the rendezvous; 0 for a single process: any.
        source: "torchrun" (RANK and WORLD_SIZE, whoever set them), "slurm", "openmpi", "pmi" or
            "single".
        kept_store: The launcher serves the store of the rendezvous, and keeps it when it starts the
            ranks anew.
        job_id: The launcher's name for this job, the same on all ranks; "" if it gives none.
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

    MASTER_ADDR and MASTER_PORT win over what is derived from the launcher's other variables.

    Args:
        environ: Read instead of this process's environment.

    Raises:
        EnvError: Variables are missing, contradict each other or are no numbers.
    """
    env = _Environment(os.environ if environ is None else environ)
    # mpirun under Slurm starts its daemons with srun: their SLURM_PROCID, inherited by every rank,
    # counts hosts. The inner launcher is the one that knows.
    for launcher in (_torchrun, _open_mpi, _pmi, _slurm):
        place = launcher(env)
        if place is not None:
            return _cluster(env, place)
    if env.text("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        raise env.error(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "set in part")
    return Cluster(0, 1, 0, 1, _LOOPBACK, 0, "single")


def environ_of(cluster: Cluster) -> dict[str, str]:
    """The environment for a process that is started as `cluster`: this one's, with its place."""
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
    """What tells a job's processes that they have its token, and others nothing of it."""
    return hmac.new(token.encode(), b"usbyte job", hashlib.sha256).hexdigest()


def usbyte_variables() -> dict[str, str]:
    """The USBYTE_* variables as they are set, unparsed, but for secrets."""
    return {
        name: "(secret)" if name == "USBYTE_JOB_TOKEN" else text
        for name, text in sorted(os.environ.items())
        if name.startswith("USBYTE_")
    }


class _Environment:
    """Reads variables; every complaint names them, their values and what to do."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # Job scripts write NAME="${X:-}": empty means unset.
        self._environ = {name: text for name, text in environ.items() if text}

    def text(self, *names: str) -> str:
        """The first that is set, or ""."""
        return next((self._environ[name] for name in names if name in self._environ), "")

    def integer(self, *names: str) -> int | None:
        """The first that is set; None where none is."""
        name = next((name for name in names if name in self._environ), None)
        if name is None:
            return None
        if not re.fullmatch(r"-?[0-9]{1,18}", self._environ[name]):
            raise self.error([name], "no whole number")
        return int(self._environ[name])

    def integers(self, *names: str) -> list[int] | None:
        """All of them or, where none is set, None; some and not the others is an EnvError."""
        values = [self.integer(name) for name in names]
        numbers = [value for value in values if value is not None]
        if numbers and len(numbers) < len(names):
            raise self.error(names, "set in part")
        return numbers or None

    def error(self, names: Iterable[str], problem: str, remedy: str = _REMEDY) -> Exception:
        # Imported late: it needs the extension, and `usbyte doctor` must run without.
        from usbyte.errors import EnvError

        found = ", ".join(f"{name}={self._environ.get(name, '(unset)')}" for name in names)
        return EnvError(f"{found}: {problem}. {remedy}")


@dataclass(frozen=True)
class _Place:
    """What one launcher tells, unchecked."""

    source: str
    names: tuple[str, ...]  # of the variables behind `job` and then `local`
    job: list[int]  # rank, size
    local: tuple[int | None, int | None]  # local rank, local size; None: not told
    host: str = ""  # of rank 0, where told
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
    # An id that users choose, or "none" unless they do: no port can be derived from it.
    port = _port(env, size, "" if torchrun else place.job_id)
    kept = torchrun and env.text("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Cluster(
        rank, size, local_rank, local_size, address, port, place.source, kept, place.job_id
    )


def _port(env: _Environment, size: int, job_id: str) -> int:
    port = env.integer("MASTER_PORT")
    if port is not None:
        if not 0 < port < 65536:
            raise env.error(["MASTER_PORT"], "no port", "Set it to a free port from 1 to 65535.")
        return port
    if size == 1:
        return 0
    if not job_id:
        # A fixed default would let two jobs on one host meet at one rendezvous.
        raise env.error(
            ["MASTER_PORT"],
            f"needed by {size} processes, as no job id is set to derive it from",
            "Set it on all of them to a port that is free on the host of rank 0.",
        )
    # Below 32768, where Linux's ephemeral ports begin.
    return 12000 + zlib.crc32(job_id.encode()) % 20000


def _torchrun(env: _Environment) -> _Place | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    job = env.integers(*names[:2])
    if job is None:
        return None
    run = env.text("TORCHELASTIC_RUN_ID")
    return _Place("torchrun", names, job, _told(env, names[2:]), job_id=run)


def _told(env: _Environment, names: Sequence[str]) -> tuple[int | None, int | None]:
    """Local rank and local size, each where it is set."""
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
    """MPICH's and Intel MPI's launcher."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    local = _told(env, names[2:])
    # srun sets the first two as well, and tells more through its own variables.
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
    # Only srun numbers its step. In the shell of an sbatch script SLURM_PROCID is 0 whatever the
    # allocation, and waiting for SLURM_NTASKS processes that nobody started would hang.
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
    # Steps of one job may run side by side.
    job_id = env.text("SLURM_JOB_ID", "SLURM_JOBID")
    job_id = job_id and f"{job_id}.{step}"
    return _Place("slurm", (*names, *tasks), [rank, size], (local_rank, local_size), host, job_id)


def _local_size(
    env: _Environment, variables: tuple[str, ...], rank: int, size: int, local_rank: int | None
) -> int | None:
    """Tasks on this Slurm node; None if no variable tells."""
    if size == 1 or not env.text(*variables):
        return None
    counts = slurm.expand_counts(env.text(*variables))
    if len(set(counts)) == 1:
        return counts[0]
    node = env.integer("SLURM_NODEID")
    if node is None:
        if local_rank is None:
            return None
        # Slurm's default distribution fills one node after the other.
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        node = firsts.index(rank - local_rank) if rank - local_rank in firsts else -1
    if not 0 <= node < len(counts):
        raise ValueError("the node of this task is not in the list of tasks for each node")
    return counts[node]

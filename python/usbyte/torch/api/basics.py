"""What a script asks of the run: its ranks, process sets and timelines, and what usbyte can do.

All functions but `*_built`, `*_enabled` and `mpi_threads_supported` raise `UsageError` before
`init`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from usbyte import _core
from usbyte.errors import Error
from usbyte.torch.comm.nccl import find
from usbyte.torch.world import world
from usbyte.torch.world.process_sets import ProcessSet

__all__ = [
    "HorovodInternalError",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "size",
    "start_timeline",
    "stop_timeline",
]

log = logging.getLogger("usbyte")

#: The base of all that usbyte raises, for scripts that catch Horovod's.
HorovodInternalError = Error


def rank() -> int:
    """This process's rank, 0 <= rank < size()."""
    return world.current().rank


def size() -> int:
    """Number of ranks."""
    return world.current().size


def local_rank() -> int:
    """This process's position among the ranks of its host."""
    return world.current().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return world.current().local_size


def cross_rank() -> int:
    """This process's position among those with the same local rank, one of each host."""
    mine = world.current().local_rank
    return sum(local == mine for local, _ in world.current().places()[: rank()])


def cross_size() -> int:
    """Number of hosts that have a process with this one's local rank."""
    mine = world.current().local_rank
    return sum(local == mine for local, _ in world.current().places())


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    return len({size for _, size in world.current().places()}) == 1


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a process set part of the run, and returns it.

    Collective: every rank of the job calls it, members or not, for the same sets in one order.

    Args:
        process_set: The set, or its ranks. There must be no other of the same ranks.

    Raises:
        UsageError: On every rank: one rank's argument cannot be used, or there is such a set.
        MismatchError: On every rank: the ranks mean different sets.
    """
    return world.current().process_sets.add(process_set)[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Takes a process set out of the run. Collective, as `add_process_set`.

    Returns:
        False if it is the global one, or not part of the run.

    Raises:
        UsageError: On every rank: on one of them an operation of the set is in flight.
        MismatchError: On every rank: the ranks mean different sets.
    """
    return world.current().process_sets.remove(process_set)


def start_timeline(file_path: str, mark_cycles: bool = False, steps: str = "0:") -> None:
    """Records from each optimizer's next step on.

    Args:
        file_path: File to write, a Chrome trace that Perfetto opens. %r in the name stands for the
            rank; without it only rank 0 records, as with Horovod.
        mark_cycles: Horovod's; usbyte has no cycles to mark.
        steps: "A:B", half open, counted from the start of training.
    """
    if mark_cycles:
        log.warning("start_timeline: there are no cycles to mark, mark_cycles is left out")
    world.current().start_timeline(file_path, steps)


def stop_timeline() -> None:
    """Writes out what is complete and stops recording."""
    world.current().stop_timeline()


def gloo_built() -> bool:
    """True: Gloo moves everything that NCCL does not."""
    return True


def gloo_enabled() -> bool:
    """True, see `gloo_built`."""
    return True


def cuda_built() -> bool:
    """Whether usbyte's CUDA part was built."""
    return _core.cuda_info().built


def nccl_built() -> int:
    """NCCL's version, as 22703, if usbyte's CUDA part was built and NCCL can be opened; else 0."""
    if not cuda_built():
        return 0
    try:
        version = find(_core.Env.read(), several=False).version
    except Error:
        return 0
    major, minor, patch = map(int, version.split("."))
    return major * 10000 + minor * 100 + patch


def mpi_built() -> bool:
    """False: usbyte does not use MPI. `mpirun` can start its ranks all the same."""
    return False


def mpi_enabled() -> bool:
    """False, see `mpi_built`."""
    return False


def mpi_threads_supported() -> bool:
    """False, see `mpi_built`."""
    return False


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def rocm_built() -> bool:
    """False."""
    return False

# SPDX-License-Identifier: Apache-2.0
"""Ranks, process sets and timelines of the run, and the features of this build.

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

#: Base class of all exceptions of usbyte, under the name of Horovod's.
HorovodInternalError = Error


def rank() -> int:
    """Returns this process's rank, 0 <= rank < size()."""
    return world.current().rank


def size() -> int:
    """Returns the number of ranks.

    Examples:
        >>> import usbyte.torch as ub
        >>> ub.init()
        >>> ub.rank(), ub.size()  # of a single process
        (0, 1)
    """
    return world.current().size


def local_rank() -> int:
    """Returns this process's position among the ranks of its host, from 0 on."""
    return world.current().local_rank


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return world.current().local_size


def cross_rank() -> int:
    """Returns this process's position among the ranks with its local rank, one on each host."""
    mine = world.current().local_rank
    return sum(local == mine for local, _ in world.current().places()[: rank()])


def cross_size() -> int:
    """Returns the number of hosts that have a rank with this process's local rank."""
    mine = world.current().local_rank
    return sum(local == mine for local, _ in world.current().places())


def is_homogeneous() -> bool:
    """Returns whether all hosts have the same number of ranks."""
    return len({size for _, size in world.current().places()}) == 1


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a process set to the run and returns it.

    Collective: every rank of the job calls it, members and others, for the same sets in the same
    order.

    Args:
        process_set: A `ProcessSet`, or a list of ranks of the whole job. The run must not have
            another set of the same ranks.

    Returns:
        The `ProcessSet`, whose `process_set_id` is now set.

    Raises:
        UsageError: The argument of one rank cannot be used, or a set of the same ranks exists;
            raised on every rank.
        MismatchError: The ranks pass different sets; raised on every rank.
    """
    return world.current().process_sets.add(process_set)[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set from the run. Collective among all ranks, as `add_process_set`.

    Args:
        process_set: A set that `add_process_set` or `init` has added.

    Returns:
        False if the set is the global one or not part of the run; True otherwise.

    Raises:
        UsageError: On some rank an operation of the set is in flight; raised on every rank.
        MismatchError: The ranks pass different sets; raised on every rank.
    """
    return world.current().process_sets.remove(process_set)


def start_timeline(file_path: str, mark_cycles: bool = False, steps: str = "0:") -> None:
    """Starts recording a timeline, from the next step of each optimizer on.

    Args:
        file_path: File to write: a Chrome trace, which Perfetto opens. `%r` in the path is replaced
            by the rank. Without `%r` only rank 0 records, as with Horovod.
        mark_cycles: Horovod's; ignored with a warning, as usbyte has no cycles.
        steps: Range "A:B" of the steps to record, half-open, counted from the start of training.
            The default "0:" records all.
    """
    if mark_cycles:
        log.warning("start_timeline: mark_cycles is ignored: usbyte has no cycles")
    world.current().start_timeline(file_path, steps)


def stop_timeline() -> None:
    """Writes the completed part of the timeline and stops recording."""
    world.current().stop_timeline()


def gloo_built() -> bool:
    """Returns True: Gloo carries everything that NCCL does not."""
    return True


def gloo_enabled() -> bool:
    """Returns True, as `gloo_built`."""
    return True


def cuda_built() -> bool:
    """Returns whether usbyte was built with its CUDA part."""
    return _core.cuda_info().built


def nccl_built() -> int:
    """Returns NCCL's version as an integer, for example 22703 for 2.27.3.

    The result is 0 if usbyte was built without its CUDA part, or if NCCL cannot be loaded.
    """
    if not cuda_built():
        return 0
    try:
        version = find(_core.Env.read(), several=False).version
    except Error:
        return 0
    major, minor, patch = map(int, version.split("."))
    return major * 10000 + minor * 100 + patch


def mpi_built() -> bool:
    """Returns False: usbyte does not use MPI, but `mpirun` can start its ranks."""
    return False


def mpi_enabled() -> bool:
    """Returns False, as `mpi_built`."""
    return False


def mpi_threads_supported() -> bool:
    """Returns False, as `mpi_built`."""
    return False


def ddl_built() -> bool:
    """Returns False: usbyte does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Returns False: usbyte does not use Intel's oneCCL."""
    return False


def rocm_built() -> bool:
    """Returns False: usbyte has no ROCm part."""
    return False

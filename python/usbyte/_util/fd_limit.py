# SPDX-License-Identifier: Apache-2.0
"""The limit of open files, which includes connections, of this process."""

import resource

_OWN = 1024
# Each rank has a few connections to the job's store, and one to each other rank per process group.
_PER_RANK = 32


def allow_open_files(ranks: int) -> str:
    """Raises the soft limit of open files (`ulimit -Sn`) to what a process of the job may need.

    Args:
        ranks: Ranks of the job.

    Returns:
        A warning for the user if the hard limit keeps the soft limit too low; otherwise "".
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OWN + _PER_RANK * ranks
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # For example, fs.nr_open is below the hard limit.
        most = soft
    if most >= _PER_RANK * ranks:
        return ""
    return (
        f"a process may open {most} files and connections here, and in a job of {ranks} ranks it "
        f"may need {wanted}: raise the limit before it starts, as with ulimit -n"
    )

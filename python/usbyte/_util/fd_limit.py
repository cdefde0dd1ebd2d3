"""How many files, connections among them, this process may have open."""

import resource

_OWN = 1024
# Some connections of each rank to the job's store, and one to each other rank for each group.
_PER_RANK = 32


def allow_open_files(ranks: int) -> str:
    """Raises the soft limit, as `ulimit -Sn`, to what a job of so many ranks may need.

    Returns:
        A warning if the limit stays too low; else nothing.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OWN + _PER_RANK * ranks
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # as where fs.nr_open has been set below the hard limit
        most = soft
    if most >= _PER_RANK * ranks:
        return ""
    return (
        f"a process may open {most} files and connections here, and in a job of {ranks} ranks it "
        f"may need {wanted}: raise the limit before it starts, as with ulimit -n"
    )

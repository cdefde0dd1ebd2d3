"""Whether this process is part of the job that it is about to join."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from usbyte.env import JOB_KEY, Cluster, job_mark
from usbyte.errors import UsageError

_ABSENT = "this process has no USBYTE_JOB_TOKEN, which the launcher gave to the ranks of that job"
_OTHER = "its USBYTE_JOB_TOKEN is of another job"


def check_member(cluster: Cluster, token: str, timeout: timedelta) -> None:
    """Looks at the store of the rendezvous before the rendezvous counts this process.

    Args:
        cluster: This process's place, and where the store is.
        token: The job's, as the launcher gave it to this process; may be empty.
        timeout: For the store to be there.

    Raises:
        UsageError: The store is that of another job.
        RuntimeError: Nobody serves the store.
    """
    if cluster.source != "torchrun" or (cluster.rank == 0 and not token):
        return  # who is to serve a store finds none, and only the launcher leaves a mark there
    store = dist.TCPStore(
        cluster.master_addr,
        cluster.master_port,
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )
    found = store.get(JOB_KEY).decode() if store.check([JOB_KEY]) else ""
    if found != (job_mark(token) if token else ""):
        where = f"{cluster.master_addr}, port {cluster.master_port}"
        problem = _OTHER if token else _ABSENT
        raise UsageError(
            f"not part of the job at {where}: {problem}. Start it with usbyterun, and see that "
            "nothing keeps RANK, MASTER_ADDR or MASTER_PORT from an earlier job"
        )

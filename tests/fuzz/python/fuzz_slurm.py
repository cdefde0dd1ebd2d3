# SPDX-License-Identifier: Apache-2.0
"""Slurm's lists, alone and in the environment of a task."""

from usbyte import cluster_env, slurm
from usbyte.errors import Error

_NAMES = [
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "MASTER_PORT",
]
SEEDS = [
    b"gpu[01-03,7],login2\0002(x3),1\0005\0007\0001\0002",
    b"r[1-2]n[1-2]-ib\0004\0000\00016\0000\0000\00029500",
    b"a-1,b.example\0001(x2)\0001\0002\0000",
    b"n[1-4096]\0001(x4096)\0001\0002\0000",
    "n[\u0661-\u0663]\0\u0662(x3)\0\u0661".encode(),
]
# How messages end or begin; another ValueError is one that the parser did not expect.
_MESSAGES = ("not a list of ", "not a host list", "a host name", "the list has ", "[")


def one_input(data: bytes) -> None:
    """Reads the bytes as variables with zero bytes in between, as the kernel keeps them."""
    texts = data.decode(errors="surrogateescape").split("\0")
    environ = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
    environ |= dict(zip(_NAMES, texts, strict=False))
    try:
        cluster = cluster_env.detect(environ)
        local_size = cluster.local_size or cluster.size  # None where the launcher does not tell
        assert 0 <= (cluster.local_rank or 0) < local_size <= cluster.size <= cluster_env.MOST_RANKS
    except Error:
        pass
    for expand in (slurm.expand_hosts, slurm.expand_counts):
        try:
            expand(texts[0])
        except ValueError as error:
            if not str(error).startswith(_MESSAGES):
                raise

# SPDX-License-Identifier: Apache-2.0
"""The self-test: a real all_reduce of two new processes over loopback, by the public API."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO

from usbyte import cluster_env

# A -c script has the current folder on its path, which may have another usbyte.
_WORKER = """
import sys
sys.path = [folder for folder in sys.path if folder]
from usbyte.cli.doctor.selftest import worker
worker()
"""
_NUMEL = 1000


def run(timeout_s: float) -> str:
    """Runs the two processes.

    Args:
        timeout_s: Seconds for both processes; they are killed at its end.

    Returns:
        The error, or "" for success.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        processes = []
        for rank, output in enumerate(outputs):
            process = subprocess.Popen(
                [sys.executable, "-c", _WORKER],
                env=_environ(rank, port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            processes.append(stack.enter_context(process))  # Its exit waits for the process.
            stack.callback(process.kill)
        return _wait(processes, outputs, timeout_s)


def worker() -> None:
    """Runs one process of the self-test; exits with an error if the sum is wrong."""
    import torch

    import usbyte.torch as ub

    ub.init()
    mine = torch.arange(_NUMEL, dtype=torch.float32, device="cpu") + ub.rank()
    total = ub.allreduce(mine, op=ub.Sum)
    expected = 2 * mine - 2 * ub.rank() + 1
    wrong = int((total != expected).sum())
    if wrong:
        sys.exit(f"all_reduce gave {wrong} wrong numbers of {_NUMEL}")
    ub.shutdown()


def _environ(rank: int, port: int) -> dict[str, str]:
    cluster = cluster_env.Cluster(rank, 2, rank, 2, "127.0.0.1", port, "torchrun")
    inherited = cluster_env.environ_of(cluster)
    # Without the user's variables, which the doctor checks separately: this tests the installation.
    clean = {name: text for name, text in inherited.items() if not name.startswith("USBYTE_")}
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    clean |= {"USBYTE_BACKEND": "gloo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return clean | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[IO[bytes]], timeout_s: float
) -> str:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            return f"rank {failed[0]} failed: {_tail(outputs[failed[0]])}"
        if None not in codes:
            return ""
        time.sleep(0.02)
    return f"no result within {timeout_s:g} s; rank 0 said: {_tail(outputs[0]) or 'nothing'}"


def _tail(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-3:])

# SPDX-License-Identifier: Apache-2.0
"""Options of horovodrun, torchrun and mpirun, and what usbyterun has instead."""

from __future__ import annotations

import click

from usbyte._util.click_command import StdoutErrorCommand

_PLANNED = "leave it out: usbyte plans what travels together"
_HOSTS = "leave it out: hosts and slots are those of -H or --hostfile"
_RENDEZVOUS = (
    "leave it out: usbyterun starts the ranks of all hosts of -H itself; to start each host by "
    "hand, use torchrun"
)

#: What to use in place of an option, by its name.
REMEDIES = {
    "-n": "use -np N",
    "--np": "use -np N",
    "--nproc-per-node": "use -np N, or -H HOST:SLOTS,... for several hosts",
    "--nproc_per_node": "use -np N, or -H HOST:SLOTS,... for several hosts",
    "--node-rank": _RENDEZVOUS,
    "--node_rank": _RENDEZVOUS,
    "--master-addr": _RENDEZVOUS,
    "--master_addr": _RENDEZVOUS,
    "--master-port": _RENDEZVOUS,
    "--master_port": _RENDEZVOUS,
    "--rdzv-backend": _RENDEZVOUS,
    "--rdzv-endpoint": _RENDEZVOUS,
    "--rdzv-id": _RENDEZVOUS,
    "--standalone": "leave it out: without -H all ranks run on this host",
    "--check-build": "use: usbyte doctor",
    "--min-np": "use --nnodes MIN:MAX, which counts hosts, with --max-restarts N",
    "--max-np": "use --nnodes MIN:MAX, which counts hosts, with --max-restarts N",
    "--min-num-proc": "use --nnodes MIN:MAX, which counts hosts, with --max-restarts N",
    "--max-num-proc": "use --nnodes MIN:MAX, which counts hosts, with --max-restarts N",
    "--reset-limit": "use --max-restarts N",
    "--host-discovery-script": _HOSTS,
    "--slots-per-host": _HOSTS,
    "--fusion-threshold-mb": _PLANNED,
    "--cycle-time-ms": _PLANNED,
    "--cache-capacity": _PLANNED,
    "--hierarchical-allgather": _PLANNED,
    "--autotune": _PLANNED,
    "--hierarchical-allreduce": "use --env USBYTE_TOPOLOGY=hosts",
    "--stall-check-warning-time-seconds": "use --env USBYTE_STALL_WARNING_S=SECONDS",
    "--stall-check-shutdown-time-seconds": "use --env USBYTE_STALL_LIMIT_S=SECONDS",
    "--mpi": "use mpirun or srun in place of usbyterun",
    "--mpi-args": "use mpirun or srun in place of usbyterun",
    "--binding-args": "use mpirun or srun in place of usbyterun",
    "--jsrun": "use mpirun or srun in place of usbyterun",
    "-x": "use --env NAME=VALUE",
}


class LauncherCommand(StdoutErrorCommand):
    """A command that says what to use in place of other launchers' options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the command line as `click.Command.parse_args` does."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            remedy = REMEDIES.get(error.option_name)
            if remedy is None:
                raise
            raise click.UsageError(f"usbyterun has no {error.option_name}; {remedy}", ctx) from None

# SPDX-License-Identifier: Apache-2.0
"""The command line of usbyterun."""

import os
import re
import shlex
import signal
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import click

from usbyte._util.fd_limit import allow_open_files
from usbyte.launch import hosts, process_tree
from usbyte.launch.foreign_options import LauncherCommand
from usbyte.launch.job import Job, Ssh
from usbyte.launch.live_area import rank_env
from usbyte.launch.output import Output
from usbyte.launch.restarts import Pool, RestartPolicy

_LONGEST_S = 7 * 86400.0
_MOST_RESTARTS = 1_000_000
# Variables that usbyterun sets itself for each rank, so that --env cannot.
_RANK_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|USBYTE_JOB_TOKEN)"
)
_LOG_LEVELS = ("debug", "info", "warning", "error")

_EXAMPLES = """\b
Examples:
  usbyterun -np 4 python train.py --lr 0.1
  usbyterun -np 4 -H a:2,b:2 --network-interface eth0 python train.py
  usbyterun -H a:2,b:2,c:2 --nnodes 2:3 --max-restarts 5 python train.py --resume
"""


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        try:
            click.echo(f"usbyterun {metadata.version('usbyte')}")
        except metadata.PackageNotFoundError:
            click.echo("usbyterun (not installed)")
        context.exit()


def _parse_nodes(_: click.Context, __: click.Parameter, text: str | None) -> range | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    counts = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    if not counts or counts[0] < 1:
        raise click.BadParameter(f"{text[:60]!r} is not MIN:MAX with 1 <= MIN <= MAX")
    return counts


def _parse_timeout(_: click.Context, __: click.Parameter, seconds: float) -> float:
    if not 0 < seconds <= _LONGEST_S:
        raise click.BadParameter(f"{seconds:g} is not above 0 and up to {_LONGEST_S:g} seconds")
    return seconds


def _parse_env(_: click.Context, __: click.Parameter, items: tuple[str, ...]) -> dict[str, str]:
    env = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{item!r} is not of the form NAME=VALUE")
        if _RANK_VARIABLES.fullmatch(name):
            raise click.BadParameter(f"{name} is set by usbyterun for each rank; leave it out")
        env[name] = value
    return env


@click.command(
    cls=LauncherCommand,
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "max_content_width": 100,
    },
    epilog=_EXAMPLES,
)
@click.option(
    "-np",
    "--num-proc",
    "ranks",
    type=click.IntRange(1, hosts.MOST_RANKS),
    metavar="N",
    help="Ranks to start.  [default: as many as the hosts have slots]",
)
@click.option(
    "-H",
    "--hosts",
    "host_list",
    metavar="HOST:SLOTS,...",
    help="Hosts and how many ranks each may run; slots are filled in this order. Hosts other than "
    "this one are reached over ssh.  [default: this host]",
)
@click.option(
    "-hostfile",
    "--hostfile",
    "hostfile",
    type=click.Path(path_type=Path),
    help="File with a line 'HOST slots=N' or 'HOST:N' for each host, in place of -H.",
)
@click.option(
    "-p",
    "--ssh-port",
    type=click.IntRange(1, 65535),
    help="Port of the hosts' sshd.  [default: ssh's own]",
)
@click.option(
    "-i",
    "--ssh-identity-file",
    "identity",
    type=click.Path(exists=True, dir_okay=False),
    help="Private key for ssh.  [default: ssh's own]",
)
@click.option(
    "--ssh-options",
    default="",
    show_default=False,
    metavar="TEXT",
    help="More options for ssh, as in a shell; they win over usbyterun's.",
)
@click.option(
    "--remote-python",
    default=sys.executable,
    metavar="PATH",
    show_default="the one that runs usbyterun",
    help="Python on the other hosts; usbyte must be installed for it.",
)
@click.option(
    "--network-interface",
    "--network-interfaces",
    "interface",
    metavar="IF",
    help="Network interface that connects the hosts; sets GLOO_SOCKET_IFNAME and "
    "NCCL_SOCKET_IFNAME.  [default: loopback for one host, else the backends' own choice]",
)
@click.option(
    "--output-filename",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also write each rank's output to DIR/rank.N/stdout and DIR/rank.N/stderr.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0, _MOST_RESTARTS),
    default=0,
    metavar="N",
    help="Restart all ranks, up to N times, when a rank fails or a host is lost; the program must "
    "load its own checkpoint.",
)
@click.option(
    "--nnodes",
    metavar="MIN:MAX",
    callback=_parse_nodes,
    help="Run on MIN to MAX of the hosts, as many as can be reached, with a rank on each of their "
    "slots; the next restart leaves out a host that is lost.  [default: all hosts]",
)
@click.option(
    "--start-timeout",
    type=float,
    default=30.0,
    callback=_parse_timeout,
    metavar="S",
    help="Seconds until all hosts must be ready.",
)
@click.option(
    "--timeline",
    "--timeline-filename",
    "timeline",
    metavar="FILE",
    help="Write usbyte's timeline to FILE; sets USBYTE_TIMELINE. %r in the name stands for the "
    "rank; without it, only rank 0 writes a timeline.",
)
@click.option(
    "--env",
    multiple=True,
    callback=_parse_env,
    metavar="NAME=VALUE",
    help="Set a variable for every rank. May be repeated.",
)
@click.option(
    "--log-level",
    type=click.Choice(_LOG_LEVELS, case_sensitive=False),
    help="Lowest severity that usbyte logs; sets USBYTE_LOG_LEVEL.",
)
@click.option("--gloo", is_flag=True, hidden=True, expose_value=False)  # horovodrun has it.
@click.option("--verbose", is_flag=True, help="Show which ranks run where and the ssh commands.")
@click.option(
    "-v",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(
    ranks: int | None,
    host_list: str | None,
    hostfile: Path | None,
    ssh_port: int | None,
    identity: str | None,
    ssh_options: str,
    remote_python: str,
    interface: str | None,
    directory: Path | None,
    max_restarts: int,
    nnodes: range | None,
    start_timeout: float,
    timeline: str | None,
    env: dict[str, str],
    log_level: str | None,
    verbose: bool,
    command: tuple[str, ...],
) -> None:
    """Start COMMAND as the ranks of one distributed job, here and on other hosts.

    Each line of a rank's output is shown with the rank in front. When a rank fails, usbyterun ends
    all others; with --max-restarts it then restarts all ranks. It exits with the code of the first
    rank that failed, or with 128 + n if signal n killed that rank.

    Ranks run in the current directory. As under torchrun, RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. Ranks on other hosts also get the
    variables USBYTE_*, NCCL_*, GLOO_*, OMP_NUM_THREADS and PYTHONPATH of this shell.
    """
    process_tree.open_standard_descriptors()
    if not command[0]:
        raise click.UsageError(
            "COMMAND is empty; name a program, as in: usbyterun -np 2 python a.py"
        )
    knobs = {"USBYTE_TIMELINE": timeline, "USBYTE_LOG_LEVEL": log_level}
    pool = _pool(ranks, host_list, hostfile, nnodes)
    job = Job(
        command=list(command),
        env={**rank_env(pool.size), **{name: text for name, text in knobs.items() if text}, **env},
        cwd=_current_directory(),
        interface=interface,
        start_timeout=start_timeout,
        ssh=Ssh(ssh_port, identity, _split(ssh_options)),
        remote_python=remote_python,
        max_restarts=max_restarts,
    )
    if warning := allow_open_files(pool.size):
        click.echo(f"usbyterun: {warning}", err=True)
    process_tree.adopt_orphans()
    wake = process_tree.SignalWake(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        output = Output(pool.size, wake.fd, directory)
    except OSError as error:
        raise click.ClickException(f"--output-filename: {error}") from error
    code = RestartPolicy(job, pool, output, wake, verbose).run()
    output.close()
    sys.exit(code)


def _pool(
    ranks: int | None, host_list: str | None, hostfile: Path | None, nnodes: range | None
) -> Pool:
    # An empty -H comes from an unset shell variable, and must not mean this host.
    if host_list is not None and hostfile:
        raise click.UsageError("-H and --hostfile exclude each other; give one of them")
    if nnodes and ranks:
        raise click.UsageError(
            "--nnodes and -np exclude each other: with --nnodes, each slot of a host has a rank; "
            "leave out -np"
        )
    try:
        if host_list is not None:
            given = hosts.parse_hosts(host_list)
        elif hostfile:
            given = hosts.parse_hostfile(hostfile)
        elif ranks:
            given = hosts.this_host(ranks)
        else:
            raise click.UsageError("say how many ranks to start (-np) or on which hosts (-H)")
        counts = nnodes or range(len(given), len(given) + 1)
        return Pool(given, ranks, least=counts[0], most=counts[-1])
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _split(ssh_options: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(ssh_options))
    except ValueError as error:
        raise click.UsageError(f"--ssh-options: {error}") from error


def _current_directory() -> str:
    """Returns the current directory as the shell names it, in PWD.

    Behind an automounter or a symbolic link, the other hosts may have only that name.
    """
    name = os.environ.get("PWD", "")
    with suppress(OSError):
        if name and os.path.samefile(name, "."):
            return name
    try:
        return os.getcwd()
    except OSError as error:
        message = f"the current directory cannot be used: {error.strerror}; change to another"
        raise click.UsageError(message) from error

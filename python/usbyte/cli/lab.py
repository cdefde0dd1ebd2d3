"""`usbyte lab`: an emulated cluster on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from usbyte import units
from usbyte.cli.options import Parsed

if TYPE_CHECKING:
    from usbyte.lab.netns import Lab

_EXAMPLES = """\b
Example:
  usbyte lab up --hosts 4 --rate 1gbit
  usbyte lab run -- python train.py
  usbyte lab rate 200mbit
  usbyte lab down
"""
_NAME = click.option(
    "--name", default="usbyte", show_default=True, help="Labs of other names are left alone."
)


def _rate(text: str) -> float:
    return float("inf") if text == "unlimited" else units.parse_rate(text)


_RATE = Parsed("rate", _rate)


@click.group(epilog=_EXAMPLES)
def lab() -> None:
    """Emulate a cluster on this machine.

    Hosts are network namespaces whose links have a given rate. Each has its own share of this
    machine's cores; with fewer cores than hosts, some share a core. Needs Linux, root, iproute2 and
    util-linux.
    """


@lab.command()
@click.option("--hosts", type=click.IntRange(1, 250), default=4, show_default=True)
@click.option(
    "--rate",
    type=_RATE,
    default="unlimited",
    show_default=True,
    help="Of each link in each direction, such as 1gbit.",
)
@click.option(
    "--congestion", metavar="NAME",
    help="TCP's congestion control, such as cubic; by default this system's.",
)  # fmt: skip
@_NAME
def up(hosts: int, rate: float, congestion: str | None, name: str) -> None:
    """Start the cluster."""
    _lab(name).up(hosts, _shaped(rate), congestion)
    click.echo(f"lab '{name}': {hosts} hosts, {_rate_text(rate)}")


@lab.command(context_settings={"allow_interspersed_args": False})
@_NAME
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(name: str, command: tuple[str, ...]) -> None:
    """Run COMMAND, one rank on each host, on its cores.

    Ranks that share a core run as batch jobs (chrt --batch), since hosts of a cluster do not
    interrupt each other; there, what benchmarks/compare.py computes gives way to communication.
    Ranks get torchrun's environment, and their lines are shown with the rank in front. The first
    rank that fails ends all others, and its exit code is this command's.
    """
    _lab(name).run(command)


@lab.command()
@click.argument("rate", type=_RATE)
@_NAME
def rate(rate: float, name: str) -> None:
    """Give the links another RATE.

    RATE is for example 200mbit or unlimited. Ranks that run go on.
    """
    _lab(name).rate(_shaped(rate))
    click.echo(f"lab '{name}': {_rate_text(rate)}")


@lab.command()
@_NAME
def status(name: str) -> None:
    """Show the hosts, their rates, and what runs in them.

    The exit status is 1 if the cluster is not up.
    """
    from rich.console import Console
    from rich.table import Table

    hosts = _lab(name).status()
    if not hosts:
        click.echo(f"lab '{name}' is not up")
        raise SystemExit(1)
    table = Table("host", "address", "rate", "processes", title=f"lab '{name}'")
    for host in hosts:
        shaping = _rate_text(host.bytes_per_s or float("inf"))
        table.add_row(host.namespace, host.address, shaping, " ".join(map(str, host.pids)))
    Console().print(table)


@lab.command()
@click.option("--kill", is_flag=True, help="Also end what still runs in it.")
@_NAME
def down(kill: bool, name: str) -> None:
    """Remove the cluster."""
    _lab(name).down(kill)
    click.echo(f"lab '{name}' is gone")


def _lab(name: str) -> Lab:
    from usbyte.lab.netns import Lab

    return Lab(name)


def _shaped(rate: float) -> float | None:
    return None if rate == float("inf") else rate


def _rate_text(rate: Any) -> str:
    return "unlimited" if rate == float("inf") else units.format_rate(rate)

"""`usbyte lab`: an emulated cluster on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from usbyte._util import units
from usbyte.cli._options import Parsed

if TYPE_CHECKING:
    from usbyte.lab.netns import Lab

_EXAMPLES = """\b
Example:
  usbyte lab up --hosts 4 --rate 1gbit
  usbyte lab run -- python train.py
  usbyte lab rate 200mbit
  usbyte lab down
  usbyte lab up --topology 2x2:10gbit,1gbit
"""
_LEAST_RATE = 1e3  # bytes/s; of less, tc makes nothing that TCP gets through
_NAME = click.option(
    "--name", default="usbyte", show_default=True, help="Labs of other names are left alone."
)


def _rate(text: str) -> float:
    rate = float("inf") if text == "unlimited" else units.parse_rate(text)
    if rate < _LEAST_RATE:
        raise ValueError(
            f"{text!r}: links of the lab carry {units.format_rate(_LEAST_RATE)} at least"
        )
    return rate


def _rates(text: str) -> list[float]:
    return [_rate(each) for each in text.split(",")]


def _topology(text: str) -> tuple[list[int], list[float]]:
    """Sizes and rates by dimension of "2x2:10gbit,1gbit"."""
    sizes, _, rates = text.partition(":")
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", sizes):
        raise ValueError(
            f"{text!r} is no topology; write hosts in each dimension, the innermost first, and "
            "their links' rates, such as 2x2:10gbit,1gbit"
        )
    return [int(size) for size in sizes.split("x")], _rates(rates or "unlimited")


_RATES = Parsed("rate", _rates)


@click.group(epilog=_EXAMPLES)
def lab() -> None:
    """Emulate a cluster on this machine.

    Hosts are network namespaces whose links have a given rate. A lab of several dimensions
    (--topology) has an interface for each at every host. Each has its own share of this
    machine's cores; with fewer cores than hosts, some share a core. Needs Linux, root, iproute2 and
    util-linux.
    """


@lab.command()
@click.option("--hosts", type=click.IntRange(1, 250), help="How many; 4 if nothing is given.")
@click.option(
    "--rate",
    type=_RATES,
    help="Of each link in each direction, such as 1gbit; unlimited if nothing is given.",
)
@click.option(
    "--topology",
    type=Parsed("topology", _topology),
    metavar="SIZES:RATES",
    help="Dimensions instead, the innermost first: 2x2:10gbit,1gbit is two nodes of two ranks.",
)
@click.option(
    "--congestion", metavar="NAME",
    help="TCP's congestion control, such as cubic; by default this system's.",
)  # fmt: skip
@_NAME
def up(
    hosts: int | None,
    rate: list[float] | None,
    topology: tuple[list[int], list[float]] | None,
    congestion: str | None,
    name: str,
) -> None:
    """Start the cluster."""
    if topology is not None and (hosts, rate) != (None, None):
        raise click.UsageError("--topology tells hosts and rates: leave out --hosts and --rate")
    sizes, rates = topology or ([hosts or 4], rate or [float("inf")])
    _lab(name).up(sizes, _shaped(rates), congestion)
    click.echo(f"lab '{name}': {'x'.join(map(str, sizes))} hosts, {_rate_text(rates)}")


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
@click.argument("rate", type=_RATES)
@_NAME
def rate(rate: list[float], name: str) -> None:
    """Give the links another RATE.

    RATE is for example 200mbit or unlimited, or one for each dimension, as 10gbit,1gbit. Ranks that
    run go on.
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
        shaping = _rate_text([each or float("inf") for each in host.bytes_per_s])
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


def _shaped(rates: Sequence[float]) -> float | list[float | None] | None:
    """One for all dimensions, or one for each."""
    found = [None if rate == float("inf") else rate for rate in rates]
    return found[0] if len(found) == 1 else found


def _rate_text(rates: Iterable[Any]) -> str:
    return ", ".join(
        "unlimited" if rate == float("inf") else units.format_rate(rate) for rate in rates
    )

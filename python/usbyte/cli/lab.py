# SPDX-License-Identifier: Apache-2.0
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
_LEAST_RATE = 1e3  # Bytes/s. At a lower rate of tc, TCP transfers nothing.
_NAME = click.option("--name", default="usbyte", show_default=True, help="Name of the lab.")


def _rate(text: str) -> float:
    rate = float("inf") if text == "unlimited" else units.parse_rate(text)
    if rate < _LEAST_RATE:
        raise ValueError(
            f"{text!r} is too slow; a link of the lab needs {units.format_rate(_LEAST_RATE)} or "
            "more"
        )
    return rate


def _rates(text: str) -> list[float]:
    return [_rate(each) for each in text.split(",")]


def _topology(text: str) -> tuple[list[int], list[float]]:
    """Returns the sizes and the rates of the dimensions of "2x2:10gbit,1gbit"."""
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

    Hosts are network namespaces whose links have a given rate. In a lab of several dimensions
    (--topology), every host has an interface for each dimension. Each host has its own share of
    this machine's cores; with fewer cores than hosts, hosts share cores. Needs Linux, root,
    iproute2 and util-linux.
    """


@lab.command()
@click.option("--hosts", type=click.IntRange(1, 250), show_default="4", help="Number of hosts.")
@click.option(
    "--rate",
    type=_RATES,
    show_default="unlimited",
    help="Rate of each link in each direction, such as 1gbit.",
)
@click.option(
    "--topology",
    type=Parsed("topology", _topology),
    metavar="SIZES:RATES",
    help="Sizes and rates of the dimensions, innermost first, in place of --hosts and --rate: "
    "2x2:10gbit,1gbit is two machines of two ranks.",
)
@click.option(
    "--congestion", metavar="NAME",
    show_default="the system's", help="TCP's congestion control, such as cubic.",
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
        raise click.UsageError("--topology sets hosts and rates: leave out --hosts and --rate")
    sizes, rates = topology or ([hosts or 4], rate or [float("inf")])
    _lab(name).up(sizes, _shaped(rates), congestion)
    click.echo(f"lab '{name}': {'x'.join(map(str, sizes))} hosts, {_rate_text(rates)}")


@lab.command(context_settings={"allow_interspersed_args": False})
@_NAME
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(name: str, command: tuple[str, ...]) -> None:
    """Run COMMAND with one rank on each host, on the host's cores.

    Ranks that share a core run as batch jobs (chrt --batch), since hosts of a real cluster do not
    interrupt each other. On such a core, the compute of benchmarks/compare.py yields to
    communication. Ranks get torchrun's environment. Each line of their output is shown with the
    rank in front. The first rank that fails ends all others, and its exit code is that of this
    command.
    """
    _lab(name).run(command)


@lab.command()
@click.argument("rate", type=_RATES)
@_NAME
def rate(rate: list[float], name: str) -> None:
    """Set the rate of the links to RATE.

    RATE is for example 200mbit or unlimited, or one rate for each dimension, such as 10gbit,1gbit.
    Running ranks continue.
    """
    _lab(name).rate(_shaped(rate))
    click.echo(f"lab '{name}': {_rate_text(rate)}")


@lab.command()
@_NAME
def status(name: str) -> None:
    """Show the hosts, their rates and their processes.

    The exit status is 1 if the lab is not up.
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
@click.option("--kill", is_flag=True, help="Kill the processes that still run in it.")
@_NAME
def down(kill: bool, name: str) -> None:
    """Remove the cluster."""
    _lab(name).down(kill)
    click.echo(f"lab '{name}' is gone")


def _lab(name: str) -> Lab:
    from usbyte.lab.netns import Lab

    return Lab(name)


def _shaped(rates: Sequence[float]) -> float | list[float | None] | None:
    """Converts rates for `Lab`: one for all dimensions, or one for each; None: no shaping."""
    found = [None if rate == float("inf") else rate for rate in rates]
    return found[0] if len(found) == 1 else found


def _rate_text(rates: Iterable[Any]) -> str:
    return ", ".join(
        "unlimited" if rate == float("inf") else units.format_rate(rate) for rate in rates
    )

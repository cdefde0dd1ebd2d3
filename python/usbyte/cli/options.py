"""What the options of several commands have in common.

Importing this needs neither the extension nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from usbyte import units

if TYPE_CHECKING:
    from usbyte import _core

_F = TypeVar("_F", bound=Callable[..., Any])


class Parsed(click.ParamType):
    """A value that a function makes of its text; the function's ValueError is the message."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Leaves alone what is no text: defaults that are values already."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Parses values separated by commas; there may be none."""
    return lambda text: [parse(part.strip()) for part in text.split(",") if part.strip()]


BYTES = Parsed("bytes", units.parse_bytes)
RATE = Parsed("rate", units.parse_rate)
SECONDS = Parsed("time", units.parse_seconds)


def parse_scheme(text: str) -> tuple[str, str]:
    """Overlap and policy of "backward:ddp"; "auto" alone means "forward:auto".

    Raises:
        ValueError: There is no such overlap or policy.
    """
    from usbyte import tuning

    first, colon, second = text.strip().partition(":")
    alone = not colon or text.strip() in tuning.POLICIES  # "tune:dear" names no overlap
    overlap, policy = ("forward", text.strip()) if alone else (first, second)
    if overlap not in ("forward", "backward"):
        raise ValueError(f"{text!r}: unknown overlap {overlap!r}; write forward or backward")
    if policy not in tuning.policies():
        known = ", ".join(tuning.policies())
        raise ValueError(f"{text!r}: unknown policy {policy!r}; known are {known}")
    return overlap, policy


def all_schemes() -> list[tuple[str, str]]:
    """Every policy with forward overlap but the tuned ones, which take long; and what DDP does."""
    from usbyte import _core

    return [*(("forward", policy) for policy in _core.policies()), ("backward", "ddp")]


def parse_ring(text: str) -> _core.NetworkModel:
    """The network of "8,25us,10gbit": ranks, latency of a message, bandwidth of a link.

    Raises:
        ValueError: It is not three such values.
    """
    from usbyte import _core

    parts = text.split(",")
    if len(parts) != 3 or not parts[0].strip().isdecimal() or int(parts[0]) < 1:
        raise ValueError(f"{text!r} is no ring; write RANKS,LATENCY,BANDWIDTH, as in 8,25us,10gbit")
    latency_s, rate = units.parse_seconds(parts[1]), units.parse_rate(parts[2])
    return _core.NetworkModel.ring(int(parts[0]), latency_s, rate)


def network_options(command: _F) -> _F:
    """Adds --network and --ring; see `network`."""
    command = click.option(
        "--ring",
        type=Parsed("ring", parse_ring),
        metavar="RANKS,LATENCY,BANDWIDTH",
        help="A network of ring collectives, such as 8,25us,10gbit.",
    )(command)
    return click.option(
        "--network",
        "network_path",
        type=click.Path(path_type=Path),
        metavar="NETWORK.json",
        help="A measured network.",
    )(command)


def network(path: Path | None, ring: _core.NetworkModel | None) -> _core.NetworkModel:
    """The network of the options --network and --ring.

    Raises:
        UsageError: None or both are given.
    """
    if path is not None and ring is None:
        return read_network(path)
    if ring is not None and path is None:
        return ring
    raise click.UsageError("give the network as --network NETWORK.json or as --ring, not both")


def scale_options(command: _F) -> _F:
    """Adds --scale-time and --scale-bytes, the factors of `usbyte.lab.profiles.scaled`."""
    command = click.option("--scale-bytes", default=1.0, help="Factor of all tensor sizes.")(
        command
    )
    return click.option("--scale-time", default=1.0, help="Factor of all times.")(command)


def read_network(path: Path) -> _core.NetworkModel:
    """Reads a network from JSON."""
    from usbyte import _core

    return _core.NetworkModel.from_json(read_text(path, "network"))


def read_text(path: Path, what: str) -> str:
    """The text of a file, or a message that says what the file was to be."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot read the {what} '{path}': {error}") from error


def check_writable(*paths: Path | None) -> None:
    """Says before long work that a file could not be written after it."""
    for path in paths:
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise _unwritable(path, "not writable")


def write_text(path: Path, text: str) -> None:
    """Writes a file, or ends with a message."""
    try:
        path.write_text(text)
    except OSError as error:
        raise _unwritable(path, str(error.strerror)) from error


def _unwritable(path: Path, why: str) -> click.ClickException:
    return click.ClickException(
        f"cannot write '{path}': {why}; name a file in a folder that exists and is writable"
    )

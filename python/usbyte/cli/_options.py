# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, with their parsers.

An import of this module needs neither the C++ core nor torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from usbyte._util import files, units
from usbyte.launch.hosts import MOST_RANKS

if TYPE_CHECKING:
    from rich.console import Console

    from usbyte import _core

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

#: A ring has one cost line, so how the startups of concurrent ops combine is an assumption.
SERIAL_HELP = (
    "By default, the startups of operations in flight overlap, as on separate connections, which "
    "favours policies with several operations in flight; serial: startups follow each other, as on "
    "one connection or one NCCL stream."
)


_MAX_WORKERS = 4096


class Parsed(click.ParamType):
    """A click type that parses text with a function; its ValueError becomes the error message."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses text; returns other values, which are defaults, unchanged."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Returns a parser of values separated by commas; the list may be empty."""
    return lambda text: [parse(part.strip()) for part in text.split(",") if part.strip()]


BYTES = Parsed("bytes", units.parse_bytes)
RATE = Parsed("rate", units.parse_rate)
SECONDS = Parsed("time", units.parse_seconds)


class PolicySpec(NamedTuple):
    """An overlap mode and a policy.

    Attributes:
        mode: The overlap, "forward" or "backward"; "sharded" is forward with a sharded optimizer.
        policy: Name of the policy.
    """

    mode: str
    policy: str

    def __str__(self) -> str:
        return f"{self.mode}:{self.policy}"

    @property
    def overlap(self) -> str:
        """The overlap: "backward" or "forward"."""
        return "backward" if self.mode == "backward" else "forward"

    @property
    def sharded(self) -> bool:
        """Whether each rank updates only its shard of the parameters."""
        return self.mode == "sharded"


def parse_policy_spec(text: str) -> PolicySpec:
    """Parses "backward:ddp" or "sharded:dear"; "auto" alone means "forward:auto".

    Raises:
        ValueError: The mode or the policy is unknown, or the policy does not support a sharded
            optimizer.
    """
    from usbyte.errors import UsageError
    from usbyte.planning import tuning

    first, colon, second = text.strip().partition(":")
    alone = not colon or text.strip() in tuning.TUNED  # "tune:dear" has no overlap in it.
    mode, policy = ("forward", text.strip()) if alone else (first, second)
    if mode not in ("forward", "backward", "sharded"):
        raise ValueError(
            f"{text!r}: unknown overlap {mode!r}; write forward, backward or sharded (forward with "
            "a sharded optimizer)"
        )
    try:
        policy = tuning.known_policy(policy)
    except UsageError as error:
        raise ValueError(f"{text!r}: {error}") from error
    if mode == "sharded" and policy not in tuning.SHARDING:
        raise ValueError(
            f"{text!r}: {policy} does not support a sharded optimizer; write one of "
            f"{', '.join(tuning.SHARDING)}"
        )
    return PolicySpec(mode, policy)


def parse_workers(text: str) -> int:
    """Parses the number of ranks of a simulated network.

    Raises:
        ValueError: The number is not from 2 to 4096.
    """
    workers = int(text) if re.fullmatch("[0-9]{1,9}", text) else 0
    if not 2 <= workers <= _MAX_WORKERS:
        raise ValueError(f"{text!r}: write 2 to {_MAX_WORKERS} workers")
    return workers


def all_policy_specs() -> list[PolicySpec]:
    """Returns all untuned policies with forward overlap, and backward:ddp, which is DDP.

    Tuned policies take long, so they are left out.
    """
    from usbyte import _core

    return [
        *(PolicySpec("forward", policy) for policy in _core.policies()),
        PolicySpec("backward", "ddp"),
    ]


def overlap_options(command: _F) -> _F:
    """Adds --overlap and --shard-optimizer."""
    command = click.option(
        "--shard-optimizer",
        "sharded",
        is_flag=True,
        help="Each rank updates a shard, and the next forward gathers the parameters.",
    )(command)
    return click.option(
        "--overlap",
        type=click.Choice(["forward", "backward"]),
        default="forward",
        help="Overlap communication with backward, or with backward and the next forward.",
    )(command)


def parse_ring(text: str) -> _core.NetworkModel:
    """Parses "8,25us,10gbit": ranks, latency of a message, bandwidth of a link.

    With a fourth value "serial", only one op at a time starts up, as `SERIAL_HELP` says.

    Raises:
        ValueError: The text does not have this form, or there are not 1 to `MOST_RANKS` ranks.
    """
    from usbyte import _core

    parts = text.split(",")
    serial = [part.strip() for part in parts[3:]] == ["serial"]
    ranks = int(parts[0]) if re.fullmatch(r"\s*[0-9]{1,9}\s*", parts[0]) else 0
    if len(parts) != 3 + serial or not 1 <= ranks <= MOST_RANKS:
        raise ValueError(
            f"{text!r} is no ring; write RANKS,LATENCY,BANDWIDTH, as in 8,25us,10gbit, or the same "
            f"with ,serial behind it; there are 1 to {MOST_RANKS} ranks"
        )
    latency_s, rate = units.parse_seconds(parts[1]), units.parse_rate(parts[2])
    return _core.NetworkModel.ring(ranks, latency_s, rate, int(serial))


def network_options(command: _F) -> _F:
    """Adds --network and --ring, whose values `network` turns into a network model."""
    command = click.option(
        "--ring",
        type=Parsed("ring", parse_ring),
        metavar="RANKS,LATENCY,BANDWIDTH[,serial]",
        help=f"A network of ring collectives, such as 8,25us,10gbit. {SERIAL_HELP}",
    )(command)
    return click.option(
        "--network",
        "network_path",
        type=click.Path(path_type=Path),
        metavar="NETWORK.json",
        help="A measured network, written by usbyte probe --json.",
    )(command)


def network(path: Path | None, ring: _core.NetworkModel | None) -> _core.NetworkModel:
    """Returns the network model of the options --network and --ring.

    Raises:
        UsageError: Neither or both options are given.
    """
    if path is not None and ring is not None:
        raise click.UsageError("--network and --ring both give the network: leave out one of them")
    if path is not None:
        return read_network(path)
    if ring is not None:
        return ring
    raise click.UsageError(
        "a network is missing: add --ring RANKS,LATENCY,BANDWIDTH, such as --ring 8,25us,10gbit, "
        "or --network NETWORK.json, a file that usbyte probe --json writes"
    )


def scale_options(command: _F) -> _F:
    """Adds --scale-time and --scale-bytes, the factors of `usbyte.planning.profiles.scaled`."""
    command = click.option("--scale-bytes", default=1.0, help="Factor of all tensor sizes.")(
        command
    )
    return click.option("--scale-time", default=1.0, help="Factor of all times.")(command)


def print_recorded(console: Console, sources: Sequence[str], scale_time: float) -> None:
    """Says of named profiles that they are of a CPU, unless their times are scaled."""
    from usbyte.planning import profiles

    for source in sources:
        if source in profiles.RECORDED and scale_time == 1:
            compute_s = profiles.load(source).iteration_s
            console.print(
                f"{source} was recorded on a CPU, where a step takes {compute_s:.3g} s without "
                f"communication. If it takes T seconds on your GPU, add --scale-time "
                f"T/{compute_s:.3g}; better, record your own job with `usbyte profile`.",
                markup=False, soft_wrap=True,
            )  # fmt: skip


def read_network(path: Path) -> _core.NetworkModel:
    """Reads a network model from a JSON file."""
    from usbyte import _core

    return read_json(path, "network", _core.NetworkModel.from_json)


def read_json(path: Path, what: str, parse: Callable[[str], _T]) -> _T:
    """Reads and parses a file.

    Args:
        path: The file.
        what: What the file should be, for the error message, such as "plan".
        parse: Parses the text; raises an `Error` of usbyte if the text is not valid.

    Raises:
        ClickException: The file cannot be read or parsed.
    """
    from usbyte.errors import Error

    text = read_text(path, what)
    try:
        return parse(text)
    except Error as error:
        raise click.ClickException(f"'{path}': {error}") from error


def read_text(path: Path, what: str) -> str:
    """Reads the text of a file; ClickException with `what` in its message if that fails."""
    try:
        return files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot read the {what} '{path}': {error}") from error


def check_writable(*paths: Path | None, inputs: Iterable[Path | str | None] = ()) -> None:
    """Checks, before long work, that output files can be written afterwards.

    Args:
        paths: Output files; None is ignored.
        inputs: Input files, which no output may overwrite; None is ignored.

    Raises:
        ClickException: A file cannot be written.
        UsageError: A file is one of the inputs.
    """
    read = [source for source in inputs if source is not None and os.path.isfile(source)]
    for path in paths:
        if path is None:
            continue
        if why := files.why_unwritable(path):
            raise _unwritable(path, why)
        if path.is_file() and any(path.samefile(source) for source in read):
            raise click.UsageError(
                f"'{path}' is an input and would be overwritten; write to another file"
            )


def write_text(path: Path, text: str) -> None:
    """Writes a text file; ClickException if that fails."""
    try:
        files.write_bytes(path, text.encode())
    except OSError as error:
        raise _unwritable(path, str(error.strerror)) from error


def _unwritable(path: Path, why: str) -> click.ClickException:
    return click.ClickException(
        f"cannot write '{path}': {why}; name a file in a folder that exists and is writable"
    )

"""What the options of several commands have in common.

Importing this needs neither the extension nor torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from usbyte._util import files, units
from usbyte.launch.hosts import MOST_RANKS

if TYPE_CHECKING:
    from usbyte import _core

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

#: What a network of one cost cannot tell; see csrc/include/usbyte/network.h.
SERIAL_HELP = (
    "Operations in flight together are taken to start up at the same time, as on connections of "
    "their own, which favours policies that have several in flight; serial: one after the other, "
    "as on one connection or one NCCL stream."
)


_MAX_WORKERS = 4096


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


class Scheme(NamedTuple):
    """How a job is trained.

    Attributes:
        mode: "forward" or "backward", the overlap; "sharded" is forward with a sharded optimizer.
        policy: Who plans.
    """

    mode: str
    policy: str

    def __str__(self) -> str:
        return f"{self.mode}:{self.policy}"

    @property
    def overlap(self) -> str:
        """What communication may hide behind."""
        return "backward" if self.mode == "backward" else "forward"

    @property
    def sharded(self) -> bool:
        """Whether each rank updates a shard of the parameters."""
        return self.mode == "sharded"


def parse_scheme(text: str) -> Scheme:
    """The scheme of "backward:ddp" or "sharded:dear"; "auto" alone means "forward:auto".

    Raises:
        ValueError: There is no such mode or policy, or the policy cannot do it.
    """
    from usbyte.planning import tuning

    first, colon, second = text.strip().partition(":")
    alone = not colon or text.strip() in tuning.TUNED  # "tune:dear" names no overlap
    mode, policy = ("forward", text.strip()) if alone else (first, second)
    if mode not in ("forward", "backward", "sharded"):
        raise ValueError(
            f"{text!r}: unknown overlap {mode!r}; write forward, backward or sharded (forward with "
            "a sharded optimizer)"
        )
    if policy not in tuning.policies():
        known = ", ".join(tuning.policies())
        raise ValueError(f"{text!r}: unknown policy {policy!r}; known are {known}")
    if mode == "sharded" and policy not in tuning.SHARDING:
        raise ValueError(
            f"{text!r}: {policy} cannot serve a sharded optimizer; write one of "
            f"{', '.join(tuning.SHARDING)}"
        )
    return Scheme(mode, policy)


def parse_workers(text: str) -> int:
    """The number of ranks of an imagined network.

    Raises:
        ValueError: It is not 2 to 4096.
    """
    workers = int(text) if re.fullmatch("[0-9]{1,9}", text) else 0
    if not 2 <= workers <= _MAX_WORKERS:
        raise ValueError(f"{text!r}: write 2 to {_MAX_WORKERS} workers")
    return workers


def all_schemes() -> list[Scheme]:
    """Every policy with forward overlap but the tuned ones, which take long; and what DDP does."""
    from usbyte import _core

    return [*(Scheme("forward", policy) for policy in _core.policies()), Scheme("backward", "ddp")]


def overlap_options(command: _F) -> _F:
    """Adds --overlap and --shard-optimizer."""
    command = click.option(
        "--shard-optimizer",
        "sharded",
        is_flag=True,
        help="Each rank updates a shard, and parameters are gathered in the next forward.",
    )(command)
    return click.option(
        "--overlap",
        type=click.Choice(["forward", "backward"]),
        default="forward",
        help="What communication may hide behind: backward, or backward and the next forward.",
    )(command)


def parse_ring(text: str) -> _core.NetworkModel:
    """The network of "8,25us,10gbit": ranks, latency of a message, bandwidth of a link.

    With ",serial" behind them startups take turns, see `SERIAL_HELP`.

    Raises:
        ValueError: It is not three such values.
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
    """Adds --network and --ring; see `network`."""
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
    """Adds --scale-time and --scale-bytes, the factors of `usbyte.planning.profiles.scaled`."""
    command = click.option("--scale-bytes", default=1.0, help="Factor of all tensor sizes.")(
        command
    )
    return click.option("--scale-time", default=1.0, help="Factor of all times.")(command)


def read_network(path: Path) -> _core.NetworkModel:
    """Reads a network from JSON."""
    from usbyte import _core

    return read_json(path, "network", _core.NetworkModel.from_json)


def read_json(path: Path, what: str, parse: Callable[[str], _T]) -> _T:
    """What `parse` makes of a file, or a message that says what the file was to be."""
    from usbyte.errors import Error

    text = read_text(path, what)
    try:
        return parse(text)
    except Error as error:
        raise click.ClickException(f"'{path}': {error}") from error


def read_text(path: Path, what: str) -> str:
    """The text of a file, or a message that says what the file was to be."""
    try:
        return files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot read the {what} '{path}': {error}") from error


def check_writable(*paths: Path | None, inputs: Iterable[Path | str | None] = ()) -> None:
    """Says before long work that a file could not be written after it, or is what is read."""
    read = [source for source in inputs if source is not None and os.path.isfile(source)]
    for path in paths:
        if path is None:
            continue
        try:
            writable = os.access(path if path.exists() else path.parent, os.W_OK)
            folder = path.is_dir()
            replaced = path.is_file() and any(path.samefile(source) for source in read)
        except OSError as error:
            raise _unwritable(path, str(error.strerror)) from error
        if folder or not writable:
            raise _unwritable(path, "it is a folder" if folder else "not writable")
        if replaced:
            raise click.UsageError(
                f"'{path}' is read here, and would be overwritten; write to another"
            )


def write_text(path: Path, text: str) -> None:
    """Writes a file as `read_text` reads it, or ends with a message."""
    try:
        files.write_bytes(path, text.encode())
    except OSError as error:
        raise _unwritable(path, str(error.strerror)) from error


def _unwritable(path: Path, why: str) -> click.ClickException:
    return click.ClickException(
        f"cannot write '{path}': {why}; name a file in a folder that exists and is writable"
    )

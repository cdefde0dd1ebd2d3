"""What the launcher and its agents say to each other.

Launcher to agent: lines of JSON, the `AgentSpec` first. The end of that stream tells the agent
that the launcher is gone. Agent to launcher: a greeting, then frames, which carry the output of
the ranks byte for byte and, in between, events as JSON.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin

STDOUT, STDERR, EVENT = 1, 2, 3

# Login shells may print something before the agent does, so that its stream needs a beginning;
# the number changes with anything else in this file.
GREETING = b"usbyte-agent 2\n"
_ANY_GREETING = re.compile(rb"usbyte-agent (\d+)\n")
_MAX_NOISE_BYTES = 4096
_MAX_PAYLOAD_BYTES = 16 << 20  # many times what agents send
_HEADER = struct.Struct("!BII")  # kind, rank, payload bytes
_SHOWN_BYTES = 80  # of a message that is refused

# Of each event and command, its fields and what they hold.
_EVENTS: dict[str, dict[str, Any]] = {
    "ready": {"port": int | None, "address": str | None, "ssh": str | None},
    "started": {},
    "exit": {"rank": int, "code": int},
    "error": {"message": str},
    "end": {"left": list[int]},
}
_COMMANDS: dict[str, dict[str, Any]] = {
    "go": {"address": str, "port": int},
    "stop": {},
    "kill": {},
}


class Frame(NamedTuple):
    """One piece of an agent's stream.

    Attributes:
        kind: STDOUT, STDERR or EVENT.
        rank: Global rank whose output this is; 0 for an event.
        payload: Output as it came, not cut at line ends, or an event's JSON.
    """

    kind: int
    rank: int
    payload: bytes

    def encode(self) -> bytes:
        """The frame as it travels."""
        return _HEADER.pack(self.kind, self.rank, len(self.payload)) + self.payload


class FrameReader:
    """Cuts an agent's stream into frames.

    Attributes:
        greeted: The greeting has been read.
    """

    def __init__(self) -> None:
        self.greeted = False
        self._buffer = bytearray()

    @property
    def noise(self) -> bytes:
        """What has come in place of a greeting."""
        return b"" if self.greeted else bytes(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that `data` completes.

        Raises:
            ValueError: What comes is no frame of this version of the protocol.
        """
        self._buffer += data
        if not self.greeted and not self._read_greeting():
            return
        while len(self._buffer) >= _HEADER.size:
            kind, rank, size = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + size
            if kind not in (STDOUT, STDERR, EVENT) or size > _MAX_PAYLOAD_BYTES:
                raise ValueError(f"no agent sends frames of kind {kind} and {size} bytes")
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield Frame(kind, rank, payload)

    def _read_greeting(self) -> bool:
        match = _ANY_GREETING.search(self._buffer)
        if match is None:
            del self._buffer[:-_MAX_NOISE_BYTES]
            return False
        if match[0] != GREETING:
            raise ValueError("another version of usbyte is installed there")
        del self._buffer[: match.end()]
        self.greeted = True
        return True


@dataclass(frozen=True)
class AgentSpec:
    """What one agent has to do.

    Attributes:
        host: The host's name, for messages.
        remote: It was started over ssh.
        node: Its number among the agents, from 0.
        nodes: Agents in the job.
        ranks: Ranks that it starts.
        size: Ranks of the job.
        command: What each of them runs.
        env: Variables set on top of the agent's environment.
        cwd: Directory that the ranks start in.
        interface: Network interface, or several separated by commas; None for any.
        run_id: Name of this run, for the rendezvous.
        start_timeout: Seconds until all agents must have met.
        restarts: How often ranks have been started anew before.
        max_restarts: How often they may be.
    """

    host: str
    remote: bool
    node: int
    nodes: int
    ranks: int
    size: int
    command: list[str]
    env: dict[str, str]
    cwd: str
    interface: str | None
    run_id: str
    start_timeout: float
    restarts: int = 0
    max_restarts: int = 0

    def encode(self) -> bytes:
        """The spec as the first line for an agent."""
        return encode_message(asdict(self))

    @classmethod
    def decode(cls, line: bytes) -> "AgentSpec":
        """Reads what `encode` wrote.

        Raises:
            ValueError: The line is no such thing.
        """
        message = _parse(line)
        _check_fields(message, {field.name: field.type for field in fields(cls)}, line)
        return cls(**message)


def encode_message(message: dict[str, Any]) -> bytes:
    """One line of JSON; its escapes carry bytes that are no UTF-8 as Python's surrogates."""
    return json.dumps(message).encode() + b"\n"


def decode_event(payload: bytes) -> dict[str, Any]:
    """What an agent tells, its name under "event".

    Raises:
        ValueError: No agent of this version tells that.
    """
    return _decode(payload, "event", _EVENTS)


def decode_command(line: bytes) -> dict[str, Any]:
    """What the launcher wants, its name under "command".

    Raises:
        ValueError: No launcher of this version wants that.
    """
    return _decode(line, "command", _COMMANDS)


def _decode(data: bytes, key: str, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    message = _parse(data)
    name = message.get(key)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"this version of usbyte knows no {key} such as {data[:_SHOWN_BYTES]!r}")
    _check_fields(message, {key: str, **known[name]}, data)
    return message


def _parse(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{data[:_SHOWN_BYTES]!r} is no JSON ({error})") from error
    if not isinstance(message, dict):
        raise ValueError(f"{data[:_SHOWN_BYTES]!r} is no message of usbyte's")
    return message


def _check_fields(message: dict[str, Any], kinds: dict[str, Any], data: bytes) -> None:
    same = message.keys() == kinds.keys()
    if not same or not all(_is(message[name], kind) for name, kind in kinds.items()):
        raise ValueError(
            f"{data[:_SHOWN_BYTES]!r} has other fields than this version of usbyte knows; install "
            "the same version on all hosts"
        )


def _is(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of this kind: a type, a list or dict of one, one or None."""
    if isinstance(kind, UnionType):
        return any(_is(value, each) for each in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is(each, get_args(kind)[0]) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is(v, get_args(kind)[1]) for v in value.values())
    if kind is int:
        return type(value) is int and abs(value) < 1 << 63
    if kind is float:
        return type(value) in (int, float)
    return isinstance(value, NoneType if kind is None else kind)

# SPDX-License-Identifier: Apache-2.0
"""The protocol between the launcher and its agents.

Launcher to agent: lines of JSON, the `AgentSpec` first. The end of that stream means that the
launcher is gone. Agent to launcher: a greeting, then frames. A frame carries output of a rank, byte
for byte, or an event as JSON.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin

STDOUT, STDERR, EVENT = 1, 2, 3

# Marks the beginning of the agent's stream, since a login shell may print something before it.
# Increase the number with any change of the protocol.
GREETING = b"usbyte-agent 2\n"
_ANY_GREETING = re.compile(rb"usbyte-agent (\d+)\n")
_MAX_NOISE_BYTES = 4096
_MAX_PAYLOAD_BYTES = 16 << 20  # Many times the payload that agents send.
_HEADER = struct.Struct("!BII")  # Kind, rank, payload bytes.
_SHOWN_BYTES = 80  # Longer messages are cut in errors.

# The fields of each event and command, with their types.
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
    """One message of an agent's stream.

    Attributes:
        kind: STDOUT, STDERR or EVENT.
        rank: Global rank whose output this is; 0 for an event.
        payload: Output, not cut at line ends, or the JSON of an event.
    """

    kind: int
    rank: int
    payload: bytes

    def encode(self) -> bytes:
        """Returns the bytes of the frame in the stream."""
        return _HEADER.pack(self.kind, self.rank, len(self.payload)) + self.payload


class FrameReader:
    """Cuts an agent's stream into frames.

    Attributes:
        greeted: Whether the greeting has been read.
    """

    def __init__(self) -> None:
        self.greeted = False
        self._buffer = bytearray()

    @property
    def noise(self) -> bytes:
        """The bytes that have come instead of a greeting."""
        return b"" if self.greeted else bytes(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that `data` completes.

        Raises:
            ValueError: The data is not a frame of this version of the protocol.
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
    """The task of one agent.

    Attributes:
        host: Name of the host, for messages.
        remote: Whether the agent was started over ssh.
        node: Number of this agent, from 0.
        nodes: Number of agents in the job.
        ranks: Number of ranks that this agent starts.
        size: Number of ranks in the job.
        command: The program of the ranks, with its arguments.
        env: Variables for the ranks, in addition to the agent's environment.
        cwd: Working directory of the ranks.
        interface: Names of network interfaces, separated by commas; None for any.
        run_id: Unique name of this run, for torch's rendezvous of the agents.
        start_timeout: Seconds in which all agents must have met.
        restarts: Number of restarts before this run.
        max_restarts: The most restarts of the job.
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
        """Returns the spec as a line of JSON, the first line that an agent gets."""
        return encode_message(asdict(self))

    @classmethod
    def decode(cls, line: bytes) -> "AgentSpec":
        """Reads what `encode` wrote.

        Raises:
            ValueError: The line is not a spec of this version of usbyte.
        """
        message = _parse(line)
        _check_fields(message, {field.name: field.type for field in fields(cls)}, line)
        return cls(**message)


def encode_message(message: dict[str, Any]) -> bytes:
    """Returns the message as one line of JSON in ASCII.

    Bytes of arguments that are not UTF-8, which Python holds as surrogates, become escapes.
    """
    return json.dumps(message).encode() + b"\n"


def decode_event(payload: bytes) -> dict[str, Any]:
    """Returns the fields of an agent's event; its name is the field "event".

    Raises:
        ValueError: The payload is not an event of this version of usbyte.
    """
    return _decode(payload, "event", _EVENTS)


def decode_command(line: bytes) -> dict[str, Any]:
    """Returns the fields of a launcher's command; its name is the field "command".

    Raises:
        ValueError: The line is not a command of this version of usbyte.
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
    """Returns whether a value from JSON has a type: scalar, list, dict, or a union with None."""
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

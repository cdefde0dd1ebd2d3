# SPDX-License-Identifier: Apache-2.0
"""What the launcher and its agents send each other."""

import json
import os
from types import SimpleNamespace
from typing import Any

from usbyte.launch import launcher, protocol
from usbyte.launch.agent_channel import Channel
from usbyte.launch.hosts import Host, Placement

_SPEC = protocol.AgentSpec("a", True, 1, 2, 1, 3, ["true"], {"A": "b"}, "/", None, "run", 30.0)
_EVENTS: list[dict[str, Any]] = [
    {"event": "ready", "port": 1234, "address": None, "ssh": "10.0.0.1 40000 10.0.0.2 22"},
    {"event": "started"},
    {"event": "exit", "rank": 0, "code": -9},
    {"event": "error", "message": "text"},
    {"event": "end", "left": [1, 2]},
]
_FRAMES = [protocol.Frame(protocol.EVENT, 0, json.dumps(event).encode()) for event in _EVENTS]
SEEDS = [
    b"Welcome!\n" + protocol.GREETING + b"".join(frame.encode() for frame in _FRAMES),
    protocol.GREETING + protocol.Frame(protocol.STDOUT, 1, b"line\n").encode(),
    *(frame.payload for frame in _FRAMES),
    _SPEC.encode(),
    protocol.encode_message({"command": "go", "address": "10.0.0.2", "port": 1234}),
    protocol.encode_message({"command": "kill"}),
]
# How messages begin or end; another ValueError is one that the reader did not expect.
_MESSAGES = ("no agent sends", "another version", "this version of usbyte knows no", "b'", 'b"')


def one_input(data: bytes) -> None:
    """Has every reader read the bytes."""
    for read in (_read_stream, _read_event, _read_command, protocol.AgentSpec.decode):
        try:
            read(data)
        except ValueError as error:
            if not str(error).startswith(_MESSAGES) or len(str(error)) > 1000:
                raise


def _read_stream(data: bytes) -> None:
    reader, half = protocol.FrameReader(), len(data) // 2
    for piece in (data[:half], data[half:]):
        for frame in reader.feed(piece):
            if frame.kind == protocol.EVENT:
                _read_event(frame.payload)


def _read_event(data: bytes) -> None:
    event = protocol.decode_event(data)
    if event["event"] == "ready":
        for local in (False, True):
            link: Any = SimpleNamespace(ready=event, placement=Placement(Host("a", 1, local), 0, 1))
            launcher._master([link, link])


def _read_command(data: bytes) -> None:
    commands, frames = os.pipe(), os.pipe()
    try:
        os.write(commands[1], data[:1024] + b"\n")
        Channel(commands[0], frames[1]).next_command()
    finally:
        for fd in (*commands, *frames):
            os.close(fd)

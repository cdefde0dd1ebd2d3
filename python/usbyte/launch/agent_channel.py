# SPDX-License-Identifier: Apache-2.0
"""The agent's end of its connection to the launcher, and the forwarding of the ranks' output."""

import json
import os
import select
import selectors
import threading
from contextlib import suppress
from typing import Any

from usbyte.launch.protocol import EVENT, GREETING, Frame, decode_command

_CHUNK_BYTES = 1 << 16
_DRAIN_SECONDS = 3.0
_MOST_LINE_BYTES = 64 << 20  # Well above the system's limit of arguments and environment.


class Channel:
    """Receives commands from the launcher, and sends it frames.

    Args:
        commands: Descriptor to read lines of JSON from.
        frames: Descriptor to write frames to.
    """

    def __init__(self, commands: int, frames: int) -> None:
        self._commands = commands
        self._frames = frames
        self._unread = b""
        self._lock = threading.Lock()
        self._closing = False

    @classmethod
    def over_stdio(cls) -> "Channel":
        """Makes a channel from stdin and stdout, and sends the greeting.

        From then on, output to stdout in this process goes to stderr. stdin becomes empty, so that
        the ranks, which inherit it, do not read the launcher's commands.
        """
        channel = cls(os.dup(0), os.dup(1))
        with open(os.devnull) as empty:
            os.dup2(empty.fileno(), 0)
        os.dup2(2, 1)
        channel._write(GREETING)
        return channel

    def read_line(self) -> bytes:
        """Returns the next line; b"" if the launcher is gone or the line is too long."""
        while b"\n" not in self._unread:
            chunk = os.read(self._commands, _CHUNK_BYTES)
            if not chunk or len(self._unread) > _MOST_LINE_BYTES:
                return b""
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def next_command(self, wake: int | None = None, timeout: float | None = None) -> dict[str, Any]:
        """Waits for a command.

        Args:
            wake: Descriptor that also ends the wait when it becomes readable.
            timeout: The most seconds to wait; None: no limit.

        Returns:
            The command. Empty if the launcher is gone, `wake` is readable or the time is up. Empty
            also if the message is not a valid command; the launcher then gets an "error" event.
        """
        if b"\n" not in self._unread:
            watched = [self._commands] if wake is None else [self._commands, wake]
            if self._commands not in select.select(watched, (), (), timeout)[0]:
                return {}
        line = self.read_line()
        try:
            return decode_command(line) if line else {}
        except ValueError as error:
            self.event("error", message=str(error))
            return {}

    def event(self, name: str, **fields: Any) -> None:
        """Sends the launcher an event with these fields."""
        self.send(Frame(EVENT, 0, json.dumps({"event": name, **fields}).encode()))

    def send(self, frame: Frame) -> None:
        """Sends a frame; blocks until the launcher has read it, drops it if the launcher is gone.

        After `close`, it waits for other threads' frames only a few seconds, then drops the frame.
        """
        # The pump may have the lock forever, blocked in a write that the launcher does not read.
        while not self._lock.acquire(timeout=_DRAIN_SECONDS):
            if self._closing:
                return
        try:
            self._write(frame.encode())
        finally:
            self._lock.release()

    def close(self) -> None:
        """Limits the waits of later calls of `send` to a few seconds."""
        self._closing = True

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with suppress(OSError):
            while view:
                view = view[os.write(self._frames, view) :]


class Pump:
    """A thread that forwards the output of the ranks to the launcher."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._stop, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, ends: list[tuple[int, int, int]]) -> None:
        """Starts to read the pipes.

        Args:
            ends: For each pipe its read end, STDOUT or STDERR, and the global rank.
        """
        for fd, kind, rank in ends:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, (kind, rank))
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread.start()

    def finish(self) -> None:
        """Sends the rest of the output, without a time limit. Call it when the ranks have ended.

        A launcher that does not want to wait kills this process. The pipes never reach the end of
        file, since torch keeps their write ends open in this process.
        """
        if self._thread.ident is not None:
            os.write(self._stop_write, b"\0")
            self._thread.join()

    def _run(self) -> None:
        stopping = False
        while True:
            ready = self._selector.select(0 if stopping else None)
            if stopping and not ready:
                return
            for key, _ in ready:
                if key.fd == self._stop:
                    stopping = True
                    self._selector.unregister(self._stop)
                else:
                    kind, rank = key.data
                    self._channel.send(Frame(kind, rank, os.read(key.fd, _CHUNK_BYTES)))

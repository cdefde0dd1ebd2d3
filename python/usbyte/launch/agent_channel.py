"""The agent's end of its line to the launcher, and the ranks' output that travels over it."""

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
_MOST_LINE_BYTES = 64 << 20  # far more than a system lets a program's arguments and environment be


class Channel:
    """Commands from the launcher, frames to it.

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
        """Takes stdin and stdout and greets.

        Whatever else is printed in this process goes to stderr, and the ranks, which inherit
        stdin, find it empty instead of reading the launcher's commands.
        """
        channel = cls(os.dup(0), os.dup(1))
        with open(os.devnull) as empty:
            os.dup2(empty.fileno(), 0)
        os.dup2(2, 1)
        channel._write(GREETING)
        return channel

    def read_line(self) -> bytes:
        """The next line; b"" if the launcher is gone, or writes without end."""
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
            wake: Descriptor that ends the wait too when it becomes readable.
            timeout: Seconds to wait at most; None for ever.

        Returns:
            The command; empty if the launcher is gone, `wake` is readable or time is up, or if what
            came is no command, which the launcher is told.
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
        """Tells the launcher that something has happened."""
        self.send(Frame(EVENT, 0, json.dumps({"event": name, **fields}).encode()))

    def send(self, frame: Frame) -> None:
        """Sends a frame, however long the launcher takes to read it; drops it if it is gone."""
        # The pump may hold the lock for ever, blocked in a write that nobody reads.
        while not self._lock.acquire(timeout=_DRAIN_SECONDS):
            if self._closing:
                return
        try:
            self._write(frame.encode())
        finally:
            self._lock.release()

    def close(self) -> None:
        """From now on a launcher that does not read is waited for only a few seconds."""
        self._closing = True

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with suppress(OSError):
            while view:
                view = view[os.write(self._frames, view) :]


class Pump:
    """A thread that sends the launcher what the ranks print, as it comes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._stop, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, ends: list[tuple[int, int, int]]) -> None:
        """Begins to read.

        Args:
            ends: Read end, STDOUT or STDERR, and global rank of each pipe.
        """
        for fd, kind, rank in ends:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, (kind, rank))
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread.start()

    def finish(self) -> None:
        """Sends what is left in the pipes, however long that takes; the ranks have ended.

        A launcher that does not want to wait ends this process. The pipes never come to an end of
        file: torch keeps their write ends open.
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

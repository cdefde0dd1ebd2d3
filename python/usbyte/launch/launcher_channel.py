# SPDX-License-Identifier: Apache-2.0
"""The launcher's end of the connection to one agent."""

import os
import selectors
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from usbyte.launch.hosts import Placement
from usbyte.launch.protocol import EVENT, Frame, FrameReader, encode_message
from usbyte.launch.rank_screen import RankScreen

_CHUNK_BYTES = 1 << 16
_EXIT_SECONDS = 1.0


class AgentConnection:
    """The process of one agent, or of the ssh that runs it, with its pipes and its state.

    No method blocks on the agent, since the launcher must serve the other hosts, too.

    Args:
        placement: The host and its ranks.
        command: Command that starts the agent.
        env: Environment of that command.
        spec: The encoded `AgentSpec`, which is the first line sent.
        selector: Gets the descriptors of the connection. The data of each is the function to call
            when the descriptor is ready.
        on_frame: Called with each frame of the agent.
        on_text: Called with each line that the agent or ssh writes to stderr.

    Attributes:
        ready: The agent's "ready" event; None before it has arrived.
        started: Whether the ranks of the agent run.
        ended: Whether the agent has reported that no process of the job is left on its host.
        gone: Whether the connection is closed.
        code: Exit code of the agent or ssh, negative for a signal; None before `gone`.

    Raises:
        OSError: The command cannot be started.
    """

    def __init__(
        self,
        placement: Placement,
        command: list[str],
        env: dict[str, str],
        spec: bytes,
        selector: selectors.BaseSelector,
        on_frame: "Callable[[AgentConnection, Frame], None]",
        on_text: "Callable[[AgentConnection, bytes], None]",
    ) -> None:
        self.placement = placement
        self.ready: dict[str, Any] | None = None
        self.started = self.ended = self.gone = False
        self._complaints: deque[bytes] = deque(maxlen=20)
        self._broken = ""  # Describes the invalid data that came.
        self.code: int | None = None
        self._reader = FrameReader()
        self._cutter = RankScreen()
        self._unsent = b""
        self._selector = selector
        self._on_frame = on_frame
        self._on_text = on_text
        # In a session of its own: Ctrl-C reaches only the launcher, which then ends everything.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            cwd="/" if placement.host.local else None,
            env=env,
        )
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._in, self._out, self._err = (pipe.fileno() for pipe in pipes if pipe is not None)
        for fd in (self._in, self._out, self._err):
            os.set_blocking(fd, False)
        selector.register(self._out, selectors.EVENT_READ, self._read_frames)
        selector.register(self._err, selectors.EVENT_READ, self._read_text)
        self._send(spec)

    @property
    def name(self) -> str:
        """The host's name."""
        return self.placement.host.name

    @property
    def greeted(self) -> bool:
        """Whether the agent has sent its greeting, so that it runs."""
        return self._reader.greeted

    @property
    def complaint(self) -> str:
        """Describes invalid data, or the text that came instead of a greeting; "" if none did."""
        if self._broken:
            return self._broken
        lines = [*self._complaints, *self._reader.noise.splitlines()]
        text = " / ".join(line.decode(errors="replace").strip() for line in lines)
        return "" if self.greeted else text

    def check_rank(self, rank: int) -> None:
        """Raises ValueError unless the rank runs on this host."""
        if not 0 <= rank - self.placement.first_rank < self.placement.count:
            raise ValueError(f"its agent reported rank {rank}, which is not on that host")

    def send(self, command: str, **fields: Any) -> None:
        """Sends the agent a command, as soon as its pipe has room."""
        if not self.gone:
            self._send(encode_message({"command": command, **fields}))

    def kill(self) -> None:
        """Kills the agent, or the ssh to it. A remote agent then ends its ranks by itself."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._close()

    def _send(self, data: bytes) -> None:
        self._unsent += data
        self._flush()

    def _flush(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._in, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # The agent is gone; the end of its stdout closes the connection.
            self._unsent = b""
        registered = self._in in self._selector.get_map()
        if self._unsent and not registered:
            self._selector.register(self._in, selectors.EVENT_WRITE, self._flush)
        elif registered and not self._unsent:
            self._selector.unregister(self._in)

    def _read_frames(self) -> None:
        data = os.read(self._out, _CHUNK_BYTES)
        if not data:
            self._close()
            return
        try:
            for frame in self._reader.feed(data):
                if frame.kind != EVENT:
                    self.check_rank(frame.rank)
                self._on_frame(self, frame)
        except ValueError as error:
            self._broken = str(error)
            self.kill()

    def _read_text(self) -> None:
        data = os.read(self._err, _CHUNK_BYTES)
        if not data:
            self._selector.unregister(self._err)
        for line in self._cutter.feed(data) if data else self._cutter.finish():
            self._complaints.append(line)
            self._on_text(self, line)

    def _close(self) -> None:
        if self.gone:
            return
        self.gone = True
        try:
            self.code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.code = self._process.wait()
        with suppress(BlockingIOError):  # A process that ssh left behind may still have stderr.
            while self._err in self._selector.get_map():
                self._read_text()
        for fd in (self._in, self._out, self._err):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

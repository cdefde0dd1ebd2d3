# SPDX-License-Identifier: Apache-2.0
"""The output of the ranks: lines on the terminal, each with its rank, and files."""

import errno
import os
import select
import stat
from pathlib import Path
from typing import BinaryIO

from usbyte.launch.live_area import LiveArea, is_terminal
from usbyte.launch.protocol import STDERR, STDOUT
from usbyte.launch.rank_screen import RankScreen

_STUCK_SECONDS = 1.0
_NOT_PLAIN = "is a link or no plain file: remove it, or name another directory"
_FILE_NAMES = {STDOUT: "stdout", STDERR: "stderr"}


class Sink:
    """Writes to a descriptor whose reader may be slow, such as a pipe or a terminal.

    Args:
        fd: The descriptor to write to.
        wake: Descriptor that is readable when a signal has come; it ends the wait for the reader.

    Attributes:
        error: The error after which nothing more is written: EPIPE if the reader is gone, or for
            example a full disk. None: no error.
        stuck: Whether nobody has read for a second since `hurry`; further output is dropped.
        lost: Whether output was dropped.
    """

    def __init__(self, fd: int, wake: int) -> None:
        self._fd = fd
        self._wake = wake
        self._patient = True
        self.error: OSError | None = None
        self.stuck = self.lost = False

    def hurry(self) -> None:
        """Limits later waits for the reader to one second, and ignores `wake`."""
        self._patient = False

    def calm(self) -> None:
        """Removes the limit that `hurry` has set."""
        self._patient = True
        self.stuck = False

    def write(self, data: bytes) -> None:
        """Writes all of `data`, unless an error, `wake` or the limit of `hurry` ends it."""
        view = memoryview(data)
        while view and self.error is None and not self.stuck and self._wait():
            try:
                # A pipe that is ready takes PIPE_BUF bytes without blocking.
                view = view[os.write(self._fd, view[: select.PIPE_BUF]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self.error = error
        self.lost |= bool(view) and self.error is None

    def _wait(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        if self._patient:
            poll.register(self._wake, select.POLLIN)
        ready = dict(poll.poll(None if self._patient else _STUCK_SECONDS * 1000))
        if not ready:
            self.stuck = True
        return self._fd in ready


def _open_new(folder: Path, name: str) -> BinaryIO:
    """Opens an empty file for a rank's output.

    Other users may be able to write to the directory. So links are not followed, as the output
    could overwrite any file of this user, and a pipe does not block the call.

    Raises:
        OSError: The file cannot be written, or is not a regular file with a single name.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    inside = _opened(folder, folder, flags | os.O_RDONLY | os.O_DIRECTORY)
    try:
        create = flags | os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK
        file = _opened(folder / name, name, create, inside)
    finally:
        os.close(inside)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(file)
        raise OSError(errno.EEXIST, _NOT_PLAIN, str(folder / name))
    os.truncate(file, 0)
    os.set_blocking(file, True)
    return open(file, "wb", buffering=0)


def _opened(path: Path, name: Path | str, flags: int, inside: int | None = None) -> int:
    try:
        return os.open(name, flags, 0o666, dir_fd=inside)
    except OSError as error:
        # A link, a link in place of the directory, and a pipe without a reader.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise OSError(error.errno, _NOT_PLAIN, str(path)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


class Output:
    """The launcher's stdout and stderr, and the files of the ranks.

    Args:
        size: The most ranks that the job can have.
        wake: Descriptor that is readable when a signal has come; it ends the wait for a reader.
        directory: Directory for the files `rank.N/stdout` and `rank.N/stderr`; None: no files. As
            with Horovod, N has as many digits as the highest rank.

    Raises:
        OSError: The directory or a file in it cannot be written, or is a link.
    """

    def __init__(self, size: int, wake: int, directory: Path | None = None) -> None:
        self.stdout = Sink(1, wake)
        self.stderr = Sink(2, wake)
        self._sinks = {STDOUT: self.stdout, STDERR: self.stderr}
        self._on_terminal = {STDOUT: is_terminal(1), STDERR: is_terminal(2)}
        self._area = LiveArea(2 if self._on_terminal[STDERR] else 1)
        self._screens: dict[tuple[int, int], RankScreen] = {}
        self._live: dict[tuple[int, int], list[bytes]] = {}  # by rank and kind; no empty ones
        self._files: dict[tuple[int, int], BinaryIO] = {}
        for rank in range(size if directory is not None else 0):
            folder = Path(directory or "", f"rank.{rank:0{len(str(size - 1))}d}")
            folder.mkdir(parents=True, exist_ok=True)
            for kind, name in _FILE_NAMES.items():
                self._files[kind, rank] = _open_new(folder, name)

    def rank(self, kind: int, rank: int, data: bytes) -> None:
        """Shows output of a rank, and writes it to the rank's file.

        Args:
            kind: STDOUT or STDERR.
            rank: Global rank.
            data: The output, not cut at line ends.

        Raises:
            OSError: A file cannot be written.
        """
        if (kind, rank) in self._files:
            rest = memoryview(data)
            while rest:  # A write may be partial, for example when the disk becomes full.
                rest = rest[self._files[kind, rank].write(rest) :]
        if (kind, rank) not in self._screens:
            self._screens[kind, rank] = RankScreen(self._on_terminal[kind])
        screen = self._screens[kind, rank]
        finished = screen.feed(data)
        if self._on_terminal[kind]:
            self._set_live(kind, rank, screen.live())
        if finished:
            self._write(kind, _marked(rank, finished))

    def note(self, text: str) -> None:
        """Shows a message of the launcher on stderr."""
        self._write(STDERR, f"usbyterun: {text}\n".encode(errors="surrogateescape"))

    def host(self, host: str, line: bytes) -> None:
        """Shows a line that the agent of a host, or ssh, has printed."""
        self._write(STDERR, f"[{host}] ".encode() + line.rstrip() + b"\n")

    def refresh_in_s(self) -> float | None:
        """Returns the seconds until `refresh` should be called; None: it need not be."""
        return self._area.wait_s()

    def refresh(self) -> None:
        """Draws the unfinished lines of the ranks if they have changed and the time has come."""
        if self._area.wait_s() == 0.0:
            self._redraw()

    def finish(self) -> None:
        """Shows the unfinished lines. Call it when all ranks have ended."""
        self._live.clear()
        for (kind, rank), screen in sorted(self._screens.items()):
            if finished := screen.finish():
                self._write(kind, _marked(rank, finished))
        self._screens.clear()
        self._redraw()

    def close(self) -> None:
        """Closes the files of the ranks."""
        for file in self._files.values():
            file.close()

    def hurry(self) -> None:
        """Limits later waits for the readers of stdout and stderr to one second."""
        self.stdout.hurry()
        self.stderr.hurry()

    def calm(self) -> None:
        """Removes the limit that `hurry` has set, and reports dropped output."""
        self.stdout.calm()
        self.stderr.calm()
        self.tell_lost()

    def tell_lost(self) -> None:
        """Shows a message if output was dropped since the last call."""
        lost = self.stdout.lost or self.stderr.lost
        self.stdout.lost = self.stderr.lost = False
        if lost:
            self.note("some of the ranks' last output is lost, as nobody read it")

    def _set_live(self, kind: int, rank: int, lines: list[bytes]) -> None:
        if lines == self._live.get((rank, kind), []):
            return
        if lines:
            self._live[rank, kind] = lines
        else:
            del self._live[rank, kind]
        self._area.change()

    def _redraw(self) -> None:
        self._write(STDERR if self._on_terminal[STDERR] else STDOUT, b"")

    def _write(self, kind: int, text: bytes) -> None:
        """Writes whole lines, above the unfinished ones if these are on the same terminal."""
        if self._on_terminal[kind]:
            live = [b"[%d] %s" % (at[0], ln) for at in sorted(self._live) for ln in self._live[at]]
            text = self._area.draw(text, live)
        self._sinks[kind].write(text)


def _marked(rank: int, lines: list[bytes]) -> bytes:
    return b"".join(b"[%d] %s\n" % (rank, line) for line in lines)

# SPDX-License-Identifier: Apache-2.0
"""The output of the ranks: whole lines on the terminal, each with its rank, and files."""

import errno
import os
import select
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from usbyte.launch.protocol import STDERR, STDOUT

_MAX_LINE_BYTES = 1 << 20
_STUCK_SECONDS = 1.0
_NOT_PLAIN = "is a link or no plain file: remove it, or name another directory"
_FILE_NAMES = {STDOUT: "stdout", STDERR: "stderr"}


class LineCutter:
    r"""Cuts a stream of bytes into lines; `\r` also ends a line, for progress bars."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes, with their line ends."""
        lines = (self._rest + data).splitlines(keepends=True)
        # A \r at the very end may be the first half of \r\n.
        complete = not lines or lines[-1].endswith(b"\n") or len(lines[-1]) > _MAX_LINE_BYTES
        self._rest = b"" if complete else lines.pop()
        return lines

    def finish(self) -> list[bytes]:
        """Returns the text after the last line end, as a list of at most one line."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


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
        self._cutters: dict[tuple[int, int], LineCutter] = {}
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
        self._show(kind, rank, self._cutters.setdefault((kind, rank), LineCutter()).feed(data))

    def note(self, text: str) -> None:
        """Shows a message of the launcher on stderr."""
        self.stderr.write(f"usbyterun: {text}\n".encode(errors="surrogateescape"))

    def host(self, host: str, line: bytes) -> None:
        """Shows a line that the agent of a host, or ssh, has printed."""
        self.stderr.write(f"[{host}] ".encode() + line.rstrip() + b"\n")

    def finish(self) -> None:
        """Shows the last lines without a line end. Call it when all ranks have ended."""
        for (kind, rank), cutter in sorted(self._cutters.items()):
            self._show(kind, rank, cutter.finish())

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

    def _show(self, kind: int, rank: int, lines: list[bytes]) -> None:
        def marked() -> Iterator[bytes]:
            for line in lines:
                yield b"[%d] " % rank
                yield line
                if not line.endswith((b"\n", b"\r")):
                    yield b"\n"

        (self.stdout if kind == STDOUT else self.stderr).write(b"".join(marked()))

"""What the ranks print: whole lines on the terminal, each with its rank, and files."""

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
    r"""Cuts a stream of bytes into lines; `\r` ends one too, as progress bars use it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, with their ends."""
        lines = (self._rest + data).splitlines(keepends=True)
        # A \r at the very end may be the first half of \r\n.
        complete = not lines or lines[-1].endswith(b"\n") or len(lines[-1]) > _MAX_LINE_BYTES
        self._rest = b"" if complete else lines.pop()
        return lines

    def finish(self) -> list[bytes]:
        """What came after the last line end."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class Sink:
    """A descriptor that may be a pipe or a terminal on which nobody reads for a while.

    Args:
        fd: Where to write.
        wake: Readable when the launcher has something more urgent to do than to write.

    Attributes:
        error: Why nothing can be written any more: EPIPE where the reader is gone, or the disk is
            full.
        stuck: Since `hurry`, nobody has read for a second; what comes is dropped.
        lost: Something was dropped.
    """

    def __init__(self, fd: int, wake: int) -> None:
        self._fd = fd
        self._wake = wake
        self._patient = True
        self.error: OSError | None = None
        self.stuck = self.lost = False

    def hurry(self) -> None:
        """From now on, gives up if nobody reads for a second."""
        self._patient = False

    def calm(self) -> None:
        """Ends the hurry."""
        self._patient = True
        self.stuck = False

    def write(self, data: bytes) -> None:
        """Writes everything, unless that fails or `wake` ends the wait for the reader."""
        view = memoryview(data)
        while view and self.error is None and not self.stuck and self._wait():
            try:
                # That many bytes do not block once a pipe is ready for any.
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

    Others may write to the directory where it is a shared one. A link that they have put there is
    not followed, or output would overwrite any file of this user; nor is a pipe waited for.

    Raises:
        OSError: It cannot be written, or is no plain file of one name.
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
        # A link, a directory link, and a pipe that nobody reads.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise OSError(error.errno, _NOT_PLAIN, str(path)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


class Output:
    """The launcher's stdout and stderr, and the ranks' files.

    Args:
        size: Ranks that the job may have.
        wake: See `Sink`.
        directory: Where `rank.N/stdout` and `rank.N/stderr` are written; None for nowhere. As with
            Horovod, N has as many digits as the highest rank.

    Raises:
        OSError: The directory or a file in it cannot be written, or has been put there as a link to
            another place.
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
        """Takes what a rank has printed; kind is STDOUT or STDERR.

        Raises:
            OSError: A file cannot be written.
        """
        if (kind, rank) in self._files:
            rest = memoryview(data)
            while rest:  # a disk that gets full takes a part
                rest = rest[self._files[kind, rank].write(rest) :]
        self._show(kind, rank, self._cutters.setdefault((kind, rank), LineCutter()).feed(data))

    def note(self, text: str) -> None:
        """Shows a message of the launcher's own."""
        self.stderr.write(f"usbyterun: {text}\n".encode(errors="surrogateescape"))

    def host(self, host: str, line: bytes) -> None:
        """Shows what a host's agent, or ssh, has printed."""
        self.stderr.write(f"[{host}] ".encode() + line.rstrip() + b"\n")

    def finish(self) -> None:
        """Shows lines that have no end: no rank that runs now prints any more."""
        for (kind, rank), cutter in sorted(self._cutters.items()):
            self._show(kind, rank, cutter.finish())

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()

    def hurry(self) -> None:
        """From now on, gives up if nobody reads for a second."""
        self.stdout.hurry()
        self.stderr.hurry()

    def calm(self) -> None:
        """Ends the hurry, and tells what it has cost."""
        self.stdout.calm()
        self.stderr.calm()
        self.tell_lost()

    def tell_lost(self) -> None:
        """Tells that something was dropped, if it was, since the last time."""
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

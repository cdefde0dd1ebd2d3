# SPDX-License-Identifier: Apache-2.0
"""Reading of input files and atomic writing of output files."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

# Full disk, quota, file size limit.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: The largest input of the C++ parsers, as in csrc/plan/json.h.
MOST_BYTES = 64 << 20


def read_text(path: Path) -> str:
    """Reads the text of an input file, such as a plan or a profile.

    Raises:
        OSError: The file cannot be read, or has more than `MOST_BYTES` bytes.
        UnicodeDecodeError: The file is not UTF-8 text.
    """
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(
            errno.EFBIG, f"{os.strerror(errno.EFBIG)}, above {MOST_BYTES} bytes", str(path)
        )
    return data.decode()


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces the content of a file; if the disk is full, the old content stays.

    A path that is not a regular file with a single name is written in place. Such paths are links,
    pipes and devices. A file that cannot be replaced is written in place, too.

    Raises:
        OSError: The file cannot be written.
    """
    old: os.stat_result | None = None
    with suppress(FileNotFoundError):
        old = path.lstat()
    alone = old is None or (stat.S_ISREG(old.st_mode) and old.st_nlink == 1)
    if alone and (old is None or os.access(path, os.W_OK)):
        try:
            _replace(path, data, old)
            return
        except OSError as error:
            if error.errno in _FULL:
                raise
    path.write_bytes(data)


def why_unwritable(path: Path) -> str:
    """Returns why a file cannot be written, as far as can be told before; empty if it can."""
    try:
        if path.is_dir():
            return "it is a folder"
        if not path.parent.is_dir():
            return "its folder does not exist"
        target = path if path.exists() else path.parent
        return "" if os.access(target, os.W_OK) else "not writable"
    except OSError as error:
        return str(error.strerror)


def _replace(path: Path, data: bytes, old: os.stat_result | None) -> None:
    part = path.with_name(f".usbyte-{secrets.token_hex(8)}.part")
    mode = 0o666 if old is None else 0o600  # Others must not read it before fchmod below.
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            if old is not None:
                os.chown(file.fileno(), old.st_uid, old.st_gid)
                os.chmod(file.fileno(), stat.S_IMODE(old.st_mode))
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise

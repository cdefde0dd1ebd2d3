"""Files that users hand in, and those that are written for them."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

# A disk, a quota, a limit.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: As much as the parsers take; see csrc/plan/json.h.
MOST_BYTES = 64 << 20


def read_text(path: Path) -> str:
    """The text of a file that is to be a plan, a profile or the like.

    Raises:
        OSError: It cannot be read, or is larger than any such file.
        UnicodeDecodeError: It is no text.
    """
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(
            errno.EFBIG, f"{os.strerror(errno.EFBIG)}, above {MOST_BYTES} bytes", str(path)
        )
    return data.decode()


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file as a whole: where there is no room for it, what was there before stays.

    What has another name besides, as links and descriptors have, is written in place, and so is
    what cannot be replaced.

    Raises:
        OSError: It cannot be written.
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


def _replace(path: Path, data: bytes, old: os.stat_result | None) -> None:
    part = path.with_name(f".usbyte-{secrets.token_hex(8)}.part")
    mode = 0o666 if old is None else 0o600  # nobody else's for a moment either
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

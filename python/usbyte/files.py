"""Files that users hand in, and those that are written for them."""

import errno
import os
import secrets
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

    Raises:
        OSError: It cannot be written.
    """
    if not path.exists() or (path.is_file() and os.access(path, os.W_OK)):
        try:
            _replace(Path(os.path.realpath(path)), data)
            return
        except OSError as error:
            if error.errno in _FULL:
                raise
    # A pipe, a device, what may not be written; or a file that no other can be put in the place of.
    path.write_bytes(data)


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f".usbyte-{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
        with suppress(FileNotFoundError):
            old = path.stat()
            os.chown(part, old.st_uid, old.st_gid)
            part.chmod(old.st_mode & 0o7777)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise

"""Files that users hand in."""

import errno
import os
from pathlib import Path

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

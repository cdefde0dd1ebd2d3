"""What the commands `usbyte` and `usbyterun` have in common."""

import errno
import sys
from typing import Any

import click

# Of a disk, a quota, a limit, a terminal that is gone, a descriptor that is open for reading.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class Telling(click.Command):
    """A command that tells in one line that standard output cannot be written.

    Also of help and version, which click prints before the command itself runs.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs the command, as click does."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.errno not in _UNWRITABLE or error.filename is not None:
                raise
            sys.exit(f"Error: cannot write to standard output: {error.strerror}")

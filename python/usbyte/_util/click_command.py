# SPDX-License-Identifier: Apache-2.0
"""The base class of the commands `usbyte` and `usbyterun`."""

import errno
import sys
from typing import Any

import click

# Full disk, quota, file size limit, closed terminal, descriptor that is open for reading only.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class StdoutErrorCommand(click.Command):
    """A command that exits with a one-line error if it cannot write to standard output.

    This includes the output of --help and --version, which click prints before it runs the command.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs the command as `click.Command.main` does."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.errno not in _UNWRITABLE or error.filename is not None:
                raise
            sys.exit(f"Error: cannot write to standard output: {error.strerror}")

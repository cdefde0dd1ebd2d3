"""The last step before a rank's command; `elastic.py` runs it as a file, without site packages.

Arguments: the agent's process id, then the command. It ties the rank's life to the agent's and
becomes the command, so that process id, signals and exit code are the command's own.
"""

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the process `parent` dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(128 + signal.SIGKILL)


def main(agent: int, command: list[str]) -> NoReturn:
    """Replaces this process with `command`, which dies when the process `agent` dies."""
    die_with(agent)
    # Python ignores these two, and what is ignored stays so across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        # As shells report it: 127 for a command that is not there, 126 for one that cannot run.
        sys.stderr.write(f"usbyterun: cannot run {command[0]!r}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

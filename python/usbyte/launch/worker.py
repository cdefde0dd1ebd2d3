# SPDX-License-Identifier: Apache-2.0
"""Executes a rank's command. `torch_elastic.py` runs this file directly, without site packages.

Arguments: the process id of the agent, then the command. The process is set up to die with the
agent. Then it becomes the command by exec, so that process id, signals and exit code are those of
the command.
"""

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent, the process `parent`, dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # The parent died before the line above.
        os._exit(128 + signal.SIGKILL)


def main(agent: int, command: list[str]) -> NoReturn:
    """Replaces this process with `command`, which dies when the process `agent` dies."""
    die_with(agent)
    # Python ignores these two signals, and exec would pass that on to the command.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        # The exit codes of shells: 127 for a missing command, 126 for one that cannot run.
        remedy = ""
        if command[0].endswith(".py") and os.path.isfile(command[0]):
            remedy = f"; a Python script is started by: python {command[0]}"
        sys.stderr.write(f"usbyterun: cannot run {command[0]!r}: {error.strerror}{remedy}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

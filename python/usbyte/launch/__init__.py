# SPDX-License-Identifier: Apache-2.0
"""usbyterun: starts the ranks of a job on this host and, over ssh, on others.

The launcher process needs neither the C++ core nor torch. Only the agents import torch.
"""

import signal


def main() -> None:
    """Entry point of the console script `usbyterun`."""
    # Until the launcher installs its handlers, Ctrl-C shall kill it at once. Otherwise Python would
    # raise KeyboardInterrupt and click would exit with code 1.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Imported here: agents import this package too, and do not need the command line.
    from usbyte.launch.cli import main as command

    command(prog_name="usbyterun")

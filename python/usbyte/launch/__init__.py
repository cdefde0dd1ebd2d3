"""usbyterun: starts the ranks of a job on this host and, over ssh, on others.

The launcher works without the extension and without torch; only its agents import torch.
"""

import signal


def main() -> None:
    """The console script `usbyterun`."""
    # Until the launcher listens, Ctrl-C ends it at once; Python would raise, and click exit with 1.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Imported late: the agents import this package too and need none of the command line.
    from usbyte.launch.cli import main as command

    command(prog_name="usbyterun")

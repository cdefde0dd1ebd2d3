"""usbyterun: starts the ranks of a job on this host and, over ssh, on others.

The launcher works without the extension and without torch; only its agents import torch.
"""


def main() -> None:
    """The console script `usbyterun`."""
    # Imported late: the agents import this package too and need none of the command line.
    from usbyte.run.cli import main as command

    command(prog_name="usbyterun")

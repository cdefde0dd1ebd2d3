"""The `usbyte` command.

Importing this needs neither the extension nor torch, so that `usbyte doctor` can say what is
wrong with them.
"""

import click

import usbyte
from usbyte.cli.doctor import doctor


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(usbyte.__version__, prog_name="usbyte")
def main() -> None:
    """Gradient communication for PyTorch, planned as a whole."""


main.add_command(doctor)

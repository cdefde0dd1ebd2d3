# SPDX-License-Identifier: Apache-2.0
"""The `usbyte` command.

An import of this package needs neither the C++ core nor torch, so that `usbyte doctor` can report
what is wrong with them. The module of a command is imported when the command runs.
"""

import importlib
from typing import Any

import click

import usbyte
from usbyte._util.click_command import StdoutErrorCommand

_COMMANDS = (
    "demo", "doctor", "profile", "probe", "plan", "simulate", "whatif", "report", "stragglers",
    "lab",
)  # fmt: skip


class _Commands(StdoutErrorCommand, click.Group):
    """A group whose command NAME is the object NAME in the module `usbyte.cli.NAME`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "help":
            return click.Command("help", callback=lambda: click.echo(ctx.get_help()))
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"usbyte.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; shows errors of the library without a traceback."""
        try:
            return super().invoke(ctx)
        except RuntimeError as error:
            from usbyte.errors import Error

            if not isinstance(error, Error):
                raise
            lines = [str(error), *getattr(error, "__notes__", [])]
            raise click.ClickException("\n".join(lines)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(usbyte.__version__, prog_name="usbyte")
def main() -> None:
    """Gradient communication for PyTorch, planned as a whole."""

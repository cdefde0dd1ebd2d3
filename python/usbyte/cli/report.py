"""`usbyte report`."""

import click


@click.command()
def report() -> None:
    """Draw."""

# SPDX-License-Identifier: Apache-2.0
"""Pages of published figures beside simulated ones: the traces they need, and where they go."""

from __future__ import annotations

from pathlib import Path

import click

from usbyte import _core
from usbyte.cli._options import write_text
from usbyte.planning import profiles

folder_option = click.option(
    "--profiles",
    "folder",
    type=click.Path(path_type=Path),
    default=Path(__file__).resolve().parents[2] / "shared" / "profiles",
    show_default="shared/profiles beside the checkout",
    help="Folder of traces or profiles, MODEL.json.",
)
output_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Markdown goes there, else is shown."
)


def load(folder: Path) -> dict[str, _core.Profile]:
    """Profiles and traces by name of the file.

    Raises:
        ClickException: There are none.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise click.ClickException(
            f"no traces in '{folder}'; name a folder that holds vgg16.json, resnet50.json, "
            "bert.json and gpt2.json by --profiles"
        )
    return {path.stem: profiles.load(str(path)) for path in paths}


def deliver(page: str, output: Path | None) -> None:
    """Writes a page, or shows it."""
    if output:
        write_text(output, page)
        click.echo(f"wrote {output}")
    else:
        click.echo(page, nl=False)

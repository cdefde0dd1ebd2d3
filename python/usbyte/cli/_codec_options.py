# SPDX-License-Identifier: Apache-2.0
"""Measurement of codecs for `usbyte probe --codecs`, and the options that use the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from usbyte._util import units
from usbyte.cli._options import Parsed, listed, read_json

if TYPE_CHECKING:
    from rich.table import Table

    from usbyte import _core

_F = TypeVar("_F", bound=Callable[..., Any])

#: The parameter with which "all" measures a codec that needs one.
_PARAMETERS = {
    "topk": "0.01",
    "randk": "0.01",
    "dct": "0.01",
    "dgc": "0.001",
    "qsgd": "4",
    "powersgd": "4",
}


def parse_codec(text: str) -> str:
    """Returns the normalized spec of a codec, "none" for none.

    Raises:
        ValueError: There is no such codec.
    """
    from usbyte import _core

    codec = _core.make_codec(text.strip())
    return codec.spec if codec else "none"


def parse_codecs(text: str) -> list[str]:
    """Parses a list of codec specs.

    Args:
        text: Specs separated by commas, or "all". A part such as "momentum=0.5" belongs to the spec
            before it: "dgc:0.01,momentum=0.5,fp16" has two specs.

    Raises:
        ValueError: A codec is unknown or "none", or the list is empty.
    """
    from usbyte import _core

    if text.strip() == "all":
        names = _core.codec_names()
        return [f"{name}:{_PARAMETERS[name]}" if name in _PARAMETERS else name for name in names]
    parts: list[str] = []
    for part in listed(str)(text):
        if parts and "=" in part and ":" not in part.partition("=")[0]:
            parts[-1] += f",{part}"  # A parameter of the codec before it.
        else:
            parts.append(part)
    specs = list(dict.fromkeys(parse_codec(part) for part in parts))
    if not specs or "none" in specs:
        raise ValueError(f"{text!r}: name codecs other than none, as in topk:0.01,fp16, or all")
    return specs


def measure(
    specs: Sequence[str], seconds: float, device: _core.Cuda | None
) -> list[_core.MeasuredCodec]:
    """Measures the cost of codecs.

    Args:
        specs: Specs of the codecs.
        seconds: Approximate time for each codec.
        device: The GPU; None: one CPU thread.
    """
    from usbyte import _core

    return [_core.measure_codec(spec, seconds, device) for spec in specs]


def costs_of(measured: Sequence[_core.MeasuredCodec]) -> _core.CodecCosts:
    """Returns the measured costs in the form that policies take."""
    from usbyte import _core

    return _core.CodecCosts({m.spec: m.cost for m in measured})


def table(measured: Sequence[_core.MeasuredCodec], place: str) -> Table:
    """Makes a table with one row for each codec; `place` names the device in its title."""
    from rich.table import Table

    out = Table(title=f"codecs on {place}, by bytes of float32 gradients")
    out.add_column("codec", no_wrap=True)
    out.add_column("message", justify="right")
    for what in ("encode", "decode"):
        for number in ("least", "GB/s", "error"):
            out.add_column(f"{what} {number}", justify="right")
    for m in measured:
        out.add_row(
            m.spec,
            f"{m.message_bytes / m.largest_bytes:.2%}",
            *_cells(m.cost.encode, m.encode_residual),
            *_cells(m.cost.decode, m.decode_residual),
        )
    return out


def _cells(cost: _core.AlphaBeta, residual: float) -> tuple[str, str, str]:
    least = units.format_seconds(float(f"{cost.alpha_s:.3g}"))
    return least, f"{1e-9 / cost.beta_s_per_byte:.2f}", f"{residual:.0%}"


def costs_option(command: _F) -> _F:
    """Adds --codec-costs, whose value `read_costs` reads."""
    return click.option(
        "--codec-costs",
        "costs_path",
        type=click.Path(path_type=Path),
        metavar="COSTS.json",
        help="Costs of codecs, written by usbyte probe --codecs --json; without it, coding takes "
        "no time.",
    )(command)


def coding_options(command: _F) -> _F:
    """Adds --codec and --codec-costs, for `codecs_for` and `read_costs`."""
    command = costs_option(command)
    return click.option(
        "--codec",
        type=Parsed("codec", parse_codec),
        default="none",
        metavar="SPEC",
        help="Codec of the floating-point gradients, such as topk:0.01.",
    )(command)


def codecs_for(profile: _core.Profile, codec: str) -> list[str]:
    """Returns the codec of each tensor: `codec` for floating-point tensors, "none" for others.

    Returns:
        The codecs in the profile's order; empty if `codec` is "none".

    Raises:
        UsageError: The codec factors matrices, and the profile has no tensor with rows.
    """
    from usbyte import _core
    from usbyte.errors import UsageError

    if codec == "none":
        return []
    made = _core.make_codec(codec)
    if made is not None and made.factors and all(t.rows == 1 for t in profile.tensors):
        raise UsageError(
            f"codec {codec} is for matrices, and this profile has none; record one with "
            "usbyte.torch.profile"
        )
    return [codec if "float" in t.dtype else "none" for t in profile.tensors]


def read_costs(path: Path | None) -> _core.CodecCosts:
    """Reads the costs of codecs from a JSON file; without a file, coding takes no time."""
    from usbyte import _core

    if path is None:
        return _core.CodecCosts()
    return read_json(path, "costs of codecs", _core.CodecCosts.from_json)

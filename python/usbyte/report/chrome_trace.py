# SPDX-License-Identifier: Apache-2.0
"""Reads Chrome traces that usbyte has written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from usbyte.errors import UsageError


class Span(NamedTuple):
    """One bar of a trace. Times are seconds on the clock of the trace."""

    rank: int
    step: int
    kind: str  #: "compute", "queue", "communication", "wait" or "update"
    name: str  #: of the pass, of the op, or of the parameters
    start_s: float
    end_s: float
    args: Mapping[str, Any]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads all events of a trace.

    Raises:
        UsageError: The file is not such a trace; the message says why.
    """
    try:
        events = json.loads(path.read_text("utf-8"), parse_constant=_refuse)
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise ValueError("it is no list of events")
        return events
    except (OSError, ValueError, RecursionError) as error:
        raise not_a_trace(path, error) from error


def read_spans(path: Path) -> list[Span]:
    """Reads all bars of a trace.

    Raises:
        UsageError: The file is not such a trace; the message says why.
    """
    events = read_events(path)
    try:
        return [_span(event) for event in events if event["ph"] == "X"]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise not_a_trace(path, error) from error


def not_a_trace(path: Path, error: Exception) -> UsageError:
    """Makes the error for a file that is not such a trace."""
    text = f"{error} is missing" if isinstance(error, KeyError) else error
    return UsageError(
        f"cannot read the trace '{path}': {text}; give a file that USBYTE_TIMELINE has made"
    )


def _span(event: Any) -> Span:
    name, start_s = str(event["name"]), float(event["ts"]) * 1e-6
    end_s = start_s + float(event["dur"]) * 1e-6
    if not (math.isfinite(start_s) and start_s <= end_s < math.inf):
        raise ValueError(f"'{name}' has times that are not finite, or ends before it starts")
    args = event["args"]
    return Span(int(event["pid"]), int(args["step"]), event["cat"], name, start_s, end_s, args)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")

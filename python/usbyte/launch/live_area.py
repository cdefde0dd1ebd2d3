# SPDX-License-Identifier: Apache-2.0
"""The last lines of a terminal, where the unfinished lines of the ranks are drawn."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

_PAUSE_S = 0.1  # between drawings, if no line is finished meanwhile
_DEFAULT_ROWS = 24  # of a terminal that does not tell
_UP = b"\x1b[%dA"
_ERASE_BELOW = b"\x1b[J"
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"  # Longer lines are cut, so that each has one row.
_RESET_COLOURS = b"\x1b[0m"


def is_terminal(fd: int) -> bool:
    """Returns whether a descriptor is a terminal that can move its cursor."""
    return os.isatty(fd) and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _size(fd: int) -> tuple[int, int]:
    """Returns columns and rows of a terminal; 0 if it does not tell, or is gone."""
    try:
        return os.get_terminal_size(fd)
    except OSError:  # such as after a hangup, which must not end the job
        return 0, 0


def rank_env(size: int) -> dict[str, str]:
    """Returns variables by which the ranks draw for the launcher's terminal.

    The variables are those that rich and tqdm read. A variable that the user has set stays.

    Args:
        size: The most ranks of the job.

    Returns:
        The variables; none if stdout or stderr of this process is no terminal.
    """
    if not (is_terminal(1) and is_terminal(2)):
        return {}
    env = {"TTY_COMPATIBLE": "1"}
    columns, rows = _size(1)
    if columns and rows:
        left = columns - len(f"[{size - 1}] ")
        env |= {"COLUMNS": str(max(1, left)), "LINES": str(rows)}
    return {name: text for name, text in env.items() if name not in os.environ}


class LiveArea:
    """Draws lines below all others on a terminal, and draws them anew when they change.

    Args:
        fd: Descriptor of the terminal.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._drawn = 0  # rows that are drawn now
        self._next_s: float | None = None  # when to draw, if lines have changed

    def change(self) -> None:
        """Notes that lines have changed, so that they are to be drawn soon."""
        if self._next_s is None:
            self._next_s = time.monotonic() + _PAUSE_S

    def wait_s(self) -> float | None:
        """Returns the seconds until changed lines are to be drawn; None: none have changed."""
        return None if self._next_s is None else max(0.0, self._next_s - time.monotonic())

    def draw(self, above: bytes, lines: Sequence[bytes]) -> bytes:
        """Returns the bytes that write new text above the lines, and draw these.

        Args:
            above: Whole lines, with line ends.
            lines: The lines to draw, without line ends. Only the first are drawn if the terminal
                has not enough rows.
        """
        self._next_s = None
        erase = b""
        if self._drawn:
            up = _UP % (self._drawn - 1) if self._drawn > 1 else b""
            erase = b"\r" + up + _ERASE_BELOW
        lines = lines[: max(1, (_size(self._fd)[1] or _DEFAULT_ROWS) - 1)]
        self._drawn = len(lines)
        if not lines:
            return erase + above
        return (
            erase + above + _NO_WRAP + (_RESET_COLOURS + b"\n").join(lines) + _RESET_COLOURS + _WRAP
        )

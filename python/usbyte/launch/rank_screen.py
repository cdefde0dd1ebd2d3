# SPDX-License-Identifier: Apache-2.0
"""The output of one rank as a terminal would show it: finished lines, and lines that may change."""

from __future__ import annotations

import re

_MAX_LINE_BYTES = 1 << 20
_ROWS = 50  # that are remembered, as the rank may move its cursor back to them
_TOKENS = re.compile(rb"[^\r\n\x1b]+|\r|\n|\x1b\[([0-?]{0,32})[ -/]*([@-~])|\x1b")
_CUT_SEQUENCE = re.compile(rb"\x1b(\[[0-?]{0,32}[ -/]*)?\Z")


class _Row:
    """A line on the screen.

    Attributes:
        text: The line as it is, without line end.
        given: The line as it was when it was last finished; None before.
    """

    def __init__(self) -> None:
        self.text = b""
        self.given: bytes | None = None


class RankScreen:
    r"""Cuts a stream of bytes into lines, and follows the cursor of progress bars.

    `\n` finishes a line. Text behind `\r`, or behind a cursor movement, replaces the line. A
    finished line that the rank goes back to and changes is finished again.

    Args:
        is_live: Whether unfinished lines are shown. Then lines stay unfinished for longer: as many
            above the cursor as the rank has ever gone back.
    """

    def __init__(self, is_live: bool = False) -> None:
        self._is_live = is_live
        self._rows = [_Row()]
        self._at = 0  # the row of the cursor
        self._replaces = True  # whether the next text replaces that of the row
        self._height = 0  # rows above the cursor that stay unfinished
        self._unread = b""  # the beginning of an escape sequence
        self._finished: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` finishes, without line ends."""
        data = self._unread + data
        cut = _CUT_SEQUENCE.search(data)
        data, self._unread = (data[: cut.start()], cut[0]) if cut else (data, b"")
        for token in _TOKENS.finditer(data):
            match token[0], token[2]:
                case b"\n", _:
                    self._begin_next_row()
                case b"\r", _:
                    self._replaces = True
                case text, None | b"m":  # Colours belong to the text.
                    self._write(text)
                case _, kind:
                    self._move(kind, token[1])
        return self._take()

    def live(self) -> list[bytes]:
        """Returns the unfinished lines that are not blank, without line ends."""
        first = len(self._rows) - 1 - self._height
        return [
            row.text
            for i, row in enumerate(self._rows)
            if (i >= first or row.text != row.given) and row.text.strip()
        ]

    def finish(self) -> list[bytes]:
        """Returns the unfinished lines up to the last that is not blank."""
        # A terminal shows nothing of an escape sequence that does not end.
        while self._rows and not self._rows[-1].text.strip():
            self._rows.pop()
        self._give(len(self._rows))
        return self._take()

    def _write(self, text: bytes) -> None:
        row = self._rows[self._at]
        row.text = text if self._replaces else row.text + text
        self._replaces = False
        if len(row.text) > _MAX_LINE_BYTES:
            self._begin_next_row()

    def _begin_next_row(self) -> None:
        self._at += 1
        self._replaces = True
        if self._at == len(self._rows):
            self._rows.append(_Row())
        self._give(self._at - self._height)
        if len(self._rows) > _ROWS:
            self._give(1)
            del self._rows[0]
            self._at -= 1

    def _move(self, kind: bytes, parameters: bytes) -> None:
        rows = max(1, int(parameters)) if parameters.isdigit() else 1
        match kind:
            case b"A":
                self._at = max(0, self._at - rows)
                self._replaces = True
                if self._is_live:
                    self._height = max(self._height, len(self._rows) - 1 - self._at)
            case b"B":
                self._at = min(self._at + rows, len(self._rows) - 1)
                self._replaces = True
            case b"G" if parameters in (b"", b"0", b"1"):
                self._replaces = True
            case b"K" if self._replaces or parameters not in (b"", b"0"):
                self._rows[self._at].text = b""

    def _give(self, count: int) -> None:
        for row in self._rows[: max(0, count)]:
            if row.text != row.given:
                row.given = row.text
                self._finished.append(row.text)

    def _take(self) -> list[bytes]:
        finished, self._finished = self._finished, []
        return finished

# SPDX-License-Identifier: Apache-2.0
"""Progress bars of ranks under usbyterun: live on a terminal, finished lines elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from run_support import PATIENCE_SECONDS
from usbyte.launch import live_area
from usbyte.launch.rank_screen import RankScreen

COLUMNS, ROWS = 60, 24
UNSET = ("TTY_COMPATIBLE", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
ENV = {name: text for name, text in os.environ.items() if name not in UNSET} | {"TERM": "xterm"}

# What tqdm writes for a bar over epochs and one over steps, which is left blank at its end.
NESTED = b"".join([
    b"\repochs: 0%", b"\n\rsteps: 0%\x1b[A", b"\n\rsteps: 50%\x1b[A", b"\n\r          \x1b[A",
    b"\repochs: 50%", b"\n\rsteps: 0%\x1b[A", b"\n\r          \x1b[A", b"\repochs: 100%\n",
])  # fmt: skip

# What rich writes for two bars and a line above them.
PAIR = [
    b"\x1b[?25l\r\x1b[2Kouter 0%\ninner 0%",
    b"\r\x1b[2K\x1b[1A\x1b[2Kouter 0%\ninner 50%",
    b"\r\x1b[2K\x1b[1A\x1b[2Kloss 0.5\nouter 0%\ninner 50%",
    b"\r\x1b[2K\x1b[1A\x1b[2Kouter 100%\ninner \x1b[32m100%\x1b[0m\n\x1b[?25h",
]


def fed(screen: RankScreen, data: bytes, size: int) -> list[bytes]:
    return [line for at in range(0, len(data), size) for line in screen.feed(data[at : at + size])]


def test_lines_are_cut_wherever_the_bytes_are_cut() -> None:
    text = b"one\ntwo\r\n 10%\r 20%\r\xff\x00\n\n\x1b[31mlast"
    for size in range(1, len(text)):
        screen = RankScreen()
        assert fed(screen, text, size) == [b"one", b"two", b"\xff\x00", b""]
        assert screen.finish() == [b"\x1b[31mlast"]


def test_an_endless_line_is_not_kept() -> None:
    screen = RankScreen()
    assert sum(len(line) for _ in range(100) for line in screen.feed(b"x" * 65536)) > 5e6


def test_a_line_without_end_is_the_newest_state() -> None:
    screen = RankScreen()
    assert screen.feed(b"\r 10%\r 20%") == []
    assert screen.live() == [b" 20%"]
    assert screen.finish() == [b" 20%"]


def test_states_of_outer_bars_are_finished_lines_where_nothing_is_live() -> None:
    for size in range(1, len(NESTED)):
        screen = RankScreen()
        assert fed(screen, NESTED, size) == [b"epochs: 0%", b"epochs: 50%", b"epochs: 100%"]
        assert screen.finish() == []


def test_nested_bars_are_live() -> None:
    screen, states = RankScreen(is_live=True), []
    # The first state is finished, as nobody knows yet that the rank will come back to it.
    finished = fed(screen, NESTED[:33], 1)
    assert finished == [b"epochs: 0%"]
    for at in range(33, len(NESTED)):
        finished += screen.feed(NESTED[at : at + 1])
        states.append(screen.live())
    assert [b"epochs: 0%", b"steps: 50%"] in states
    assert [b"epochs: 50%", b"steps: 0%"] in states
    assert states[-1] == [b"epochs: 100%"]
    assert finished + screen.finish() == [b"epochs: 0%", b"epochs: 100%"]


def test_bars_that_are_written_anew_together_are_live() -> None:
    screen = RankScreen(is_live=True)
    found = [(screen.feed(frame), screen.live()) for frame in PAIR]
    assert found == [
        ([b"outer 0%"], [b"inner 0%"]),
        ([], [b"outer 0%", b"inner 50%"]),
        ([b"loss 0.5"], [b"outer 0%", b"inner 50%"]),
        ([b"outer 100%"], [b"inner \x1b[32m100%\x1b[0m"]),
    ]
    assert screen.finish() == [b"inner \x1b[32m100%\x1b[0m"]


def test_only_the_last_rows_can_be_changed() -> None:
    screen = RankScreen(is_live=True)
    lines = [b"%d" % i for i in range(1000)]
    given = screen.feed(b"".join(line + b"\n" for line in lines) + b"\x1b[7777A\rnew")
    assert given == lines
    assert len(screen.live()) < 100
    assert screen.finish() == [b"new"]


# A bar as tqdm draws it, and one of rich. Both stop in the middle, and print a line.
SCRIPT = r"""
import os, sys, time
from pathlib import Path
from rich.progress import Progress

def wait():
    while not Path("seen").exists():
        time.sleep(0.02)

if os.environ["RANK"] == "0":
    print("columns", os.environ.get("COLUMNS"), os.environ.get("TTY_COMPATIBLE"))
    for percent in range(0, 101, 10):
        sys.stderr.write(f"\rtraining {percent:3d}% " + "#" * percent)
        sys.stderr.flush()
        if percent == 50:
            wait()
    sys.stderr.write("\n")
else:
    with Progress() as progress:
        task = progress.add_task("reading", total=4)
        progress.advance(task, 2)
        progress.console.print("half read")
        wait()
        progress.advance(task, 2)
"""


def command(folder: Path) -> list[str]:
    (folder / "bars.py").write_text(SCRIPT)
    return [sys.executable, "-m", "usbyte.launch", "-np", "2", sys.executable, "bars.py"]


def displayed(raw: bytes) -> list[str]:
    """The lines, without blank ones, of a terminal of `COLUMNS` columns that got these bytes."""
    rows, row, column, wraps = [""], 0, 0, True
    text = raw.decode(errors="ignore")
    for token in re.findall(r"\x1b\[[0-?]*[@-~]|.", text, re.DOTALL):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
        elif token[0] != "\x1b":
            if column == COLUMNS and wraps:
                row, column = row + 1, 0
            column = min(column, COLUMNS - 1)
            rows += [""] * (row + 1 - len(rows))
            rows[row] = rows[row].ljust(column)[:column] + token + rows[row][column + 1 :]
            column += 1
        elif token[-1] == "A":
            row -= int(token[2:-1])
        elif token[-1] == "J":
            rows[row:] = [rows[row][:column]]
        elif token in ("\x1b[?7l", "\x1b[?7h"):
            wraps = token[-1] == "h"
        else:
            assert token[-1] == "m", token
        rows += [""] * (row + 1 - len(rows))
    return [line for line in rows if line.strip()]


@contextmanager
def on_terminal(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command(folder), stdin=subprocess.DEVNULL, stdout=inner, stderr=inner, cwd=folder, env=ENV
    )
    os.close(inner)
    try:
        yield process, outer
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)
        os.close(outer)


def read_more(outer: int) -> bytes:
    assert select.select([outer], [], [], PATIENCE_SECONDS)[0], "nothing happens"
    try:
        return os.read(outer, 1 << 16)
    except OSError:  # of a terminal whose programs have ended
        return b""


def test_bars_of_all_ranks_move_on_a_terminal(tmp_path: Path) -> None:
    with on_terminal(tmp_path) as (process, outer):
        raw = b""
        while not re.search(
            # Below whole lines there is one row for each rank, of its last state.
            r"(?s)half read\n.*\[0\] training  50% #{42}\n\[1\] reading [^\n]* 50% \S+$",
            "\n".join(displayed(raw)),
        ):
            more = read_more(outer)
            assert more, displayed(raw)
            raw += more
        (tmp_path / "seen").touch()
        while more := read_more(outer):
            raw += more
        assert process.wait(PATIENCE_SECONDS) == 0
    lines = displayed(raw)
    assert f"[0] columns {COLUMNS - 4} 1" in lines
    assert "[1] half read" in lines
    # A whole line wraps, and each bar is there once, as it was in the end.
    assert [ln for ln in lines if "training" in ln] == ["[0] training 100% " + "#" * 42]
    assert "#" * 58 in lines
    (last,) = [ln for ln in lines if "reading" in ln]
    assert re.fullmatch(r"\[1\] reading \S+ 100% [0-9:]+", last)


def test_finished_lines_come_in_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "seen").touch()
    piped = subprocess.run(
        command(tmp_path), capture_output=True, cwd=tmp_path, env=ENV, timeout=PATIENCE_SECONDS,
        check=True,
    )  # fmt: skip
    out = piped.stdout.decode().splitlines()
    assert piped.stderr == b"[0] training 100% " + b"#" * 100 + b"\n"
    assert [ln for ln in out if ln[1] == "0"] == ["[0] columns None None"]
    half, bar = [ln for ln in out if ln[1] == "1"]
    assert half == "[1] half read"
    assert re.fullmatch(r"\[1\] reading \S+ 100% [0-9:]+", bar)


def test_what_ranks_are_told_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    size = os.terminal_size((60, 24))
    monkeypatch.setattr(live_area, "is_terminal", lambda fd: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: size)
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    assert live_area.rank_env(11) == {"TTY_COMPATIBLE": "1", "COLUMNS": "55", "LINES": "24"}
    monkeypatch.setenv("COLUMNS", "99")  # the user's
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    assert live_area.rank_env(2) == {"LINES": "24"}
    size = os.terminal_size((0, 0))  # not known, as in some CI systems
    monkeypatch.delenv("TTY_COMPATIBLE")
    assert live_area.rank_env(2) == {"TTY_COMPATIBLE": "1"}
    monkeypatch.setattr(live_area, "is_terminal", lambda fd: fd == 2)
    assert live_area.rank_env(2) == {}


def test_terminals_that_cannot_move_their_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = pty.openpty()
    for term, found in (("xterm", True), ("dumb", False), ("", False)):
        monkeypatch.setenv("TERM", term)
        assert live_area.is_terminal(inner) == found
    os.close(outer)
    os.close(inner)


def test_a_terminal_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = pty.openpty()
    area = live_area.LiveArea(inner)
    monkeypatch.setattr(live_area, "is_terminal", lambda fd: True)
    os.close(outer)
    with pytest.raises(OSError, match="Input/output"):
        os.get_terminal_size(inner)
    assert area.draw(b"whole\n", [b"bar"]).startswith(b"whole\n")
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size(os.fstat(-1)))
    assert live_area.rank_env(2).keys() <= {"TTY_COMPATIBLE"}
    os.close(inner)


def test_output_that_ends_within_an_escape_sequence() -> None:
    screen = RankScreen()
    assert screen.feed(b"99%\r\x1b[") == []
    assert screen.finish() == [b"99%"]


def test_bars_that_move_to_the_first_column() -> None:
    screen = RankScreen()
    assert screen.feed(b"\x1b[1G10%\x1b[G20%\x1b[1G30%\n") == [b"30%"]
    digits = b"\x1b[" + b"1" * 5000 + b"A"
    assert screen.feed(b"a" + digits + b"\n") == [b"a" + digits]


def test_more_bars_than_rows() -> None:
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 4, COLUMNS, 0, 0))
    area, raw = live_area.LiveArea(inner), b""
    for above, lines, shown in [
        (b"whole\n", [b"bar %d" % rank for rank in range(9)], ["bar 0", "bar 1", "bar 2"]),
        (b"another\n", [b"last"], ["another", "last"]),
        (b"", [], ["another"]),
    ]:
        raw += area.draw(above, lines).replace(b"\n", b"\r\n")  # as a terminal's driver does
        assert displayed(raw) == ["whole", *shown]
    os.close(outer)
    os.close(inner)

"""Runs the parts: each in a process of its own, with its own log and limit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_report.building import ROOT, Place

PASSED, FAILED, TIMED_OUT, SKIPPED, NOT_RUN = "passed", "failed", "timed out", "skipped", "not run"
_GRACE_S = 15.0  # for a part that is told to end: the lab removes its namespaces
_REASON_CHARS = 300


@dataclass(frozen=True)
class Part:
    """One thing to run.

    Attributes:
        name: Of its log and its results.
        title: For people.
        command: "{results}" stands for the file that takes its results, "{limit}" for the seconds
            that it has.
        limit_s: After which it is ended.
        env: More environment variables.
        results: Turns its file of results into the data that the report shows; None if it has none.
        unsupported: Texts in the log that say that this machine cannot do it.
        quoted: What of the log is worth showing: lines that hold one of these.
        meaning: What is measured, and how each number is defined.
        asks_help: The program's own --help tells the meaning.
    """

    name: str
    title: str
    command: Sequence[str]
    limit_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    results: Callable[[Path], Any] | None = None
    unsupported: Sequence[str] = ()
    quoted: Sequence[str] = ()
    meaning: str = ""
    asks_help: bool = False


@dataclass
class Outcome:
    """What became of a part.

    Attributes:
        name: The part's.
        title: The part's.
        verdict: One of this module's constants.
        seconds: It took.
        reason: Why it was not passed; "" if it was.
        command: As one may type it.
        meaning: The part's.
        quoted: Lines of its log.
        data: Its results; None without.
    """

    name: str
    title: str
    verdict: str
    seconds: float = 0.0
    reason: str = ""
    command: str = ""
    meaning: str = ""
    quoted: list[str] = field(default_factory=list)
    data: Any = None

    @property
    def good(self) -> bool:
        """Whether the whole may pass: it did, or this machine cannot do it."""
        return self.verdict in (PASSED, SKIPPED)


def run(part: Part, left_s: float, place: Place, least_s: float = 0.0) -> Outcome:
    """Runs a part within its limit and what is left of the time for all.

    Args:
        part: To run.
        left_s: Seconds for this and all other parts.
        place: What was built.
        least_s: With less time than this the part is not begun.
    """
    limit_s = min(part.limit_s, left_s)
    if limit_s < least_s:
        return unstarted(part, f"{max(left_s, 0):.0f} s were left of the time for all parts")
    results = place.folder / "results" / f"{part.name}.json"
    log = place.logs / f"{part.name}.log"
    for path in (results, log):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    known = {"{results}": str(results), "{limit}": f"{limit_s:.0f}"}
    command = [known.get(word, word) for word in part.command]
    outcome = Outcome(part.name, part.title, FAILED, command=_shown(command), meaning=part.meaning)
    env = {**place.environ(), **part.env}
    if shutil.which(command[0], path=env["PATH"]) is None:
        own = Path(command[0]).is_relative_to(place.folder)
        outcome.verdict = FAILED if own else SKIPPED
        outcome.reason = f"'{_shown(command[:1])}' " + ("was not built" if own else "is missing")
        return outcome
    start = time.monotonic()
    with log.open("wb") as output:
        code = _wait(command, env, output, limit_s)
    outcome.seconds = time.monotonic() - start
    text = log.read_text(errors="replace")
    outcome.quoted = [
        line.strip() for line in text.splitlines() if any(words in line for words in part.quoted)
    ]
    refusal = next((words for words in part.unsupported if words in text), None)
    if code is None:
        outcome.verdict = TIMED_OUT
        outcome.reason = f"not over after {limit_s:.0f} s: {_last_words(text)}"
    elif code == 0:
        outcome.verdict = PASSED
    elif refusal is not None:
        outcome.verdict, outcome.reason = SKIPPED, f"this machine cannot: {refusal}"
    else:
        outcome.reason = f"exit code {code}: {_last_words(text)}"
    _read(part, results, outcome)
    if part.asks_help:
        outcome.meaning = _about(command[0], env)
    return outcome


def unstarted(part: Part, reason: str) -> Outcome:
    """The outcome of a part that is not begun."""
    return Outcome(part.name, part.title, NOT_RUN, reason=reason, command=_shown(part.command))


def _wait(command: list[str], env: dict[str, str], output: Any, limit_s: float) -> int | None:
    """The exit code; None if the process had to be ended."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env,
        cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        return None
    finally:
        # Also what the process has left behind, and when this one is interrupted.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(part: Part, results: Path, outcome: Outcome) -> None:
    if part.results is None:
        return
    try:
        outcome.data = part.results(results)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if outcome.verdict == PASSED:
            outcome.verdict = FAILED
            outcome.reason = f"its results cannot be read: {type(error).__name__}: {error}"


def read_json(path: Path) -> Any:
    """Results that are JSON already."""
    return json.loads(path.read_text())


def _about(program: str, env: dict[str, str]) -> str:
    """What a benchmark's --help says before it lists the flags."""
    try:
        done = subprocess.run(
            [program, "--help"], capture_output=True, text=True, timeout=30, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    lines = done.stdout.splitlines()
    flags = next((i for i, line in enumerate(lines) if line.startswith("  --")), len(lines))
    return "\n".join(line for line in lines[:flags] if not line.startswith("usage:")).strip("\n")


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "it has said nothing")[:_REASON_CHARS]


def _shown(command: Sequence[str]) -> str:
    """Without this machine's folders."""
    words = []
    for word in command:
        path = Path(word)
        inside = path.is_absolute() and path.is_relative_to(ROOT)
        words.append(str(path.relative_to(ROOT)) if inside else word)
    if words and Path(words[0]).name.startswith("python"):
        words[0] = "python3"
    return " ".join(words)

# SPDX-License-Identifier: Apache-2.0
"""Runs a part in a separate process, with its own log and time limit."""

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
_GRACE_S = 15.0  # Between SIGTERM and SIGKILL: the lab removes its namespaces.
_REASON_CHARS = 300


@dataclass(frozen=True)
class Part:
    """A test or benchmark to run.

    Attributes:
        name: Short name, also of its log and its results.
        title: Heading in the report.
        command: The program and its arguments. "{results}" stands for the path of the results file,
            "{limit}" for the time limit in seconds.
        limit_s: Time limit, in seconds.
        env: Additional environment variables.
        results: Reads the results file and returns the data for the report; None: no results.
        unsupported: Texts in the log which mean that this machine does not support the part.
        quoted: The report quotes log lines that have one of these texts.
        meaning: Description of the measurement and its numbers.
        asks_help: Whether the output of the program's --help is the description.
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
    """The result of a part.

    Attributes:
        name: Name of the part.
        title: Heading of the part.
        verdict: `PASSED`, `FAILED`, `TIMED_OUT`, `SKIPPED` or `NOT_RUN`.
        seconds: Run time.
        reason: Why the part has not passed; "" if it has.
        command: The command for a shell.
        meaning: Description of the measurement and its numbers.
        quoted: Quoted lines of the log.
        data: The results; None if there are none.
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
        """Whether the part has passed, or was skipped as this machine does not support it."""
        return self.verdict in (PASSED, SKIPPED)


def run(part: Part, left_s: float, place: Place, least_s: float = 0.0) -> Outcome:
    """Runs a part within its time limit and the time that is left for all parts.

    Args:
        part: The part.
        left_s: Seconds left for this and all later parts.
        place: The build.
        least_s: With fewer seconds than this, the part is not started.
    """
    limit_s = min(part.limit_s, left_s)
    if limit_s < least_s:
        return unstarted(part, f"only {max(left_s, 0):.0f} s were left of the time for all parts")
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
        outcome.verdict, outcome.reason = SKIPPED, f"not supported on this machine: {refusal}"
    else:
        outcome.reason = f"exit code {code}: {_last_words(text)}"
    _read(part, results, outcome)
    if part.asks_help:
        outcome.meaning = _about(command[0], env)
    return outcome


def unstarted(part: Part, reason: str) -> Outcome:
    """Returns the outcome of a part that was not started."""
    return Outcome(part.name, part.title, NOT_RUN, reason=reason, command=_shown(part.command))


def _wait(command: list[str], env: dict[str, str], output: Any, limit_s: float) -> int | None:
    """Runs a command; returns its exit code, or None after the time limit."""
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
        # Kills processes that the command has left behind, also if this process is interrupted.
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
    """Reads a results file that is JSON."""
    return json.loads(path.read_text())


def _about(program: str, env: dict[str, str]) -> str:
    """Returns the description in a benchmark's --help, before the list of flags."""
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
    return (lines[-1] if lines else "no output")[:_REASON_CHARS]


def _shown(command: Sequence[str]) -> str:
    """Returns a command as text, without paths of this machine."""
    words = []
    for word in command:
        path = Path(word)
        inside = path.is_absolute() and path.is_relative_to(ROOT)
        words.append(str(path.relative_to(ROOT)) if inside else word)
    if words and Path(words[0]).name.startswith("python"):
        words[0] = "python3"
    return " ".join(words)

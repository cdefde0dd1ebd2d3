# SPDX-License-Identifier: Apache-2.0
"""The page of USBYTE_REPORT: a step as it was predicted and as it was measured in this run."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from usbyte import _core
from usbyte._util import files
from usbyte.errors import EnvError, UsageError

log = logging.getLogger("usbyte")

# The first step under a plan allocates memory and takes longer.
_SKIPPED_STEPS = 1
_STEPS = 10

#: Records a timeline from the next step on; None stops.
Recorder = Callable[[_core.TimelineWriter | None], None]


def make_report(env: _core.Env, rank: int, size: int) -> StepReport | None:
    """Returns what writes the page of USBYTE_REPORT; None on ranks that write none.

    Args:
        env: The USBYTE_* settings.
        rank: This process's rank.
        size: Number of ranks.

    Raises:
        EnvError: The path cannot be written.
    """
    if not env.report or rank > 0:
        return None
    report = StepReport(env.report)
    if size > 1:
        return report
    log.warning(
        "USBYTE_REPORT: there will be no page, because a single rank sends nothing: start two or "
        "more, as by usbyterun -np 2"
    )
    return None


class StepReport:
    """Records some steps of the first optimizer whose plan is final, and writes the page once.

    What goes wrong later than in the constructor is logged as a warning and ends no training.

    Args:
        path: The page to write.

    Raises:
        EnvError: The path cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).absolute()  # the script may change the working directory
        if why := files.why_unwritable(self._path):
            raise EnvError(
                f'USBYTE_REPORT="{path}" cannot be used: {why}. Name a file in a folder that '
                "exists and is writable, or unset it."
            )
        self._label = ""  # name of the optimizer that is recorded
        self._last = 0  # last step to record
        self._trace: Path | None = None  # the recorded timeline, while it is needed
        self._is_done = False

    def between_steps(self, label: str, steps: int, is_final: bool, record: Recorder) -> None:
        """Starts or ends recording. Call it when a step begins, with nothing in flight.

        Args:
            label: Name of the optimizer.
            steps: Number of steps that it has completed.
            is_final: Whether its plan is final.
            record: Sets the timeline that records it.
        """
        if self._is_done:
            return
        if self._trace is None:
            if is_final:
                self._begin(label, steps, record)
        elif label == self._label and steps >= self._last:
            record(None)
            self._finish("the recorded steps cannot be drawn")

    def close(self) -> None:
        """Writes the page if it was not written. Call it when the engines have ended."""
        if self._trace is not None:
            self._finish(f"the plan was final too late (train for {self._last} steps or more)")
        elif not self._is_done:
            self._is_done = True
            log.warning(
                "USBYTE_REPORT: there is no page, because no plan was final when training ended: "
                "train for more steps, or set USBYTE_LEARNING_STEPS=2 and pass tune_steps=0"
            )

    def _begin(self, label: str, steps: int, record: Recorder) -> None:
        first = steps + 1 + _SKIPPED_STEPS
        self._label, self._last = label, first + _STEPS - 1
        try:
            handle, name = tempfile.mkstemp(prefix="usbyte-report-", suffix=".json")
            os.close(handle)
            self._trace = Path(name)
            record(_core.TimelineWriter(name, 0, f"{first}:{self._last + 1}"))
        except (OSError, UsageError) as error:
            self._end(f"the steps could not be recorded: {error}. Free space, or set TMPDIR")

    def _finish(self, problem: str) -> None:
        from usbyte.report import html
        from usbyte.report.scene import Scene

        assert self._trace is not None
        try:
            page = html.render(Scene.of_timeline(self._trace))
            files.write_bytes(self._path, page.encode())
        except UsageError as error:
            self._end(f"{problem}: {error}")
        except Exception as error:  # must not end the training
            self._end(f"'{self._path}' could not be written: {error}. Free space, or name another")
        else:
            self._end("")
            log.info("USBYTE_REPORT: wrote '%s'", self._path)

    def _end(self, problem: str) -> None:
        self._is_done = True
        if self._trace is not None:
            with suppress(OSError):
                self._trace.unlink()
            self._trace = None
        if problem:
            log.warning("USBYTE_REPORT: there is no page, because %s", problem)

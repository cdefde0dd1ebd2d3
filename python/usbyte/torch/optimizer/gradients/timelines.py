# SPDX-License-Identifier: Apache-2.0
"""The timelines that the steps of an optimizer are recorded in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.runtime.device import Device, Mark


class PassSource(Protocol):
    """The part of `PassRecorder` that timelines use."""

    def set_enabled(self, wanted: bool) -> None:
        """Starts (True) or stops (False) recording."""

    def take(self) -> Sequence[tuple[str, Mark, Mark]]:
        """Returns name, start and end of the passes that have ended since the last call."""


class Timelines:
    """Two timelines: the script's, and the one of which `StepReport` makes a page.

    Call `attach` before the first use, and whenever there is another engine.

    Args:
        device: Device of the parameters.
        passes: Records forward and backward passes while there is a timeline.
        describe: Returns a plan and what it was made from, as JSON; empty before there is one.
        warn: Logs a warning.

    Attributes:
        writers: Writers of the timelines that are recorded.
    """

    _engine: _core.Engine

    def __init__(
        self,
        device: Device,
        passes: PassSource,
        describe: Callable[[_core.Plan], str],
        warn: Callable[[str], None],
    ) -> None:
        self._device, self._passes, self._describe, self._warn = device, passes, describe, warn
        self._script: _core.TimelineWriter | None = None
        self._report: _core.TimelineWriter | None = None
        self.writers: list[_core.TimelineWriter] = []

    def attach(self, engine: _core.Engine, learning: bool) -> None:
        """Records the steps of an engine from now on.

        Args:
            engine: The engine.
            learning: Whether it runs the learning plan.
        """
        self._engine, self._learning = engine, learning
        if self.writers:
            self._describe_plan(self.writers)
            engine.set_timelines(self.writers)

    def set_script(self, writer: _core.TimelineWriter | None) -> None:
        """Records the script's timeline into `writer` from the next step on; None stops."""
        self._script = writer
        self._set_writers(writer)

    def set_report(self, writer: _core.TimelineWriter | None) -> None:
        """Records the report's timeline into `writer` from the next step on; None stops."""
        self._report = writer
        self._set_writers(writer)

    def stop(self) -> None:
        """Records nothing more, because the engine has failed."""
        self.writers = []

    def record_update(self, tensors: Sequence[int], start: Mark) -> None:
        """Adds an update, begun at `start` and completed now. Call it only if there are writers.

        Args:
            tensors: Indices of the tensors in the plan.
            start: The result of `Device.now` before the update.
        """
        self._device.record_update(self._engine, tensors, start, self._device.now())

    def record_passes(self) -> None:
        """Adds the passes that have ended to the current step."""
        for name, start, end in self._passes.take():
            self._device.record_pass(self._engine, name, start, end)

    def _set_writers(self, new: _core.TimelineWriter | None) -> None:
        self.writers = [each for each in (self._script, self._report) if each is not None]
        self._passes.set_enabled(bool(self.writers))
        self._device.anchor()
        if new is not None:
            self._describe_plan([new])
        self._engine.set_timelines(self.writers)

    def _describe_plan(self, writers: Sequence[_core.TimelineWriter]) -> None:
        if self._learning or not (told := self._describe(self._engine.plan)):
            return
        for writer in writers:
            try:
                writer.describe("usbyte_decision", told)
            except UsageError as error:  # such as a full disk, which must not end training
                self._warn(f"the timeline lacks its plan: {error}")

# SPDX-License-Identifier: Apache-2.0
"""Averages parameters over nodes in the background, and merges the sums some batches later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from usbyte.errors import UsageError
from usbyte.torch.daso.flat_params import ParameterVectors
from usbyte.torch.daso.node_averager import NodeAverager, NodeSum
from usbyte.torch.daso.schedule import DasoSchedule, Start
from usbyte.torch.fault.decision import RankProgress
from usbyte.torch.fault.update_guard import UpdateGuard
from usbyte.torch.runtime.torch_modes import outside_inference_mode


@dataclass
class InFlight:
    """A node averaging whose result has not been used yet.

    Attributes:
        pending: The sum to wait for; None if the vectors hold the sums already.
        wait: S, number of batches from its start to its use.
        left: Batches that remain until its use.
    """

    pending: NodeSum | None
    wait: int
    left: int


class ParamAveraging:
    """The node averagings of one rank: at most one is in flight.

    Args:
        averager: Sums vectors over the nodes; closed by `close`.
        schedule: Says when a node averaging begins.
        update_guard: Serializes changes of the parameters and counts the steps inside the node.

    Attributes:
        averager: Sums vectors over the nodes.
        in_flight: The node averaging in flight; None if there is none.
    """

    def __init__(
        self, averager: NodeAverager, schedule: DasoSchedule, update_guard: UpdateGuard
    ) -> None:
        self.averager, self._schedule, self._update_guard = averager, schedule, update_guard
        self.in_flight: InFlight | None = None
        self._vectors: ParameterVectors | None = None
        self._is_merging = False  # inside `merge`, before the sums have been used
        self._ended = 0  # steps after which `end_batch` has returned

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the vectors that are summed over nodes."""
        assert self._vectors is not None
        return [vector.shape for vector in self._vectors.vectors]

    def status(self) -> dict[str, dict[str, Any]]:
        """Returns the last node averaging that has begun, by label, for messages about faults."""
        return {self.averager.label: {"step": self._schedule.exchanges - 1, "phase": "averaging"}}

    def limit(self, progress: RankProgress) -> RankProgress:
        """Returns the progress of steps whose sums of other nodes have been merged as well.

        Args:
            progress: Progress of the steps inside the node.
        """
        in_step = progress.completed > self._ended
        if not (in_step or self._is_merging):
            return progress
        return RankProgress(progress.completed - in_step, partial=True, completable=False)

    @outside_inference_mode
    def lay_out(self, params: Sequence[nn.Parameter]) -> None:
        """Makes the vectors for another set of parameters. Nothing may be in flight."""
        self._vectors = ParameterVectors(params)

    def end_batch(self) -> None:
        """Ends a batch: merges sums that are due, and begins a node averaging that is due."""
        if self.in_flight is not None:
            self.in_flight.left -= 1
            if self.in_flight.left <= 0:
                self.merge()
        start = self._schedule.end_batch(self.in_flight is not None)
        if start is not None:
            self.begin(start)
        self._ended = self._update_guard.completed

    @torch.no_grad()
    def begin(self, start: Start) -> None:
        """Begins a node averaging; with S = 0 also waits for it and merges it."""
        assert self._vectors is not None
        self._vectors.gather()
        pending = self.averager.start(self._vectors.vectors, start.number)
        self.in_flight = InFlight(pending, start.wait, start.wait)
        if start.wait == 0:
            self.merge()

    @torch.no_grad()
    def merge(self) -> None:
        """Waits for the node averaging in flight, if there is one, and merges its sums."""
        flight = self.in_flight
        if flight is None:
            return
        assert self._vectors is not None
        self._is_merging = True
        self.wait()
        self.in_flight = None
        with self._update_guard.updating():
            self._vectors.merge(flight.wait, self.averager.size)
            self._is_merging = False

    def wait(self) -> None:
        """Waits until the vectors hold the sums of the node averaging in flight."""
        flight = self.in_flight
        if flight is not None and flight.pending is not None:
            self.averager.wait(flight.pending)
            flight.pending = None

    def state(self) -> dict[str, Any] | None:
        """Waits for the node averaging in flight and returns it for a checkpoint; None if none."""
        if (flight := self.in_flight) is None:
            return None
        assert self._vectors is not None
        self.wait()
        return {
            "wait": flight.wait,
            "left": flight.left,
            "nodes": self.averager.size,
            "sums": [vector.clone() for vector in self._vectors.vectors],
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Replaces the node averaging in flight by that of a checkpoint; None for none.

        Call `wait` first.
        """
        self.in_flight = None
        if state is not None:
            assert self._vectors is not None
            for vector, sums in zip(self._vectors.vectors, state["sums"], strict=True):
                vector.copy_(sums)
            self.in_flight = InFlight(None, state["wait"], state["left"])

    def fail(self, verdict: str) -> None:
        """Makes every wait raise FaultError(verdict)."""
        self.averager.fail(verdict)

    def finish(self) -> None:
        """Merges the node averaging in flight, unless communication has failed."""
        if not self.averager.failed:
            self.merge()

    def close(self) -> None:
        """Ends the averager's thread."""
        self.averager.close()


def check_loadable(state: Mapping[str, Any], nodes: int, shapes: Sequence[torch.Size]) -> None:
    """Checks that a node averaging of a checkpoint fits.

    Args:
        state: The result of `ParamAveraging.state`.
        nodes: Number of nodes here.
        shapes: Shapes of the vectors here; empty with a single node.

    Raises:
        UsageError: It was in flight between another number of nodes, or with other parameters.
    """
    if (state["nodes"], [v.shape for v in state["sums"]]) != (nodes, list(shapes)):
        raise UsageError(
            f"this state has a node averaging in flight between {state['nodes']} nodes, and there "
            f"are {nodes} here, or other parameters: save it after synchronize_nodes() to load it "
            "elsewhere"
        )

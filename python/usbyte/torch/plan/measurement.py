# SPDX-License-Identifier: Apache-2.0
"""Measures the profile of a job in the learning steps: ready times and need times."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from usbyte import _core
from usbyte.planning.layout import tensor_specs
from usbyte.torch.layout import CONTROL_TENSOR, dtype_name, rows_of, used_numel
from usbyte.torch.plan.sparse import sparse_spec
from usbyte.torch.runtime.device import Mark

NEVER = float("inf")


@dataclass(frozen=True)
class Iteration:
    """The measured times of one learning step, which runs DDP's buckets in backward mode.

    Attributes:
        need_s: First use of each parameter in the forward pass, in seconds of the steady clock;
            NEVER if no use was observed.
        ready_s: Ready time of each parameter's gradient, in seconds of the steady clock.
        comm_wait_s: Seconds of waiting for the network after backward.
        update_s: Seconds of the optimizer update.
    """

    need_s: Sequence[float]
    ready_s: Sequence[float]
    comm_wait_s: float
    update_s: float

    @classmethod
    def of(
        cls,
        needed: Sequence[Mark | None],
        ready: Sequence[float],
        comm_wait_s: float,
        update_s: float,
    ) -> Iteration:
        """Converts marks to seconds. Blocks until the device has passed all of them.

        Args:
            needed: First use of each parameter; None if no use was observed.
            ready: The values of `ready_s`.
            comm_wait_s: Seconds of waiting for the network after backward.
            update_s: Seconds of the optimizer update.
        """
        need = [NEVER if mark is None else float(mark) for mark in needed]
        return cls(need, ready, comm_wait_s, update_s)

    @property
    def start_s(self) -> float:
        """Start of the step, in seconds of the steady clock: the first observed use or gradient."""
        return min(min(self.need_s), min(self.ready_s))


@dataclass
class JobTimes:
    """The times of a job, named as in `usbyte._core.Profile`. All values are in seconds.

    Attributes:
        need_s: Need time of each parameter, from the start of the step.
        ready_s: Ready time of each parameter's gradient, from the start of the step.
        need_spread_s: Half the distance between the 10th and 90th percentiles of each need time;
            may be empty.
        ready_spread_s: The same for each ready time; may be empty.
        step_s: Time from one forward pass to the next, without waits for the network.
        update_s: Time of the optimizer update.
    """

    need_s: list[float]
    ready_s: list[float]
    need_spread_s: list[float]
    ready_spread_s: list[float]
    step_s: float
    update_s: float


class StepProfiler:
    """Collects the measured iterations of the learning steps.

    Args:
        warm_up: Number of first iterations to discard, if there are more; default 1.
    """

    def __init__(self, warm_up: int = 1) -> None:
        self._warm_up = warm_up
        self._iterations: list[Iteration] = []

    def add(self, iteration: Iteration) -> None:
        """Appends an iteration."""
        self._iterations.append(iteration)

    def __len__(self) -> int:
        return len(self._iterations)

    def times(self) -> JobTimes:
        """Returns the medians and spreads over the iterations after warm-up."""
        kept = self._iterations[self._warm_up :] or self._iterations
        # Without an observed use there is no forward pre-hook: assume that it is needed at once.
        need = np.array([[_since(t, i.start_s) for t in i.need_s] for i in kept])
        ready = np.array([[_since(t, i.start_s) for t in i.ready_s] for i in kept])
        update = float(np.median([i.update_s for i in kept]))
        ends = ready.max(axis=1) + [i.update_s for i in kept]
        periods = [after.start_s - i.start_s - i.comm_wait_s for i, after in pairwise(kept)]
        step = float(np.median(periods or ends))
        middle = np.median(ready, axis=0)
        step = max(step, float(middle.max()) + update)
        return JobTimes(
            # A first use after backward belongs to the next step: it counts as the last need.
            np.minimum(np.median(need, axis=0), step).tolist(),
            middle.tolist(),
            _spread(need),
            _spread(ready),
            step,
            update,
        )


def max_over_ranks(
    times: JobTimes, allreduce_max: Callable[[torch.Tensor], torch.Tensor]
) -> JobTimes:
    """Returns the element-wise maximum of the times over all ranks, the same on every rank.

    Collective.

    Args:
        times: This rank's times, with spreads.
        allreduce_max: Called with a 1-d float64 CPU tensor; returns its element-wise maximum over
            ranks.
    """
    n = len(times.need_s)
    columns = [times.need_s, times.ready_s, times.need_spread_s, times.ready_spread_s]
    flat = [value for column in columns for value in column]
    numbers = torch.tensor([*flat, times.step_s, times.update_s], dtype=torch.float64, device="cpu")
    values: list[float] = allreduce_max(numbers).tolist()
    need, ready, need_spread, ready_spread = (values[k * n : (k + 1) * n] for k in range(4))
    step, update = values[4 * n :]
    return JobTimes(need, ready, need_spread, ready_spread, max(step, max(ready) + update), update)


def job_profile(
    names: Sequence[str],
    params: Sequence[nn.Parameter],
    times: JobTimes,
    *,
    flags: bool,
    sparse: Container[str] = (),
    model: str = "",
) -> _core.Profile:
    """Returns the profile of a job, with its tensors in the order of the flat buffer.

    Args:
        names: Name of each parameter.
        params: The parameters, in the order of `names`.
        times: The times of the parameters, in the same order. Spreads may be empty.
        flags: Whether to put the control tensor, which carries the used flags, first.
        sparse: Names of the parameters with sparse gradients. Their tensors come last, by ready
            time.
        model: Name of the job; default empty.

    Raises:
        UsageError: The gradients of a parameter cannot be sent.
    """
    # One segment per dtype, the largest first, so that blocks can span many tensors.
    dtypes = [dtype_name(name, param) for name, param in zip(names, params, strict=True)]
    volume: dict[str, int] = {}
    there = [i for i, name in enumerate(names) if name not in sparse]
    for i in there:
        volume[dtypes[i]] = volume.get(dtypes[i], 0) + params[i].numel()
    order = sorted(there, key=lambda i: (-volume[dtypes[i]], dtypes[i], times.need_s[i]))
    rows = [(names[i], params[i].numel(), dtypes[i]) for i in order]
    first = rows[0][2] if rows else "float32"
    matrices = {name: rows_of(param) for name, param in zip(names, params, strict=True)}
    tensors = tensor_specs(
        [(CONTROL_TENSOR, used_numel(len(names)), first)] * flags + rows, matrices
    )
    end = tensors[-1].end if tensors else 0
    apart = sorted(set(range(len(names))).difference(there), key=lambda i: times.ready_s[i])
    tensors += [sparse_spec(names[i], params[i], end) for i in apart]
    order += apart

    def column(values: Sequence[float], first: float) -> list[float]:
        return [first] * flags + [values[i] for i in order] if values else []

    return _core.Profile(
        tensors,
        # The used flags are complete when backward is, and the first update may need them.
        column(times.need_s, 0.0),
        column(times.ready_s, max(times.ready_s)),
        times.step_s,
        times.update_s,
        model,
        column(times.need_spread_s, 0.0),
        column(times.ready_spread_s, 0.0),
    )


def _since(time_s: float, start_s: float) -> float:
    return max(time_s - start_s, 0.0) if time_s != NEVER else 0.0


def _spread(rows: np.ndarray) -> list[float]:
    low, high = np.percentile(rows, [10, 90], axis=0)
    spread: list[float] = ((high - low) / 2).tolist()
    return spread

# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of the network: times collectives on the path that training uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import fmean, median

import torch

from usbyte import _core
from usbyte.planning.cost_fit import (
    BUSY,
    ONE_SHOT,
    PACKED,
    SHOT_BUSY,
    SHOTS,
    Measured,
    concurrent,
    fit_lines,
)
from usbyte.planning.layout import tensor_specs
from usbyte.torch.comm.base import EngineCommunicator
from usbyte.torch.comm.pack_buffers import PackBufferPool
from usbyte.torch.world.rank_group import RankGroup

# Collectives to time, by number of ops that are posted together.
_WINDOWS = {
    1: [["all_reduce"], ["reduce_scatter", "all_gather"]],
    2: [["all_reduce"], ["reduce_scatter", "all_gather"]],
    4: [["all_reduce"]],
}
# Smallest size that cost lines are fitted to. It is raised above the size of direct all-reduces.
_SMALLEST_BYTES = 4 << 10
LARGEST_BYTES = 32 << 20
_STEP_S = 0.05  # rough upper limit for the time of the largest op
REPEATS = 4
_GROWTH = 4  # ratio of one size to the next smaller one
# A large op beside a small one has this many times the largest size, at most LARGEST_BYTES, so that
# the small one ends first.
_LONGER = 4
_MOST_AHEAD = 3  # a network that runs more than these ops at once counts as one without a limit
# Batches of one size follow each other without a pause, as in training. They fill the time of
# _SPAN batches of the smallest size, but about _SPAN_S seconds at most. Times of small ops vary so
# much that many batches are needed.
_SPAN, _SPAN_S = 64, 0.15
_FEWEST_GROUPS, _MOST_GROUPS = 2, 32
_CREDITED = 0.5  # share of the startup overlap that counts in dimensions, as in policy "auto"
_MOST_BYTES = _FEWEST_GROUPS * LARGEST_BYTES  # limit for the payload of all timed batches of a size
_SHOTS = 16  # direct all-reduces that are posted together
_FLOAT_BYTES = 4
_UNLIMITED = 1 << 62


def share(rank_group: RankGroup, name: str, network: _core.NetworkModel) -> _core.NetworkModel:
    """Returns rank 0's network model on every rank. Collective.

    Args:
        rank_group: The ranks that take part.
        name: Prefix of the collective's name.
        network: This rank's network model; only rank 0's is used.
    """
    payload = network.to_json().encode()
    return _core.NetworkModel.from_json(
        rank_group.eager.broadcast_bytes(f"{name}.network", payload, 0).decode(errors="replace")
    )


def measure(
    rank_group: RankGroup,
    communicator: EngineCommunicator,
    largest_bytes: int,
    *,
    repeats: int = REPEATS,
    care: float = 1.0,
) -> list[Measured]:
    """Times collectives on a communicator. Collective.

    Nothing else may use the communicator during the call.

    Args:
        rank_group: The ranks that take part.
        communicator: The communicator to measure. Its registered buffer is replaced.
        largest_bytes: Upper limit of the payloads that cost lines are fitted to, in bytes. It is
            raised if it is too small for a fit. Large ops beside a small one, and packed ones, have
            up to four times as many bytes.
        repeats: Measurements of each size; default 4.
        care: Factor for the duration of each measurement; default 1.

    Returns:
        The measurements, for `usbyte.planning.cost_fit.fit`. They may differ between ranks.
    """
    sizes = _Sizes.choose(rank_group, communicator, "all_reduce", largest_bytes, care)
    largest = sizes.largest

    def time_window(window: int) -> list[Measured]:
        return _time(
            rank_group, communicator, _WINDOWS[window], window, sizes.groups(window), repeats
        )

    rows = time_window(1)
    large = max(min(_LONGER * largest, LARGEST_BYTES), largest)
    if communicator.device.core is None:  # CUDA ops pack on the way, or not at all
        rows += _time_packing(rank_group, communicator, large, repeats)
    for ahead in range(1, _MOST_AHEAD + 1):
        rows += _time_busy(rank_group, communicator, large, ahead, repeats)
        found = concurrent(rows) or 0
        # Rank 0's value, because all ranks must leave the loop together.
        together = rank_group.eager.broadcast_json("usbyte.probe.concurrent", found, 0, int)
        if together > 0:
            break
    if communicator.direct_allreduce_max_bytes > 0:
        rows += _time_one_shot(rank_group, communicator, large, repeats)
    for window in _WINDOWS:
        if 1 < window <= (together or max(_WINDOWS)):
            rows += time_window(window)
    return rows


def measure_dimensions(
    rank_group: RankGroup,
    communicator: EngineCommunicator,
    largest_bytes: int,
    *,
    repeats: int = REPEATS,
) -> _core.Topology | None:
    """Measures the speed of each dimension of a mesh. Collective.

    The dimensions are measured in turn. In a dimension, all mesh axis groups run at the same time,
    because they share resources in training too, such as the network interface of a host. The
    slowest group's speed is used.

    Args:
        rank_group: The ranks that take part.
        communicator: The communicator to measure. Nothing else may use it, or its host
            communicator if it is host-staged, during the call.
        largest_bytes: Upper limit of the payloads in bytes, as in `measure`.
        repeats: Measurements of each size; default 4.

    Returns:
        The topology with measured speeds, the same on every rank. All dimensions are rings, because
        communicators use them as rings. A topology whose speeds the user gave is returned as it is.
        None if the communicator has no dimensions.
    """
    mesh = communicator.mesh
    if mesh is None:
        return None
    if mesh.is_measured:
        return mesh.topology
    found = []
    for dimension, its in zip(mesh.topology.dimensions, mesh.axis_groups, strict=True):
        costs = None if its is None else _line_costs(rank_group, its, largest_bytes, repeats)
        everyone = rank_group.eager.allgather_json(
            "usbyte.probe.dimension", costs, tuple[float, float] | None
        )
        known = [row for row in everyone if row is not None]
        startup_s, s_per_byte = map(max, zip(*known, strict=True)) if known else (0.0, 1.0)
        steps = max(dimension.size - 1, 1)
        share = steps / dimension.size  # part of the vector that a rank sends
        found.append(
            _core.Dimension(
                dimension.name, dimension.size, share / max(s_per_byte, 1e-15), startup_s / steps
            )
        )
    return _core.Topology(found)


def _line_costs(
    rank_group: RankGroup, axis_group: EngineCommunicator, largest_bytes: int, repeats: int
) -> tuple[float, float]:
    """Returns (startup s, s per byte) in a mesh axis group: mean of reduce_scatter and all_gather.

    Bytes are those of the whole vector.
    """
    kinds = ["reduce_scatter", "all_gather"]
    sizes = _Sizes.choose(rank_group, axis_group, kinds[0], largest_bytes)
    rows = _time(rank_group, axis_group, [kinds], 1, sizes.groups(1), repeats)
    costs = [found.cost for found in fit_lines(rows)]
    # Too few sizes for a fit look like a complete startup overlap. With full credit for it, the
    # startups of chunks would seem to be free.
    startup_s = fmean(cost.alpha_s - _CREDITED * cost.overlap_s for cost in costs)
    return startup_s, fmean(cost.beta_s_per_byte for cost in costs)


@dataclass(frozen=True)
class _Sizes:
    """The sizes to time, and how often; the same on all ranks.

    Attributes:
        sizes: Payloads in bytes, ascending.
        small_s: Seconds of an op of the smallest size.
        s_per_byte: Seconds per byte of a larger op.
        care: Factor for the duration of a measurement.
    """

    sizes: list[int]
    small_s: float
    s_per_byte: float
    care: float

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    @classmethod
    def choose(
        cls,
        rank_group: RankGroup,
        communicator: EngineCommunicator,
        kind: str,
        largest_bytes: int,
        care: float = 1.0,
    ) -> _Sizes:
        """Chooses the sizes from a short measurement of two sizes. Collective.

        Args:
            rank_group: The ranks that take part.
            communicator: The communicator to measure.
            kind: "all_reduce" or "reduce_scatter".
            largest_bytes: Upper limit of the sizes.
            care: Factor for the duration of a measurement.
        """
        smallest = _smallest(communicator)
        some = max(min(1 << 20, largest_bytes), 2 * smallest) // _FLOAT_BYTES * _FLOAT_BYTES
        fewest = {smallest: _FEWEST_GROUPS, some: _FEWEST_GROUPS}
        kinds = next(kinds for kinds in _WINDOWS[1] if kind in kinds)
        timed = _time(rank_group, communicator, [kinds], 1, fewest, 2)
        rows = [row for row in timed if row.kind == kind]
        small_s, some_s = (median(r.seconds for r in rows if r.bytes == size) for size in fewest)
        # Every rank must choose the same sizes and numbers of batches.
        times = rank_group.eager.broadcast_json(
            "usbyte.probe.times", [small_s, some_s], 0, tuple[float, float]
        )
        small_s, some_s = (max(seconds, 1e-6) for seconds in times)
        largest = int(min(largest_bytes, (1 << 20) * max(_STEP_S / max(small_s, some_s), 1)))
        largest = max(largest, 4 * smallest)  # a cost line needs two sizes
        return cls(_sizes(smallest, largest), small_s, some_s / some, care)

    def groups(self, window: int) -> dict[int, int]:
        """Returns the number of batches of `window` ops to time, by the size of an op in bytes."""
        counts = {}
        span_s = self.care * min(_SPAN * self.small_s, _SPAN_S)
        most_bytes = max(_MOST_BYTES // (_FEWEST_GROUPS * window), self.sizes[0])
        for size in sorted({min(size, most_bytes) for size in self.sizes}):
            seconds = window * max(self.small_s, self.s_per_byte * size)
            most = min(_MOST_GROUPS, _MOST_BYTES // (window * size))
            counts[size] = max(min(int(span_s / seconds), most), _FEWEST_GROUPS)
        return counts


def _smallest(communicator: EngineCommunicator) -> int:
    """Returns the smallest payload in bytes that cost lines are fitted to."""
    return max(_SMALLEST_BYTES, 1 << communicator.direct_allreduce_max_bytes.bit_length())


def _sizes(low: int, high: int) -> list[int]:
    """Returns sizes from low to high, each about `_GROWTH` times the previous one."""
    sizes, size = [high], high // _GROWTH
    while size >= 2 * low:
        sizes.append(size)
        size //= _GROWTH
    return sorted({low, *sizes})


def _time(
    rank_group: RankGroup,
    communicator: EngineCommunicator,
    series: list[list[str]],
    window: int,
    groups: dict[int, int],
    repeats: int,
) -> list[Measured]:
    """Times batches of ops of several sizes.

    Args:
        rank_group: The ranks that take part.
        communicator: The communicator to measure.
        series: Lists of collectives; those of a list run in one engine step, one kind after the
            other.
        window: Number of ops in a batch.
        groups: Number of batches, by the size of an op in bytes.
        repeats: Measurements of each size.
    """
    rows = []
    longest = max((count + 1) * window * size for size, count in groups.items())
    buffer = _zeros(communicator, longest)
    # All sizes in each repetition, so that a disturbance cannot affect all measurements of a size.
    for _, size, kinds in product(range(repeats), groups, series):
        plan = _plan(kinds, window, [size // _FLOAT_BYTES] * (groups[size] + 1))
        with _engine(rank_group, communicator, buffer, plan) as engine:
            _run(engine, len(plan.tensors), communicator.device.stream())
            for kind, ends in zip(kinds, _ends(engine, window), strict=True):
                rows.append(Measured(kind, window, window * size, _mean_s(ends)))
    return rows


def _time_packing(
    rank_group: RankGroup, communicator: EngineCommunicator, size: int, repeats: int
) -> list[Measured]:
    """Times packing and unpacking of two blocks of `size` bytes in total.

    All ranks pack at the same time, as the ranks of a host do in training.
    """
    [tensor] = tensor_specs([("probe0", 1, "float32")])
    meet = _core.Op("all_reduce", [(tensor.offset, tensor.end)], _UNLIMITED)
    half = size // _FLOAT_BYTES // 2
    floats = torch.zeros(2 * half, dtype=torch.float32, device="cpu")
    views, staging, rows = [floats[:half], floats[half:]], PackBufferPool(), []
    buffer = _zeros(communicator, _FLOAT_BYTES)
    with _engine(rank_group, communicator, buffer, _core.Plan("probe", [tensor], [meet])) as engine:
        for _ in range(repeats + 1):
            _run(engine, 1, communicator.device.stream())
            start = _core.now_s()
            staging.unpack(staging.pack(views))
            rows.append(Measured(PACKED, 1, floats.nbytes, _core.now_s() - start))
    return rows[1:]  # the first one touches new memory


def _time_busy(
    rank_group: RankGroup,
    communicator: EngineCommunicator,
    large_bytes: int,
    ahead: int,
    repeats: int,
) -> list[Measured]:
    """Times a small all_reduce that is posted right behind `ahead` large ones.

    With a single large one, its time is recorded too: larger ops give a more exact cost per byte.
    """
    sizes = [*[large_bytes] * ahead, _smallest(communicator)]
    rows = []
    for times in _time_together(rank_group, communicator, sizes, repeats):
        posted, done = times[-1]
        rows.append(Measured(BUSY, ahead + 1, ahead * large_bytes, done - posted))
        if ahead == 1:
            posted, done = times[0]
            rows.append(Measured("all_reduce", 1, large_bytes, done - posted))
    return rows


def _time_one_shot(
    rank_group: RankGroup, communicator: EngineCommunicator, large_bytes: int, repeats: int
) -> list[Measured]:
    """Times direct all-reduces: between small ops, several together, and behind a large op."""
    rows = []
    small, numel = (
        bytes_ // _FLOAT_BYTES
        for bytes_ in (_smallest(communicator), communicator.direct_allreduce_max_bytes)
    )
    size = numel * _FLOAT_BYTES
    buffer = _zeros(communicator, _SHOTS * (small + numel) * _FLOAT_BYTES)
    alternating = _plan(["all_reduce"], 1, [small, numel] * _SHOTS)
    with _engine(rank_group, communicator, buffer, alternating) as engine:
        for _ in range(repeats):
            _run(engine, len(alternating.tensors), communicator.device.stream())
            [ends] = _ends(engine, 1)
            rows.append(Measured(ONE_SHOT, 1, size, _mean_s(ends, every=2)))
    together = _plan(["all_reduce"], 1, [small] + [numel] * _SHOTS, fences=2)
    with _engine(rank_group, communicator, buffer, together) as engine:
        for _ in range(repeats):
            _run(engine, len(together.tensors), communicator.device.stream())
            [(before, *ends)] = _ends(engine, 1)
            rows.append(Measured(SHOTS, _SHOTS, _SHOTS * size, max(ends) - before))
    for times in _time_together(rank_group, communicator, [large_bytes, size], repeats):
        posted, done = times[1]
        rows.append(Measured(SHOT_BUSY, 1, size, done - posted))
    return rows


def _time_together(
    rank_group: RankGroup, communicator: EngineCommunicator, sizes: list[int], repeats: int
) -> Iterator[list[tuple[float, float]]]:
    """Yields the (begin, end) times of all_reduces that are posted together, `repeats` times.

    Times are in seconds; `sizes` are in bytes, in the order of posting.
    """
    plan = _plan(["all_reduce"], 1, [size // _FLOAT_BYTES for size in sizes], fences=1)
    buffer = _zeros(communicator, sum(sizes))
    with _engine(rank_group, communicator, buffer, plan) as engine:
        for _ in range(repeats):
            _run(engine, len(sizes), communicator.device.stream())
            yield engine.op_times()


@contextmanager
def _engine(
    rank_group: RankGroup, communicator: EngineCommunicator, buffer: torch.Tensor, plan: _core.Plan
) -> Iterator[_core.Engine]:
    engine = _core.Engine(
        plan,
        buffer.data_ptr(),
        communicator.core,
        stall_warning_s=rank_group.env.stall_warning_s,
        stall_limit_s=rank_group.env.stall_limit_s,
        device=communicator.device.core,
        on_warning=rank_group.warn,
        on_stall=partial(rank_group.query_stragglers, "probe"),
        on_fault=rank_group.report_fault,
    )
    try:
        yield engine
    finally:
        engine.close()


def _zeros(communicator: EngineCommunicator, size: int) -> torch.Tensor:
    """Returns a zeroed buffer of `size` bytes, and makes it the communicator's flat buffer."""
    device = communicator.device.torch_device
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    communicator.register(buffer)
    return buffer


def _run(engine: _core.Engine, tensors: int, stream: int) -> None:
    engine.begin_step(stream)
    for i in range(tensors):
        engine.ready(i, stream)
    engine.end_backward()
    for i in range(tensors):  # as forward pre-hooks do
        engine.wait(i, stream)
    engine.drain(stream)


def _plan(
    kinds: list[str], window: int, numels: list[int], fences: int | None = None
) -> _core.Plan:
    """Returns a plan of batches of `window` ops, a series of batches for each kind.

    Args:
        kinds: Collectives, in order.
        window: Number of ops in a batch.
        numels: Elements of an op, for each batch.
        fences: Number of first batches that wait until the previous batch has ended; None for all.
    """
    each = [numel for numel in numels for _ in range(window)]
    fenced = range(0, len(each) if fences is None else fences * window, window)
    tensors = tensor_specs((f"probe{i}", numel, "float32") for i, numel in enumerate(each))
    ops = [
        _core.Op(kind, [(t.offset, t.end)], _UNLIMITED, fence=i in fenced)
        for kind in kinds
        for i, t in enumerate(tensors)
    ]
    return _core.Plan("probe", tensors, ops)


def _mean_s(ends: list[float], every: int = 1) -> float:
    """Returns the mean time of batches 1, 1 + every, 1 + 2 * every, ... in seconds.

    The time of a batch is from the end of the previous one to its own end.
    """
    return fmean(ends[i] - ends[i - 1] for i in range(1, len(ends), every))


def _ends(engine: _core.Engine, window: int) -> list[list[float]]:
    """Returns for each kind of collective the end time of each batch, in seconds."""
    times, count = engine.op_times(), len(engine.plan.tensors)
    done = [end for _, end in times]
    return [
        [max(done[i : i + window]) for i in range(k, k + count, window)]
        for k in range(0, len(done), count)
    ]

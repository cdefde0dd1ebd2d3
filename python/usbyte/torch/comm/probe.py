# SPDX-License-Identifier: Apache-2.0
"""What the network costs: collectives timed on the very path that training uses."""

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

# By operations posted together.
_WINDOWS = {
    1: [["all_reduce"], ["reduce_scatter", "all_gather"]],
    2: [["all_reduce"], ["reduce_scatter", "all_gather"]],
    4: [["all_reduce"]],
}
_SMALLEST_BYTES = 4 << 10  # or more, as smaller ones may go in one shot
LARGEST_BYTES = 32 << 20
_STEP_S = 0.05  # about how long the largest operation may take
REPEATS = 4
_GROWTH = 4  # from one size to the next
_LONGER = 4  # times the largest, if that is no more than LARGEST_BYTES: lasts until a small
# operation beside it is through
_MOST_AHEAD = 3  # more than that in flight is as good as any number
# Groups of one size go one after the other without a pause, as in training, for as long as that
# many of the smallest size would take, but not much longer than the time below: the times of small
# ones vary so much that many must count.
_SPAN, _SPAN_S = 64, 0.15
_FEWEST_GROUPS, _MOST_GROUPS = 2, 32
_CREDITED = 0.5  # of the overlap of startups on lines, as auto does
_MOST_BYTES = _FEWEST_GROUPS * LARGEST_BYTES  # of all groups that count
_SHOTS = 16  # of one shot each, together
_FLOAT_BYTES = 4
_UNLIMITED = 1 << 62


def share(rank_group: RankGroup, name: str, network: _core.NetworkModel) -> _core.NetworkModel:
    """Rank 0's model, on every rank."""
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
    """Times collectives over the communicator, which nothing else uses meanwhile. Collective.

    Args:
        rank_group: The ranks that take part.
        communicator: Its registered buffer is replaced.
        largest_bytes: Upper limit to the payloads that lines are fitted to, though these are no
            smaller than a line needs. What runs beside a small operation, or is packed, is up to
            four times as large.
        repeats: Measurements of each size.
        care: How long each of them lasts, as a share of what is usual.
    """
    sizes = _Sizes.choose(rank_group, communicator, "all_reduce", largest_bytes, care)
    largest = sizes.largest

    def time_window(window: int) -> list[Measured]:
        return _time(
            rank_group, communicator, _WINDOWS[window], window, sizes.groups(window), repeats
        )

    rows = time_window(1)
    large = max(min(_LONGER * largest, LARGEST_BYTES), largest)
    if communicator.device.core is None:  # devices pack on the way, or not at all
        rows += _time_packing(rank_group, communicator, large, repeats)
    for ahead in range(1, _MOST_AHEAD + 1):
        rows += _time_busy(rank_group, communicator, large, ahead, repeats)
        found = concurrent(rows) or 0  # on which all ranks must agree
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
    """Times the lines of a mesh, one dimension after the other, all its lines at once. Collective.

    Lines share what they share in training, such as the interface of a host. The slowest counts.

    Args:
        rank_group: The ranks that take part.
        communicator: Nothing else uses it, or its host's, meanwhile.
        largest_bytes: Upper limit to the payloads, as of `measure`.
        repeats: Measurements of each size.

    Returns:
        The dimensions as rings, as which they are used, the same on every rank; None if the
        communicator has none. Those whose speeds were given stay.
    """
    mesh = communicator.mesh
    if mesh is None:
        return None
    if mesh.is_measured:
        return mesh.topology
    found = []
    for dimension, its in zip(mesh.topology.dimensions, mesh.lines, strict=True):
        costs = None if its is None else _line_costs(rank_group, its, largest_bytes, repeats)
        everyone = rank_group.eager.allgather_json(
            "usbyte.probe.dimension", costs, tuple[float, float] | None
        )
        known = [row for row in everyone if row is not None]
        startup_s, s_per_byte = map(max, zip(*known, strict=True)) if known else (0.0, 1.0)
        steps = max(dimension.size - 1, 1)
        share = steps / dimension.size  # of the vector, that a rank sends
        found.append(
            _core.Dimension(
                dimension.name, dimension.size, share / max(s_per_byte, 1e-15), startup_s / steps
            )
        )
    return _core.Topology(found)


def _line_costs(
    rank_group: RankGroup, line: EngineCommunicator, largest_bytes: int, repeats: int
) -> tuple[float, float]:
    """Seconds and seconds per byte of the vector, of a reduce_scatter or all_gather on average."""
    kinds = ["reduce_scatter", "all_gather"]
    sizes = _Sizes.choose(rank_group, line, kinds[0], largest_bytes)
    rows = _time(rank_group, line, [kinds], 1, sizes.groups(1), repeats)
    costs = [found.cost for found in fit_lines(rows)]
    # A whole overlap is what too few sizes to tell look like, and chunks would seem free.
    startup_s = fmean(cost.alpha_s - _CREDITED * cost.overlap_s for cost in costs)
    return startup_s, fmean(cost.beta_s_per_byte for cost in costs)


@dataclass(frozen=True)
class _Sizes:
    """What is timed, the same on all ranks.

    Attributes:
        sizes: Bytes, ascending.
        small_s: What one of the smallest size takes.
        s_per_byte: What a byte of a larger one takes.
        care: See `measure`.
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
        """From what two sizes take. Collective."""
        smallest = _smallest(communicator)
        some = max(min(1 << 20, largest_bytes), 2 * smallest) // _FLOAT_BYTES * _FLOAT_BYTES
        fewest = {smallest: _FEWEST_GROUPS, some: _FEWEST_GROUPS}
        kinds = next(kinds for kinds in _WINDOWS[1] if kind in kinds)
        timed = _time(rank_group, communicator, [kinds], 1, fewest, 2)
        rows = [row for row in timed if row.kind == kind]
        small_s, some_s = (median(r.seconds for r in rows if r.bytes == size) for size in fewest)
        # Every rank must choose the same sizes and numbers of groups.
        times = rank_group.eager.broadcast_json(
            "usbyte.probe.times", [small_s, some_s], 0, tuple[float, float]
        )
        small_s, some_s = (max(seconds, 1e-6) for seconds in times)
        largest = int(min(largest_bytes, (1 << 20) * max(_STEP_S / max(small_s, some_s), 1)))
        largest = max(largest, 4 * smallest)  # a line takes two sizes
        return cls(_sizes(smallest, largest), small_s, some_s / some, care)

    def groups(self, window: int) -> dict[int, int]:
        """How many groups of `window` operations are timed, by the size of one of these."""
        counts = {}
        span_s = self.care * min(_SPAN * self.small_s, _SPAN_S)
        most_bytes = max(_MOST_BYTES // (_FEWEST_GROUPS * window), self.sizes[0])
        for size in sorted({min(size, most_bytes) for size in self.sizes}):
            seconds = window * max(self.small_s, self.s_per_byte * size)
            most = min(_MOST_GROUPS, _MOST_BYTES // (window * size))
            counts[size] = max(min(int(span_s / seconds), most), _FEWEST_GROUPS)
        return counts


def _smallest(communicator: EngineCommunicator) -> int:
    """Of the operations that a line is fitted to."""
    return max(_SMALLEST_BYTES, 1 << communicator.direct_allreduce_max_bytes.bit_length())


def _sizes(low: int, high: int) -> list[int]:
    """From low to high, each about `_GROWTH` times the one before."""
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
    """`groups`: how many, by the size of each of their operations; `series`: of which kinds."""
    rows = []
    longest = max((count + 1) * window * size for size, count in groups.items())
    buffer = _zeros(communicator, longest)
    # All sizes anew in each repetition, so that no disturbance meets all measurements of one.
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
    """Packs two blocks of that many bytes together, on all ranks at once as those of a host do."""
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
    """Small operations, each posted right behind `ahead` large ones.

    And the large one, where it is the only one: the larger, the better it tells what a byte takes.
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
    """Operations of one shot: between small others, several together, and behind a large one."""
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
    """When all_reduces of these sizes, posted together, have begun and ended, time and again."""
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
    """A buffer of so many bytes, registered."""
    device = communicator.device.torch_device
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    communicator.register(buffer)
    return buffer


def _run(engine: _core.Engine, tensors: int, stream: int) -> None:
    engine.begin_step(stream)
    for i in range(tensors):
        engine.ready(i, stream)
    engine.end_backward()
    for i in range(tensors):  # as the gates of the forward pass do
        engine.wait(i, stream)
    engine.drain(stream)


def _plan(
    kinds: list[str], window: int, numels: list[int], fences: int | None = None
) -> _core.Plan:
    """Groups of `window` operations, each of that many elements.

    The first `fences` groups wait for those before them; all if it is None.
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
    """Mean time of all groups but the first, or of every second one of those, and so on."""
    return fmean(ends[i] - ends[i - 1] for i in range(1, len(ends), every))


def _ends(engine: _core.Engine, window: int) -> list[list[float]]:
    """For each collective, when its groups have ended."""
    times, count = engine.op_times(), len(engine.plan.tensors)
    done = [end for _, end in times]
    return [
        [max(done[i : i + window]) for i in range(k, k + count, window)]
        for k in range(0, len(done), count)
    ]

"""What the network costs: collectives timed on the very path that training uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from usbyte import _core
from usbyte.torch.communicator import TorchCommunicator
from usbyte.torch.context import Context, current

__all__ = ["probe"]

# By operations posted together.
_WINDOWS = {
    1: [["all_reduce"], ["reduce_scatter", "all_gather"]],
    2: [["all_reduce"], ["reduce_scatter", "all_gather"]],
    4: [["all_reduce"]],
}
_SMALLEST_BYTES = 4 << 10
LARGEST_BYTES = 32 << 20
_STEP_S = 0.05  # about how long the largest operation may take
_REPEATS = 3
_GROUPS = 3  # one after the other without a pause, as in training
_FLOAT_BYTES = 4
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Measured:
    """Groups of operations, each group posted when the one before has ended.

    Attributes:
        kind: "all_reduce", "reduce_scatter" or "all_gather".
        window: Operations in a group.
        bytes: Payload of a group.
        seconds: Mean time of a group.
    """

    kind: str
    window: int
    bytes: int
    seconds: float


def probe(largest_bytes: int = LARGEST_BYTES) -> _core.NetworkModel:
    """Measures the network between all ranks. Collective.

    Args:
        largest_bytes: Upper limit to the payloads, which are chosen so that an operation takes
            about 0.05 s.

    Returns:
        The same model on every rank.
    """
    context = current()
    if context.size == 1:
        return _core.NetworkModel(1, [_core.AlphaBeta()])
    communicator = TorchCommunicator(context.new_group())
    try:
        network = fit(context.size, measure(context, communicator, largest_bytes))
    finally:
        communicator.close()
    return share(context, "probe", network)


def share(context: Context, name: str, network: _core.NetworkModel) -> _core.NetworkModel:
    """Rank 0's model, on every rank."""
    payload = network.to_json().encode()
    return _core.NetworkModel.from_json(
        context.eager.broadcast_bytes(f"{name}.network", payload, 0).decode()
    )


def measure(
    context: Context, communicator: TorchCommunicator, largest_bytes: int
) -> list[Measured]:
    """Times collectives over the communicator, which nothing else uses meanwhile. Collective.

    Args:
        context: The ranks.
        communicator: Its registered buffer is replaced.
        largest_bytes: Upper limit to the payloads.
    """
    rows = _time(context, communicator, 1, [_SMALLEST_BYTES, min(1 << 20, largest_bytes)], 2)
    # Every rank must choose the same sizes.
    slowest = max(row.seconds for row in rows if row.kind == "all_reduce")
    largest = int(min(largest_bytes, (1 << 20) * max(_STEP_S / max(slowest, 1e-6), 1)))
    text = context.eager.broadcast_bytes("probe.largest", str(largest).encode(), 0)
    largest = max(int(text), _SMALLEST_BYTES)
    sizes = sorted({largest, *(s for s in _sizes(_SMALLEST_BYTES, largest) if s < largest)})
    rows = []
    for window in _WINDOWS:
        rows += _time(context, communicator, window, sizes, _REPEATS)
    return rows


def fit(ranks: int, rows: Sequence[Measured]) -> _core.NetworkModel:
    """The lines through the measurements."""
    samples: dict[str, dict[int, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        samples[row.kind][row.window].append((row.bytes, row.seconds))
    costs = {}
    for kind, by_window in samples.items():
        lines = {window: _core.fit_cost(pairs)[0] for window, pairs in by_window.items()}
        costs[kind] = [
            lines[next((w for w in sorted(lines) if w >= k), max(lines))]
            for k in range(1, max(lines) + 1)
        ]
    return _core.NetworkModel(
        ranks, costs["all_reduce"], costs.get("reduce_scatter", []), costs.get("all_gather", [])
    )


def _sizes(low: int, high: int) -> list[int]:
    sizes, size = [], low
    while size < high:
        sizes.append(size)
        size *= 16
    return sizes


def _time(
    context: Context, communicator: TorchCommunicator, window: int, sizes: list[int], repeats: int
) -> list[Measured]:
    rows = []
    buffer = torch.zeros(_GROUPS * max(*sizes, window * _FLOAT_BYTES), dtype=torch.uint8)
    communicator.register(buffer)
    for size in sizes:
        numel = max(size // _FLOAT_BYTES // window, 1)
        for kinds in _WINDOWS[window]:
            plan = _plan(kinds, window, numel)
            engine = _core.Engine(
                plan,
                buffer.data_ptr(),
                communicator.core,
                stall_warning_s=context.env.stall_warning_s,
                stall_limit_s=context.env.stall_limit_s,
                on_warning=context.warn,
                on_fault=context.report_fault,
            )
            try:
                for _ in range(repeats):
                    rows += _one_step(engine, kinds, window, numel * window * _FLOAT_BYTES)
            finally:
                engine.close()
    return rows


def _plan(kinds: list[str], window: int, numel: int) -> _core.Plan:
    count = window * _GROUPS
    tensors = [_core.TensorSpec(f"probe{i}", numel, "float32", i * numel) for i in range(count)]
    ops = [
        _core.Op(kind, [(i * numel, (i + 1) * numel)], _UNLIMITED, fence=i % window == 0)
        for kind in kinds
        for i in range(count)
    ]
    return _core.Plan("probe", tensors, ops)


def _one_step(engine: _core.Engine, kinds: list[str], window: int, payload: int) -> list[Measured]:
    count = window * _GROUPS
    engine.begin_step()
    for i in range(count):
        engine.ready(i)
    engine.end_backward()
    engine.drain()
    times = engine.op_times()
    rows = []
    for k, kind in enumerate(kinds):
        ops = times[k * count : (k + 1) * count]
        seconds = (max(end for _, end in ops) - ops[0][0]) / _GROUPS
        rows.append(Measured(kind, window, payload, seconds))
    return rows

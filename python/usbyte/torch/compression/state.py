# SPDX-License-Identifier: Apache-2.0
"""The codec state of parameters, between steps and plans, and in checkpoints."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch

from usbyte import _core
from usbyte._util.transitions import advance
from usbyte.errors import UsageError
from usbyte.torch.layout import CONTROL_TENSOR, is_dense
from usbyte.torch.runtime.messages import read

log = logging.getLogger("usbyte")


def remembers(op: _core.Op) -> bool:
    """Returns whether the codec of `op` has state between steps."""
    codec = _core.make_codec(op.codec)
    return codec is not None and bool(codec.remembers)


_HOST = torch.device("cpu")


class CommitPhase(Enum):
    """Whether the parameters have received what codecs have sent of the codec state."""

    COMMITTED = "the parameters have received what was sent"
    UNCOMMITTED = "a step has begun whose sums no parameter has received"
    LOST = "a fault has left the codec state ahead of the parameters"


COMMIT_TRANSITIONS: dict[CommitPhase, frozenset[CommitPhase]] = {
    CommitPhase.COMMITTED: frozenset({CommitPhase.UNCOMMITTED}),
    CommitPhase.UNCOMMITTED: frozenset({CommitPhase.COMMITTED, CommitPhase.LOST}),
    CommitPhase.LOST: frozenset({CommitPhase.COMMITTED}),
}
_next_phase = partial(advance, "the codec state", COMMIT_TRANSITIONS)

#: Key of the codec state in an optimizer's state_dict.
CODEC_STATE_KEY = "usbyte_memory"


class CodecState:
    """The codec state of each parameter: rows of float32, as many as the codecs need.

    Engines read and write a buffer that is parallel to the flat buffer: one row for each row of
    state, in the order of the plan. The state belongs to the parameters and outlives plans and
    engines. Until the first `lay_out`, elements are in index order.

    Args:
        scale: Scale of the gradients that are compressed: 1 / ranks for averages.

    Attributes:
        parts: By parameter name: shape [rows, numel], float32; empty while no codec has state.
        kinds: By parameter name: the meaning of the rows, as `Codec::remembers` in codec.h says,
            for example "unsent, velocity".
        phase: Whether the parameters have received what was sent of the state.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self.parts: dict[str, torch.Tensor] = {}
        self.kinds: dict[str, str] = {}
        self._buffer = torch.empty(0, 0, dtype=torch.float32, device=_HOST)
        # By name: a meta tensor with the strides of the parameter; only if not in index order.
        self._placed: dict[str, torch.Tensor] = {}
        # This rank and the number of ranks, while each rank has the state of its shards only.
        self._sender: tuple[int, int] | None = None
        self._before: dict[str, torch.Tensor] = {}  # snapshots from before this step, by name
        self._coded = False  # codecs of the plan in force have state
        self.phase = CommitPhase.COMMITTED

    def lay_out(
        self,
        plan: _core.Plan,
        device: torch.device = _HOST,
        params: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Lays the state out for another plan. Codecs continue with rows of the same meaning.

        Args:
            plan: The plan that engines are about to follow.
            device: Device of the flat buffer.
            params: Parameters by name, whose gradients lie in the order of the parameter's memory.
                All others lie in index order.
        """
        codecs = [_core.make_codec(op.codec) for op in plan.ops]
        self._coded = any(codec is not None and codec.remembers for codec in codecs)
        rows = max((codec.state_rows for codec in codecs if codec is not None), default=0)
        rows = max([rows, *(len(part) for part in self.parts.values())])
        if rows == 0:
            return
        # The old rows go to host memory first: a device may not have room for both.
        old, kinds = {name: self._rows(name).cpu() for name in self.parts}, self.kinds
        self.parts = {}
        self._buffer = torch.empty(0, 0, dtype=torch.float32, device=_HOST)
        self._buffer = torch.zeros(rows, plan.numel, dtype=torch.float32, device=device)
        tensors = [t for t in plan.tensors if t.name != CONTROL_TENSOR and not t.sparse]
        self.parts = {t.name: self._buffer[:, t.offset : t.end] for t in tensors}
        self._placed = {
            name: torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
            for name, param in (params or {}).items()
            if not param.is_contiguous() and is_dense(param)
        }
        self.kinds = dict(kinds)
        for op, codec in zip(plan.ops, codecs, strict=True):
            if codec is not None and codec.remembers:
                for t in plan.tensors_of(op):
                    self.kinds[plan.tensors[t].name] = codec.remembers
        for name in self.parts.keys() & old.keys():
            self._take(name, old[name], kinds.get(name, ""))
        self._wait_for_writes()

    def kinds_json(self) -> str:
        """Returns the number and meaning of the rows, by name, as JSON for `replicate`."""
        return json.dumps({n: [len(part), self.kinds.get(n, "")] for n, part in self.parts.items()})

    def replicate(
        self,
        tensors: Sequence[_core.TensorSpec],
        kinds_json: Sequence[str],
        average: Callable[[torch.Tensor], None],
    ) -> None:
        """Averages the state over all ranks, before other ranks than now begin to send it.

        Args:
            tensors: Tensors of the plan, equal on all ranks. A rank may have state for some of them
                only.
            kinds_json: The results of `kinds_json` of all ranks, in rank order.
            average: Averages a tensor in host memory over all ranks, in place. It is called once,
                or not at all if no rank has state.
        """
        everyone = [
            read(f"the codec state of rank {rank}", text, dict[str, tuple[int, str]])
            for rank, text in enumerate(kinds_json)
        ]
        rows = max((row[0] for each in everyone for row in each.values()), default=0)
        if rows == 0:
            return
        kinds = {n: kind for each in reversed(everyone) for n, (_, kind) in each.items() if kind}
        sizes = {t.name: t.numel for t in tensors if t.name != CONTROL_TENSOR}
        whole = torch.zeros(rows, sum(sizes.values()), dtype=torch.float32, device=_HOST)
        parts = dict(zip(sizes, whole.split(list(sizes.values()), dim=1), strict=True))
        for name in parts.keys() & self.parts.keys():
            parts[name][: len(self.parts[name])] = self._rows(name).cpu()
        average(whole)
        self.parts, self.kinds, self._placed, self._sender = parts, kinds, {}, None

    def shard(self, plan: _core.Plan, topology: _core.Topology, rank: int) -> None:
        """After `replicate`: leaves each rank only the state of the shards that it encodes.

        The rest is zeroed. The shards are multiplied by the size of the mesh axis group that sums
        them, because `replicate` has averaged the state. Blocks whose reduce-scatter is itself
        compressed are unchanged, because there every rank encodes.

        Args:
            plan: The plan in force, for which the state is laid out.
            topology: The topology of the plan's mesh axes.
            rank: This rank.
        """
        scatters = {
            block: op for op in plan.ops if op.kind == "reduce_scatter" for block in op.blocks
        }
        for op in plan.ops:
            if op.dimension < 0 or op.kind != "all_reduce" or not remembers(op):
                continue
            for block in op.blocks:
                if remembers(scatters[block]):
                    continue
                inside = scatters[block].dimension
                size = topology.dimensions[inside].size
                begin, end = block
                own, last = _core.shard(block, topology.coordinates(rank)[inside], size)
                self._buffer[:, begin:own] = 0
                self._buffer[:, own:last] *= size
                self._buffer[:, last:end] = 0
        self._sender = rank, math.prod(d.size for d in topology.dimensions)
        self._wait_for_writes()

    def snapshot(self, name: str) -> None:
        """Copies the state of a parameter for which this rank sends no gradient in this step.

        Perhaps no rank has a gradient for it; then `rollback` undoes the step.
        """
        if self.kinds.get(name):
            self._before[name] = self.parts[name].clone()

    def rollback(self, name: str) -> None:
        """Restores the snapshot of a parameter that no rank has used: its sum is discarded."""
        if (before := self._before.pop(name, None)) is not None:
            self.parts[name].copy_(before)
            self._wait_for_writes()

    def begin_step(self) -> None:
        """Discards the snapshots of the last step. Codecs may send a part of the state now."""
        self._before.clear()
        self.phase = _next_phase(self.phase, CommitPhase.UNCOMMITTED)

    def commit(self) -> None:
        """Records that an update has used the sums of the last step."""
        if self.phase is CommitPhase.UNCOMMITTED:
            self.phase = CommitPhase.COMMITTED

    def mark_partial_step(self) -> None:
        """After a fault: excludes the state from checkpoints if it was uncommitted."""
        if self.phase is CommitPhase.UNCOMMITTED and self._coded:
            self.phase = _next_phase(self.phase, CommitPhase.LOST)

    @property
    def address(self) -> int:
        """Address of the buffer, for the engine; 0 if there is none."""
        return self._buffer.data_ptr()

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns a copy for a checkpoint: by name, in host memory, in index order.

        The copy is empty, with a warning, if a fault has left the state ahead of the parameters.
        """
        if self.phase is CommitPhase.LOST and self.parts:
            log.warning(
                "the codec state is left out of the optimizer's state_dict: when the run failed, a "
                "part of it had been sent in a step that is not in the parameters"
            )
            return {}
        return self._copy()

    def _copy(self) -> dict[str, dict[str, Any]]:
        owner = (
            {} if self._sender is None else dict(zip(("rank", "size"), self._sender, strict=True))
        )
        return {
            name: {
                "kind": self.kinds.get(name, ""),
                "rows": self._rows(name).to("cpu", copy=True),
                "scale": self._scale,
            }
            | owner
            for name in self.parts
        }

    def check(
        self, state: Mapping[str, Any], params: Mapping[str, torch.Tensor], ranks: int
    ) -> None:
        """Raises UsageError if `state` cannot be loaded.

        That is so if it has another number of elements than one of `params`, of which frozen ones
        are not checked; or if each rank has saved its shards only, and the number of ranks is
        another one.
        """
        for name, part in state.items():
            if part.get("size", ranks) != ranks:
                raise UsageError(
                    f"load_state_dict: the codec state was saved by {part['size']} ranks, each "
                    f"with its shards, and there are {ranks} now: run as many ranks, or drop the "
                    f"codec state with del state_dict['{CODEC_STATE_KEY}']"
                )
            if name in params and part["rows"].shape[1:] != (params[name].numel(),):
                raise UsageError(
                    f"load_state_dict: the codec state of '{name}' is of another model; load it "
                    "into the model that it was saved from"
                )

    def check_same(self, state: Mapping[str, Any]) -> None:
        """Raises UsageError unless `state` equals the present state, which is of shards."""
        now = self._copy()
        if state.keys() != now.keys() or not all(
            torch.equal(part["rows"], now[name]["rows"]) for name, part in state.items()
        ):
            raise UsageError(
                "load_state_dict: each rank compresses shards of its own by now, which need not be "
                "those of the state; load it right after the optimizer is made"
            )

    def load(self, state: Mapping[str, Any], rank: int) -> None:
        """Replaces the state by a checkpoint that `check` has accepted; an empty one clears it.

        Values are scaled if the checkpoint is from another number of ranks. A state by shards that
        another rank has saved is left out, with a warning, because it belongs to the shards that
        only that rank sends.
        """
        if any(part.get("rank", rank) != rank for part in state.values()):
            log.warning(
                "rank %d: the codec state is that of another rank, and is left out: save and load "
                "on every rank to lose nothing",
                rank,
            )
            state = {}
        self.phase = _next_phase(self.phase, CommitPhase.COMMITTED)
        factors = {n: self._scale / part.get("scale", self._scale) for n, part in state.items()}
        loaded = {name: part["rows"].float() * factors[name] for name, part in state.items()}
        if not self.parts:  # no plan has laid the state out yet, or no codec has any
            self.parts = loaded
            self.kinds = {name: part["kind"] for name, part in state.items()}
            return
        for name, part in self.parts.items():
            part.zero_()
            if name in state:
                self._take(name, loaded[name], state[name]["kind"])
        self._wait_for_writes()

    def _wait_for_writes(self) -> None:
        """Waits for pending writes to the buffer, because engines use streams of their own."""
        if self._buffer.is_cuda:
            torch.cuda.current_stream(self._buffer.device).synchronize()

    def _rows(self, name: str) -> torch.Tensor:
        """Returns the rows of a parameter in index order."""
        rows, placed = self.parts[name], self._placed.get(name)
        if placed is None:
            return rows
        return torch.stack([r.as_strided(placed.shape, placed.stride()).flatten() for r in rows])

    def _take(self, name: str, rows: torch.Tensor, kind: str) -> None:
        """Copies the rows that have the same meaning; `rows` is in index order."""
        placed = self._placed.get(name)
        mine = self.kinds.get(name, kind).split(", ")
        for i, what in enumerate(kind.split(", ")):
            if i < len(mine) and mine[i] == what and i < min(len(rows), len(self.parts[name])):
                if placed is None:
                    self.parts[name][i] = rows[i]
                else:
                    place = self.parts[name][i].as_strided(placed.shape, placed.stride())
                    place.copy_(rows[i].view(placed.shape))


def coded_shards(plan: _core.Plan) -> set[tuple[int, int, int, bool, str]]:
    """Returns a key of each shard that has codec state: whose it is, and how it is sent.

    Keys are block, mesh axis of the reduce-scatter, whether that is compressed too, and the order
    of tensors, without which the block says nothing.
    """
    coded = {block for op in plan.ops if op.dimension >= 0 and remembers(op) for block in op.blocks}
    order = " ".join(t.name for t in plan.tensors)
    return {
        (*block, op.dimension, remembers(op), order)
        for op in plan.ops
        if op.kind == "reduce_scatter"
        for block in op.blocks
        if block in coded
    }


def codes_shards(plan: _core.Plan) -> bool:
    """Returns whether codec state is by shard, each on the rank that sends the shard."""
    return bool(coded_shards(plan))

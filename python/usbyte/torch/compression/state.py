"""What codecs remember of gradients, from one plan to the next and into checkpoints."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.layout import CONTROL_TENSOR, is_dense
from usbyte.torch.runtime.messages import read

log = logging.getLogger("usbyte")


def remembers(op: _core.Op) -> bool:
    """Whether ranks remember something of what they send by it."""
    codec = _core.make_codec(op.codec)
    return codec is not None and bool(codec.remembers)


_HOST = torch.device("cpu")

#: Where an optimizer's state_dict holds what codecs remember.
CODEC_STATE_KEY = "usbyte_memory"


class CodecState:
    """What codecs remember of each parameter: rows of float32, as many as the codecs need.

    Engines work on a buffer beside the arena and in its order. It outlives plans and engines, as
    what it holds belongs to the parameters. Until it is laid out rows are in the order of indices.

    Args:
        scale: Of the gradients that are compressed: 1 / ranks for averages.

    Attributes:
        parts: By name, rows x elements; empty where no codec remembers anything.
        kinds: By name, what the rows are; see `Codec.remembers`.
        ahead: A part of it may have been sent in a step whose sums no parameter has; for who takes
            the steps to reset.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self.parts: dict[str, torch.Tensor] = {}
        self.kinds: dict[str, str] = {}
        self._buffer = torch.empty(0, 0, dtype=torch.float32, device=_HOST)
        self._placed: dict[str, torch.Tensor] = {}  # by name, as elements lie if not by index
        # This rank and how many there are, while ranks remember shards only.
        self._sender: tuple[int, int] | None = None
        self._before: dict[str, torch.Tensor] = {}  # the step, of what may turn out to be unused
        self._coded = False  # codecs of the plan in force remember something
        self.uncommitted = self._torn = False

    def lay_out(
        self,
        plan: _core.Plan,
        device: torch.device = _HOST,
        params: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Goes over to another plan; its codecs go on with rows that mean the same to them.

        Args:
            plan: What engines are about to follow.
            device: Where the arena is.
            params: By name, in the order of whose memory that has elements; else in no other.
        """
        codecs = [_core.make_codec(op.codec) for op in plan.ops]
        self._coded = any(codec is not None and codec.remembers for codec in codecs)
        rows = max((codec.memories for codec in codecs if codec is not None), default=0)
        rows = max([rows, *(len(part) for part in self.parts.values())])
        if rows == 0:
            return
        # A device may not have room for both.
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
        self._settle()

    def told(self) -> str:
        """What `replicate` has to know of every rank, as JSON."""
        return json.dumps({n: [len(part), self.kinds.get(n, "")] for n, part in self.parts.items()})

    def replicate(
        self,
        tensors: Sequence[_core.TensorSpec],
        told: Sequence[str],
        average: Callable[[torch.Tensor], None],
    ) -> None:
        """Gives all ranks the same of what they remember together, before another sends it.

        Args:
            tensors: The plan's, alike on all ranks; ranks may have memories of some of them only.
            told: By rank, what `told` gave there.
            average: Over all ranks, in place, of a tensor on the host; called once, or, if no rank
                remembers anything, not at all.
        """
        everyone = [
            read(f"what rank {rank} remembers of gradients", text, dict[str, tuple[int, str]])
            for rank, text in enumerate(told)
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
        """Leaves what was spread to the ranks that send it, of the shards that a plan adds up.

        Where gradients are coded on their way to the shards too, all ranks send.
        """
        scatters = {
            block: op for op in plan.ops if op.kind == "reduce_scatter" for block in op.blocks
        }
        for op in plan.ops:
            if op.line < 0 or op.kind != "all_reduce" or not remembers(op):
                continue
            for block in op.blocks:
                if remembers(scatters[block]):
                    continue
                inside = scatters[block].line
                size = topology.dimensions[inside].size
                begin, end = block
                chunk = -(-(end - begin) // size)
                own = min(begin + topology.coordinates(rank)[inside] * chunk, end)
                last = min(own + chunk, end)
                self._buffer[:, begin:own] = 0
                self._buffer[:, own:last] *= size
                self._buffer[:, last:end] = 0
        self._sender = rank, math.prod(d.size for d in topology.dimensions)
        self._settle()

    def snapshot(self, name: str) -> None:
        """This rank sends no gradient for a parameter, and perhaps nobody does in this step."""
        if self.kinds.get(name):
            self._before[name] = self.parts[name].clone()

    def rollback(self, name: str) -> None:
        """Nobody has used a parameter that was noted: the step's sum goes nowhere."""
        if (before := self._before.pop(name, None)) is not None:
            self.parts[name].copy_(before)
            self._settle()

    def begin_step(self) -> None:
        """Forgets what was noted of the last one."""
        self._before.clear()
        self.uncommitted = True

    def mark_partial_step(self) -> None:
        """The run has failed: what it is ahead of parameters stays so."""
        self._torn = self.uncommitted and self._coded

    @property
    def address(self) -> int:
        """For the engine; 0 if there is none."""
        return self._buffer.data_ptr()

    def state(self) -> dict[str, dict[str, Any]]:
        """A copy by parameter on the host, by index, for a checkpoint; nothing of what is torn."""
        if self._torn and self.parts:
            log.warning(
                "what codecs remember is left out of the optimizer's state: when the run failed, "
                "they had sent a part of it in a step that no parameter gets"
            )
            return {}
        return self._copy()

    def _copy(self) -> dict[str, dict[str, Any]]:
        whose = (
            {} if self._sender is None else dict(zip(("rank", "size"), self._sender, strict=True))
        )
        return {
            name: {
                "kind": self.kinds.get(name, ""),
                "rows": self._rows(name).to("cpu", copy=True),
                "scale": self._scale,
            }
            | whose
            for name in self.parts
        }

    def check(
        self, state: Mapping[str, Any], params: Mapping[str, torch.Tensor], ranks: int
    ) -> None:
        """Raises UsageError if the state is not of these parameters; those frozen do not count.

        Or if each rank remembers a shard of what all do, and there were not so many ranks.
        """
        for name, part in state.items():
            if part.get("size", ranks) != ranks:
                raise UsageError(
                    f"load_state_dict: what codecs remember was saved by {part['size']} ranks, "
                    f"each with its shards, and there are {ranks} now: go on with as many, or "
                    f"without it, after del state_dict['{CODEC_STATE_KEY}']"
                )
            if name in params and part["rows"].shape[1:] != (params[name].numel(),):
                raise UsageError(
                    f"load_state_dict: what codecs remember of '{name}' is of another model; load "
                    "it into the one it was saved from"
                )

    def is_as(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of what is remembered now."""
        now = self._copy()
        return state.keys() == now.keys() and all(
            torch.equal(part["rows"], now[name]["rows"]) for name, part in state.items()
        )

    def load(self, state: Mapping[str, Any], rank: int) -> None:
        """Takes over a checkpoint's, or forgets all; `check` has passed.

        Of another number of ranks, each of these remembers as much more or less. What another rank
        alone remembered, as it alone has sent it, is not taken over.
        """
        if any(part.get("rank", rank) != rank for part in state.values()):
            log.warning(
                "rank %d: what codecs remember is another rank's, and left out: save and load on "
                "every rank to lose nothing",
                rank,
            )
            state = {}
        self.uncommitted = self._torn = False
        factors = {n: self._scale / part.get("scale", self._scale) for n, part in state.items()}
        loaded = {name: part["rows"].float() * factors[name] for name, part in state.items()}
        if not self.parts:  # no codec has remembered anything yet
            self.parts = loaded
            self.kinds = {name: part["kind"] for name, part in state.items()}
            return
        for name, part in self.parts.items():
            part.zero_()
            if name in state:
                self._take(name, loaded[name], state[name]["kind"])
        self._settle()

    def _settle(self) -> None:
        """Waits for what was written, as engines have streams of their own."""
        if self._buffer.is_cuda:
            torch.cuda.current_stream(self._buffer.device).synchronize()

    def _rows(self, name: str) -> torch.Tensor:
        """A parameter's, in the order of its indices."""
        rows, placed = self.parts[name], self._placed.get(name)
        if placed is None:
            return rows
        return torch.stack([r.as_strided(placed.shape, placed.stride()).flatten() for r in rows])

    def _take(self, name: str, rows: torch.Tensor, kind: str) -> None:
        """Copies rows that mean the same, in the order of indices."""
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
    """Of whose shards codecs remember: blocks, their lines, whether they are coded before that too.

    And tensors, as places tell no more.
    """
    coded = {block for op in plan.ops if op.line >= 0 and remembers(op) for block in op.blocks}
    order = " ".join(t.name for t in plan.tensors)
    return {
        (*block, op.line, remembers(op), order)
        for op in plan.ops
        if op.kind == "reduce_scatter"
        for block in op.blocks
        if block in coded
    }


def codes_shards(plan: _core.Plan) -> bool:
    """Codecs remember shards of gradients, each on the rank that sends them."""
    return bool(coded_shards(plan))

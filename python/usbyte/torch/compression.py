"""What gradients are compressed with on their way over the network."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.arena import USED

log = logging.getLogger("usbyte")

_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Codec:
    """One way to make gradients smaller.

    Attributes:
        spec: Name and parameter, as `topk:0.01`.
    """

    spec: str

    def __post_init__(self) -> None:
        made = _core.make_codec(self.spec)
        if made is not None:  # one spelling of its parameters
            object.__setattr__(self, "spec", made.spec)

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """For single collectives, as Horovod's: what travels, and what `decompress` needs.

        Raises:
            UsageError: This codec works in a `DistributedOptimizer` only.
        """
        if self.spec != "none" and self.spec not in _CASTS:
            raise UsageError(
                f"compression {self.spec} cannot be added up by a single collective; it works as "
                "DistributedOptimizer(..., compression=...). Here there are none, fp16 and bf16"
            )
        dtype = _CASTS.get(self.spec)
        if dtype is None or not tensor.is_floating_point():
            return tensor, None
        return tensor.to(dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Inverse of `compress`, but for what is lost."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The codecs there are; see docs/compression.md for what each loses and needs.

    `none`, `fp16`, `bf16`, `fp8`, `int8`, `terngrad`, `signsgd`, `signum`, `efsignsgd` and `onebit`
    are codecs; the others make one.
    """

    none = Codec("none")
    fp16 = Codec("fp16")
    bf16 = Codec("bf16")
    fp8 = Codec("fp8")
    int8 = Codec("int8")
    terngrad = Codec("terngrad")
    signsgd = Codec("signsgd")
    signum = Codec("signum")
    efsignsgd = Codec("efsignsgd")
    onebit = Codec("onebit")

    @staticmethod
    def topk(ratio: float) -> Codec:
        """The share `ratio` of elements, those of the largest magnitude."""
        return Codec(f"topk:{ratio:.17g}")

    @staticmethod
    def randk(ratio: float) -> Codec:
        """The share `ratio` of elements, which all ranks draw alike."""
        return Codec(f"randk:{ratio:.17g}")

    @staticmethod
    def dct(ratio: float, period: int = 1000) -> Codec:
        """At most the share `ratio` of elements, those above a threshold that lasts for steps."""
        return Codec(f"dct:{ratio:.17g},period={period}")

    @staticmethod
    def dgc(
        ratio: float = 0.001, momentum: float = 0.9, clip: float = 0.0, warmup_steps: int = 0
    ) -> Codec:
        """Deep gradient compression; the optimizer itself must have no momentum.

        Args:
            ratio: Of elements that are sent.
            momentum: Of the velocity that every rank keeps.
            clip: Norm to which gradients are clipped, of all ranks together and by block; 0: none.
            warmup_steps: In quarters of them, 1/4, 1/16, 1/64 and 1/256 of the elements are sent.
        """
        return Codec(
            f"dgc:{ratio:.17g},momentum={momentum:.17g},clip={clip:.17g},warmup={warmup_steps}"
        )

    @staticmethod
    def qsgd(bits: int = 4) -> Codec:
        """Stochastic rounding to so many bits, sign included: 2, 4 or 8."""
        return Codec(f"qsgd:{bits}")

    @staticmethod
    def powersgd(rank: int = 2) -> Codec:
        """Matrices as products of two thin ones of this rank, where that takes fewer bytes."""
        return Codec(f"powersgd:{rank}")


#: One codec, or codecs by patterns of parameters' names; a codec may be given by its spec.
Rules = Codec | str | Mapping[str, Codec | str]
#: What "auto" chooses from, the least lossy first.
AUTO = ("bf16", "int8")


@dataclass(frozen=True)
class Choices:
    """What parameters may travel by.

    Attributes:
        lists: By parameter, specs of codecs.
        optional: The best of the lists is chosen when plans are made, or no compression at all if
            that is predicted to be as fast; else there is one list, which holds.
    """

    lists: Sequence[Sequence[str]]
    optional: bool = False

    @property
    def specs(self) -> set[str]:
        """All that occur."""
        return {spec for row in self.lists for spec in row}


def choices_of(
    rules: Rules | Sequence[Rules], names: Sequence[str], params: Sequence[nn.Parameter]
) -> Choices:
    """Reads `DistributedOptimizer(compression=...)`.

    Args:
        rules: As of `codecs_of`; or a sequence of such, the least lossy first, to choose from;
            "auto" is `AUTO`.
        names: Of the parameters.
        params: The parameters.

    Raises:
        UsageError: As `codecs_of`; or the sequence is empty.
    """
    if rules == "auto":
        rules = AUTO
    if isinstance(rules, (Codec, str, Mapping)):
        return Choices([codecs_of(rules, names, params)])
    if not rules:
        raise UsageError('compression: there is nothing to choose from; name codecs, or "auto"')
    return Choices([codecs_of(rule, names, params) for rule in rules], optional=True)


def codecs_of(rules: Rules, names: Sequence[str], params: Sequence[nn.Parameter]) -> list[str]:
    """The spec of each parameter's codec.

    Args:
        rules: A codec is for all parameters if it is a cast, else for those of two dimensions or
            more: biases and norms are small and do not bear it well. Of patterns, as of file names,
            the first that fits counts; without one, a parameter is not compressed.
        names: Of the parameters.
        params: The parameters.

    Raises:
        UsageError: There is no such codec, or a pattern fits no parameter.
    """
    if not isinstance(rules, Mapping):
        spec = _spec(rules)
        return [spec if spec in _CASTS or p.dim() > 1 else "none" for p in params]
    specs = {pattern: _spec(codec) for pattern, codec in rules.items()}
    for pattern in specs:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"compression: the pattern '{pattern}' fits no parameter; they are named as "
                f"'{names[0]}' is"
            )
    return [next((s for p, s in specs.items() if fnmatchcase(n, p)), "none") for n in names]


def check_momentum(specs: Iterable[str], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises UsageError if codecs and the optimizer both have momentum."""
    if not any(group.get("momentum") for group in groups):
        return
    for spec in specs:
        corrects = spec.startswith("dgc") and "momentum=0," not in f"{spec},"
        if corrects or spec.startswith("signum"):
            raise UsageError(
                f"compression {spec} applies momentum before it compresses: give the optimizer "
                "momentum=0"
            )


def check_relays(specs: Iterable[str]) -> None:
    """Raises UsageError if a codec cannot serve a sharded optimizer."""
    for spec in specs:
        codec = _core.make_codec(spec)
        if codec is not None and (codec.factors or not codec.relays):
            raise UsageError(
                f"compression {spec} does not go with shard_optimizer=True, where each rank "
                "receives a part of the gradients; there are fp16, bf16, fp8, int8, topk, randk, "
                "dct, qsgd, terngrad, efsignsgd and onebit"
            )


def remembers(op: _core.Op) -> bool:
    """Whether ranks remember something of what they send by it."""
    codec = _core.make_codec(op.codec)
    return codec is not None and bool(codec.remembers)


_HOST = torch.device("cpu")

#: Where an optimizer's state_dict holds what codecs remember.
MEMORY = "usbyte_memory"


class Memory:
    """What codecs remember of each parameter: rows of float32, as many as the codecs need.

    Engines work on a buffer beside the arena and in its order. It outlives plans and engines, as
    what it holds belongs to the parameters.

    Attributes:
        parts: By name, rows x elements; empty where no codec remembers anything.
        kinds: By name, what the rows are; see `Codec.remembers`.
    """

    def __init__(self) -> None:
        self.parts: dict[str, torch.Tensor] = {}
        self.kinds: dict[str, str] = {}
        self._buffer = torch.empty(0, 0)
        # This rank and how many there are, while ranks remember shards only.
        self._sender: tuple[int, int] | None = None

    def lay_out(self, plan: _core.Plan, device: torch.device = _HOST) -> None:
        """Goes over to another plan; its codecs go on with rows that mean the same to them.

        Args:
            plan: What engines are about to follow.
            device: Where the arena is.
        """
        codecs = [_core.make_codec(op.codec) for op in plan.ops]
        rows = max((codec.memories for codec in codecs if codec is not None), default=0)
        rows = max([rows, *(len(part) for part in self.parts.values())])
        if rows == 0:
            return
        # A device may not have room for both.
        old, kinds = {name: part.cpu() for name, part in self.parts.items()}, self.kinds
        self.parts, self._buffer = {}, torch.empty(0, 0)
        self._buffer = torch.zeros(rows, plan.numel, dtype=torch.float32, device=device)
        tensors = [t for t in plan.tensors if t.name != USED]
        self.parts = {t.name: self._buffer[:, t.offset : t.end] for t in tensors}
        self.kinds = dict(kinds)
        for op, codec in zip(plan.ops, codecs, strict=True):
            if codec is not None and codec.remembers:
                for t in plan.tensors_of(op):
                    self.kinds[plan.tensors[t].name] = codec.remembers
        for name in self.parts.keys() & old.keys():
            self._take(name, old[name], kinds.get(name, ""))
        self._settle()

    def told(self) -> str:
        """What `spread` has to know of every rank, as JSON."""
        return json.dumps({n: [len(part), self.kinds.get(n, "")] for n, part in self.parts.items()})

    def spread(
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
        everyone = [json.loads(text) for text in told]
        rows = max((row[0] for each in everyone for row in each.values()), default=0)
        if rows == 0:
            return
        kinds = {n: kind for each in reversed(everyone) for n, (_, kind) in each.items() if kind}
        sizes = {t.name: t.numel for t in tensors if t.name != USED}
        whole = torch.zeros(rows, sum(sizes.values()))
        parts = dict(zip(sizes, whole.split(list(sizes.values()), dim=1), strict=True))
        for name in parts.keys() & self.parts.keys():
            parts[name][: len(self.parts[name])] = self.parts[name].cpu()
        average(whole)
        self.parts, self.kinds, self._sender = parts, kinds, None

    def concentrate(self, plan: _core.Plan, topology: _core.Topology, rank: int) -> None:
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

    @property
    def address(self) -> int:
        """For the engine; 0 if there is none."""
        return self._buffer.data_ptr()

    def state(self) -> dict[str, dict[str, Any]]:
        """A copy by parameter on the host, for a checkpoint."""
        whose = (
            {} if self._sender is None else dict(zip(("rank", "size"), self._sender, strict=True))
        )
        return {
            name: {"kind": self.kinds.get(name, ""), "rows": part.to("cpu", copy=True)} | whose
            for name, part in self.parts.items()
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
                    f"without it, after del state_dict['{MEMORY}']"
                )
            if name in params and part["rows"].shape[1:] != (params[name].numel(),):
                raise UsageError(
                    f"load_state_dict: what codecs remember of '{name}' is of another model; load "
                    "it into the one it was saved from"
                )

    def load(self, state: Mapping[str, Any], rank: int) -> None:
        """Takes over a checkpoint's, or forgets all; `check` has passed.

        What another rank alone remembered, as it alone has sent it, is not taken over.
        """
        if any(part.get("rank", rank) != rank for part in state.values()):
            log.warning(
                "rank %d: what codecs remember is another rank's, and left out: save and load on "
                "every rank to lose nothing",
                rank,
            )
            state = {}
        if not self.parts:  # no codec has remembered anything yet
            self.parts = {name: part["rows"].clone().float() for name, part in state.items()}
            self.kinds = {name: part["kind"] for name, part in state.items()}
            return
        for name, part in self.parts.items():
            part.zero_()
            if name in state:
                self._take(name, state[name]["rows"], state[name]["kind"])
        self._settle()

    def _settle(self) -> None:
        """Waits for what was written, as engines have streams of their own."""
        if self._buffer.is_cuda:
            torch.cuda.current_stream(self._buffer.device).synchronize()

    def _take(self, name: str, rows: torch.Tensor, kind: str) -> None:
        """Copies rows that mean the same."""
        mine = self.kinds.get(name, kind).split(", ")
        for i, what in enumerate(kind.split(", ")):
            if i < len(mine) and mine[i] == what and i < min(len(rows), len(self.parts[name])):
                self.parts[name][i] = rows[i]


def _spec(codec: Codec | str) -> str:
    return codec.spec if isinstance(codec, Codec) else Codec(codec).spec

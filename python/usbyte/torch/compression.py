"""What gradients are compressed with on their way over the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import UsageError

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
        if made is not None:  # one spelling of its parameter
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

    `none`, `fp16`, `bf16`, `fp8`, `int8`, `terngrad`, `signsgd`, `efsignsgd` and `onebit` are
    codecs; the others make one.
    """

    none = Codec("none")
    fp16 = Codec("fp16")
    bf16 = Codec("bf16")
    fp8 = Codec("fp8")
    int8 = Codec("int8")
    terngrad = Codec("terngrad")
    signsgd = Codec("signsgd")
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
    def qsgd(bits: int = 4) -> Codec:
        """Stochastic rounding to so many bits, sign included: 2, 4 or 8."""
        return Codec(f"qsgd:{bits}")


#: One codec, or codecs by patterns of parameters' names; a codec may be given by its spec.
Rules = Codec | str | Mapping[str, Codec | str]


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


class Memory:
    """What codecs have not sent yet, beside the arena and in its order; it outlives plans.

    Attributes:
        parts: By tensor of the plan; empty where no codec wants feedback.
    """

    def __init__(self) -> None:
        self.parts: dict[str, torch.Tensor] = {}
        self._buffer = torch.empty(0)

    def lay_out(self, plan: _core.Plan) -> None:
        """Goes over to another plan for the same tensors."""
        codecs = [_core.make_codec(op.codec) for op in plan.ops]
        if not any(codec is not None and codec.wants_feedback for codec in codecs):
            return
        old, self._buffer = self.parts, torch.zeros(plan.numel, dtype=torch.float32, device="cpu")
        self.parts = {t.name: self._buffer[t.offset : t.end] for t in plan.tensors}
        for name, part in old.items():
            self.parts[name].copy_(part)

    @property
    def address(self) -> int:
        """For the engine; 0 if there is none."""
        return self._buffer.data_ptr() if self.parts else 0


def _spec(codec: Codec | str) -> str:
    return codec.spec if isinstance(codec, Codec) else Codec(codec).spec

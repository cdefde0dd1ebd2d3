"""What gradients are compressed with on their way over the network."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import UsageError

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
        UsageError: As `codecs_of`; or the sequence is none, or empty.
    """
    if isinstance(rules, str) and rules == "auto":
        rules = AUTO
    if isinstance(rules, (str, Mapping)) or not isinstance(rules, Iterable):
        return Choices([codecs_of(rules, names, params)])
    if isinstance(rules, (bytes, bytearray)) or not isinstance(rules, Sequence):
        raise UsageError(
            f"compression: a {type(rules).__name__} is nothing to choose from; give a list of "
            "codecs, the least lossy first"
        )
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


def _spec(codec: Codec | str) -> str:
    if not isinstance(codec, (Codec, str)):
        raise UsageError(
            f"compression {codec!r} is no codec: take one of usbyte.torch.Compression, or its "
            "spec; compressors of one's own are for allreduce() and the like"
        )
    return codec.spec if isinstance(codec, Codec) else Codec(codec).spec

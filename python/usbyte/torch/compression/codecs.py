# SPDX-License-Identifier: Apache-2.0
"""The codecs that compress gradients for the network, and the rules that assign them."""

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
    """A lossy encoding of gradients, or "none".

    Attributes:
        spec: Name and parameters, as `topk:0.01`.

    Raises:
        UsageError: There is no such codec, or a parameter is out of range.
    """

    spec: str

    def __post_init__(self) -> None:
        made = _core.make_codec(self.spec)
        if made is not None:  # equal codecs must have equal specs
            object.__setattr__(self, "spec", made.spec)

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to send, and the context for `decompress`; Horovod's interface.

        For eager collectives, with the codecs `none`, `fp16` and `bf16` only. Tensors that are not
        floating-point are sent unchanged.

        Raises:
            UsageError: This codec works only in a `DistributedOptimizer` or `ddp_comm_hook`.
        """
        if self.spec != "none" and self.spec not in _CASTS:
            raise UsageError(
                f"compression {self.spec} does not work in an eager collective: use none, fp16 or "
                "bf16 here, or pass it to DistributedOptimizer(..., compression=...)"
            )
        dtype = _CASTS.get(self.spec)
        if dtype is None or not tensor.is_floating_point():
            return tensor, None
        return tensor.to(dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Inverse of `compress`, but for the rounding."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The codecs, for `compression=`. docs/compression.md says what each loses and needs.

    `none`, `fp16`, `bf16`, `fp8`, `int8`, `terngrad`, `signsgd`, `signum`, `efsignsgd` and `onebit`
    are codecs; the methods return one. A spec, such as "topk:0.01", can replace a codec everywhere.

    Examples:
        >>> import torch
        >>> import usbyte.torch as ub
        >>> ub.init()
        >>> ub.Compression.topk(0.01)
        Codec(spec='topk:0.01')
        >>> ub.allreduce(torch.ones(2), compression=ub.Compression.fp16)
        tensor([1., 1.])
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
        """Sends the share `ratio` of the elements, those of largest magnitude.

        Args:
            ratio: Share of elements to send, 0 < ratio <= 1.
        """
        return Codec(f"topk:{ratio:.17g}")

    @staticmethod
    def randk(ratio: float) -> Codec:
        """Sends the share `ratio` of the elements, drawn at random, the same on all ranks.

        Args:
            ratio: Share of elements to send, 0 < ratio <= 1.
        """
        return Codec(f"randk:{ratio:.17g}")

    @staticmethod
    def dct(ratio: float, period: int = 1000) -> Codec:
        """Sends the elements above a threshold, at most a share of all (Gupta et al. 2020).

        Args:
            ratio: Largest share of elements, 0 < ratio <= 1.
            period: Steps after which the threshold is determined anew; default 1000.
        """
        return Codec(f"dct:{ratio:.17g},period={period}")

    @staticmethod
    def dgc(
        ratio: float = 0.001, momentum: float = 0.9, clip: float = 0.0, warmup_steps: int = 0
    ) -> Codec:
        """Deep gradient compression (Lin et al. 2018). The optimizer must have no momentum.

        Args:
            ratio: Share of elements to send, 0 < ratio <= 1; default 0.001.
            momentum: Momentum of the velocity that every rank stores; default 0.9.
            clip: Norm to which gradients are clipped, over all ranks and separately for each block;
                0 (default) for no clipping.
            warmup_steps: Length of the warm-up, default 0. In its four quarters 1/4, 1/16, 1/64 and
                1/256 of the elements are sent.
        """
        return Codec(
            f"dgc:{ratio:.17g},momentum={momentum:.17g},clip={clip:.17g},warmup={warmup_steps}"
        )

    @staticmethod
    def qsgd(bits: int = 4) -> Codec:
        """Rounds stochastically to `bits` bits, sign included: 2, 4 or 8 (Alistarh et al. 2017)."""
        return Codec(f"qsgd:{bits}")

    @staticmethod
    def powersgd(rank: int = 2) -> Codec:
        """Sends matrices as two factors, where these are smaller (Vogels et al. 2019).

        Args:
            rank: Rank of the factors, default 2.
        """
        return Codec(f"powersgd:{rank}")


#: One codec, or a dict from patterns of parameter names to codecs. A str is the spec of a codec.
Rules = Codec | str | Mapping[str, Codec | str]
#: The codecs that "auto" chooses from, the least lossy first.
AUTO = ("bf16", "int8")


@dataclass(frozen=True)
class Choices:
    """The codecs that each parameter may use.

    Attributes:
        lists: One or more assignments; each has the spec of every parameter's codec.
        optional: If True, each plan uses the assignment that is predicted to be fastest, or no
            compression if that is as fast. If False, there is one assignment, and it is used.
    """

    lists: Sequence[Sequence[str]]
    optional: bool = False

    @property
    def specs(self) -> set[str]:
        """The specs of all codecs that occur."""
        return {spec for row in self.lists for spec in row}


def choices_of(
    rules: Rules | Sequence[Rules], names: Sequence[str], params: Sequence[nn.Parameter]
) -> Choices:
    """Parses the argument `compression` of `DistributedOptimizer`.

    Args:
        rules: Rules as for `codecs_of`; or a sequence of such rules to choose from, the least lossy
            first; or "auto", which stands for `AUTO`.
        names: Names of the parameters.
        params: The parameters, in the same order.

    Raises:
        UsageError: `codecs_of` refuses the rules, or there is nothing to choose from.
    """
    if isinstance(rules, str) and rules == "auto":
        rules = AUTO
    if isinstance(rules, (str, Mapping)) or not isinstance(rules, Iterable):
        return Choices([codecs_of(rules, names, params)])
    if isinstance(rules, (bytes, bytearray)) or not isinstance(rules, Sequence):
        raise UsageError(
            f"compression: a {type(rules).__name__} is not a list of codecs; give a list, the "
            "least lossy codec first"
        )
    if not rules:
        raise UsageError('compression: the list of codecs is empty; name codecs, or "auto"')
    return Choices([codecs_of(rule, names, params) for rule in rules], optional=True)


def codecs_of(rules: Rules, names: Sequence[str], params: Sequence[nn.Parameter]) -> list[str]:
    """Returns the spec of each parameter's codec.

    Args:
        rules: A codec, or a dict from patterns of parameter names to codecs. A single codec applies
            to all parameters if it is a cast, else to those of two or more dimensions: biases and
            norms are small, and compressing them harms training. Patterns are those of file names
            (`fnmatch`); the first that matches counts. A parameter that matches none is not
            compressed.
        names: Names of the parameters.
        params: The parameters, in the same order.

    Raises:
        UsageError: A codec does not exist, or a pattern matches no parameter.
    """
    if not isinstance(rules, Mapping):
        spec = _spec(rules)
        return [spec if spec in _CASTS or p.dim() > 1 else "none" for p in params]
    specs = {pattern: _spec(codec) for pattern, codec in rules.items()}
    for pattern in specs:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"compression: the pattern '{pattern}' fits no parameter; the first one is named "
                f"'{names[0]}'"
            )
    return [next((s for p, s in specs.items() if fnmatchcase(n, p)), "none") for n in names]


def check_momentum(specs: Iterable[str], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises UsageError if a codec and the optimizer both apply momentum."""
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
    """Raises UsageError if a codec cannot be used with shard_optimizer=True."""
    for spec in specs:
        codec = _core.make_codec(spec)
        if codec is not None and (codec.factors or not codec.relays):
            raise UsageError(
                f"compression {spec} does not support shard_optimizer=True, where each rank "
                "receives a shard of the gradients; use fp16, bf16, fp8, int8, topk, randk, dct, "
                "qsgd, terngrad, efsignsgd or onebit"
            )


def _spec(codec: Codec | str) -> str:
    if not isinstance(codec, (Codec, str)):
        raise UsageError(
            f"compression {codec!r} is no codec: take one of usbyte.torch.Compression, or its "
            "spec; only eager collectives such as allreduce() take other compressors"
        )
    return codec.spec if isinstance(codec, Codec) else Codec(codec).spec

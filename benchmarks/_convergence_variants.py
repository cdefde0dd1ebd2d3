# SPDX-License-Identifier: Apache-2.0
"""What is trained with: codecs, each with what it needs of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.compression.codecs import Rules

UNCOMPRESSED = "uncompressed"


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        label: Stands in tables; of one codec, its spec.
        compression: Of `DistributedOptimizer`.
        family: Variants of one share a picture.
        lr: Factor of a job's learning rate, by job; 1 where there is none.
        plain: Jobs that SGD without momentum trains instead of their optimizer: the codec has
            momentum of its own, or does better without any, as what was not sent comes later.
    """

    label: str
    compression: Rules | None
    family: str = ""
    lr: Mapping[str, float] = field(default_factory=dict)
    plain: Sequence[str] = ()

    @property
    def may_take_longer(self) -> bool:
        """Whether it is trained for longer where it needs that; not if that is beside the point."""
        return "feedback=off" not in self.label


def _family(
    family: str,
    *specs: str,
    everything: bool = False,
    lr: Mapping[str, float] | None = None,
    plain: Sequence[str] = (),
) -> list[Variant]:
    """Codecs alike; `everything`: for biases and norms as well."""
    return [
        Variant(spec, {"*": spec} if everything else spec, family, lr or {}, plain)
        for spec in specs
    ]


#: Signs are larger than gradients: SGD makes steps of the whole learning rate, and biases must be
#: signs as well if one learning rate is to fit all. AdamW takes its own: it divides by their size.
_SIGN_LR = {"digits": 0.005, "char_gpt_sgd": 0.001}
#: Without momentum, which makes steps ten times as long.
_PLAIN_SIGN_LR = {"digits": 0.05, "char_gpt": 0.2, "char_gpt_sgd": 0.01}
#: Found by trying; ten times would be as long as steps with momentum are.
_PLAIN_LR = {"digits": 10.0, "char_gpt_sgd": 5.0}
_PLAIN_SIGNS_LR = {"char_gpt_sgd": 5.0}

#: All codecs of usbyte; those that the installed core does not know are left out with a word.
VARIANTS = [
    Variant(UNCOMPRESSED, None),
    *_family("fewer bits", "fp16", "bf16", "fp8", "fp8:e5m2", "int8", "qsgd:8", "qsgd:4"),
    *_family("fewer bits", "terngrad"),
    *_family("fewer elements", "topk:0.1"),
    *_family(
        "fewer elements",
        "topk:0.01",
        "topk:0.01,feedback=off",
        "randk:0.1",
        "randk:0.1,feedback=off",
        "dct:0.01,period=100",
        lr=_PLAIN_LR,
        plain=["digits", "char_gpt_sgd"],
    ),
    *_family("fewer elements", "dgc:0.01", plain=["digits", "char_gpt_sgd"]),
    *_family(
        "signs",
        "efsignsgd",
        "efsignsgd,feedback=off",
        "onebit",
        "onebit,feedback=off",
        lr=_PLAIN_SIGNS_LR,
        plain=["char_gpt_sgd"],
    ),
    *_family("signs", "signsgd", everything=True, lr=_SIGN_LR),
    *_family(
        "signs",
        "signum",
        everything=True,
        lr=_PLAIN_SIGN_LR,
        plain=["digits", "char_gpt", "char_gpt_sgd"],
    ),
    *_family("low rank", "powersgd:2", "powersgd:4"),
]


def chosen(specs: Sequence[str]) -> list[Variant]:
    """The uncompressed variant, and one for each spec: the table's, or one without needs.

    Raises:
        UsageError: There is no such codec.
    """
    table = {variant.label: variant for variant in VARIANTS}
    for spec in specs:
        _core.make_codec(spec)
    return [
        table[UNCOMPRESSED],
        *(table.get(spec) or Variant(spec, spec, "others") for spec in specs),
    ]


def known(variant: Variant) -> bool:
    """Whether the installed core can do it."""
    try:
        return variant.compression is None or _core.make_codec(variant.label) is not None
    except UsageError:
        return False

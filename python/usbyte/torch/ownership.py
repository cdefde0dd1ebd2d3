"""Which DistributedOptimizer a parameter belongs to, and how long that lives."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from usbyte.errors import UsageError

if TYPE_CHECKING:
    from usbyte.torch.optimizer import DistributedOptimizer

# Torch keeps hooks where Python's collector does not look, so they refer to the optimizer weakly;
# as an attribute of its parameters it lives as long as one of these, and goes with the last.
_TIE = "_usbyte_tie"


class _Tie:
    """Between a parameter and its optimizer; copies and pickles of the parameter have none."""

    def __init__(self, param: nn.Parameter, owner: DistributedOptimizer) -> None:
        self.id, self.owner = id(param), owner  # a weak reference would forbid torch to swap it

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return collections.OrderedDict, ()  # which torch.load takes with weights_only, too


def owner_of(param: nn.Parameter) -> DistributedOptimizer | None:
    """The optimizer that has claimed the parameter last, if any."""
    tie = vars(param).get(_TIE)
    return tie.owner if isinstance(tie, _Tie) and tie.id == id(param) else None


def claim(
    owner: DistributedOptimizer, params: Sequence[nn.Parameter], names: Sequence[str]
) -> None:
    """Makes parameters the optimizer's, which lives as long as any of them from now on.

    Raises:
        UsageError: Another one that is not closed has one of them.
    """
    for param, name in zip(params, names, strict=True):
        other = owner_of(param)
        if other is not None and other is not owner and not other.closed:
            raise UsageError(
                f"parameter '{name}' is already wrapped by another DistributedOptimizer, which "
                "lives on with the model: call its close() first"
            )
    for param in params:
        setattr(param, _TIE, _Tie(param, owner))


def disown(owner: DistributedOptimizer, params: Sequence[nn.Parameter]) -> None:
    """Makes the optimizer's parameters nobody's."""
    for param in params:
        if owner_of(param) is owner:
            delattr(param, _TIE)

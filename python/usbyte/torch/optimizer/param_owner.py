# SPDX-License-Identifier: Apache-2.0
"""Which DistributedOptimizer a parameter belongs to, and how long that lives."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from usbyte.errors import UsageError

# Torch keeps hooks where Python's collector does not look, so they refer to the optimizer weakly.
# As an attribute of its parameters it lives as long as one of these, and goes with the last.
_TIE = "_usbyte_tie"


class Owner(Protocol):
    """A DistributedOptimizer, as its parameters know it."""

    @property
    def closed(self) -> bool:
        """True once it sends nothing any more."""


class ParamOwner:
    """From a parameter to its optimizer; a pickle of the parameter has something empty for it.

    Torch swaps no tensor to which there are weak references, and a parameter that it swapped would
    leave its hook behind.
    """

    def __init__(self, param: nn.Parameter, owner: Owner) -> None:
        self.of, self.owner = weakref.ref(param), weakref.ref(owner)
        self.kept: Owner | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return collections.OrderedDict, ()  # which torch.load takes with weights_only, too


def get_owner(param: nn.Parameter) -> Owner | None:
    """The optimizer that last claimed the parameter, if it still exists."""
    tie = _tie_of(param)
    return tie.owner() if tie is not None else None


def register_params(owner: Owner, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
    """Makes parameters the optimizer's.

    Raises:
        UsageError: Another one that is not closed has one of them.
    """
    for param, name in zip(params, names, strict=True):
        other = get_owner(param)
        if other is not None and other is not owner and not other.closed:
            raise UsageError(
                f"parameter '{name}' is already wrapped by another DistributedOptimizer, which "
                "lives on with the model: call its close() first"
            )
    for param in params:
        setattr(param, _TIE, ParamOwner(param, owner))


def retain_owner(owner: Owner | None, params: Sequence[nn.Parameter]) -> None:
    """From now on the optimizer that has claimed the parameters lives as long as any of them.

    With None, as long as somebody else refers to it.
    """
    for param in params:
        if (tie := _tie_of(param)) is not None:
            tie.kept = owner


def _tie_of(param: nn.Parameter) -> ParamOwner | None:
    tie = vars(param).get(_TIE)
    return tie if isinstance(tie, ParamOwner) and tie.of() is param else None

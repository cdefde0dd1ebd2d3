# SPDX-License-Identifier: Apache-2.0
"""Registry that maps a parameter to its DistributedOptimizer and controls its lifetime."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from usbyte.errors import UsageError

# Python's garbage collector cannot see torch's hooks, so they refer to the optimizer weakly.
# Attributes of its parameters keep it alive as long as one of the parameters lives.
_TIE = "_usbyte_tie"


class Session(Protocol):
    """What a DistributedOptimizer trains with.

    Attributes:
        closed: Whether the optimizer is closed, and sends nothing any more.
    """

    closed: bool


class ParamOwner:
    """Attribute of a parameter that refers to its optimizer. It is pickled as an empty OrderedDict.

    The weak reference to the parameter also keeps torch from swapping the parameter with another
    tensor, which would leave its hook behind.
    """

    def __init__(self, param: nn.Parameter, owner: object, session: Session) -> None:
        self.of, self.owner = weakref.ref(param), weakref.ref(owner)
        self.session = weakref.ref(session)
        self.kept: object = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return collections.OrderedDict, ()  # which torch.load takes with weights_only, too


def get_owner(param: nn.Parameter) -> object:
    """Returns the optimizer that last registered the parameter; None if there is none any more."""
    tie = _tie_of(param)
    return tie.owner() if tie is not None else None


def register_params(
    owner: object, session: Session, params: Sequence[nn.Parameter], names: Sequence[str]
) -> None:
    """Registers `owner` as the optimizer of the parameters.

    Args:
        owner: The optimizer; it is not kept alive.
        session: What the optimizer trains with; not kept alive either.
        params: The parameters.
        names: Their names, in the same order.

    Raises:
        UsageError: Another optimizer, which is not closed, has one of the parameters. Nothing has
            changed then.
    """
    for param, name in zip(params, names, strict=True):
        tie = _tie_of(param)
        other = tie.session() if tie is not None else None
        if other is not None and other is not session and not other.closed:
            raise UsageError(
                f"parameter '{name}' is already wrapped by another DistributedOptimizer, which "
                "stays in use as long as the model exists: call its close() first"
            )
    for param in params:
        setattr(param, _TIE, ParamOwner(param, owner, session))


def retain_owner(owner: object, params: Sequence[nn.Parameter]) -> None:
    """Keeps the registered optimizer alive as long as any of the parameters lives.

    Args:
        owner: The optimizer that has registered the parameters. None ends this: it then lives as
            long as something else refers to it.
        params: The parameters.
    """
    for param in params:
        if (tie := _tie_of(param)) is not None:
            tie.kept = owner


def _tie_of(param: nn.Parameter) -> ParamOwner | None:
    tie = vars(param).get(_TIE)
    return tie if isinstance(tie, ParamOwner) and tie.of() is param else None

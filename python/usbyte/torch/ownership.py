"""Which DistributedOptimizer a parameter belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from usbyte.errors import UsageError

if TYPE_CHECKING:
    from usbyte.torch.optimizer import DistributedOptimizer

# Not an attribute of parameters, which are copied and pickled with theirs.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def owner_of(param: nn.Parameter) -> DistributedOptimizer | None:
    """The optimizer that last claimed the parameter, if it still exists."""
    reference: weakref.ref[DistributedOptimizer] | None = _owners.get(param)
    return reference() if reference is not None else None


def claim(
    owner: DistributedOptimizer, params: Sequence[nn.Parameter], names: Sequence[str]
) -> None:
    """Makes parameters the optimizer's.

    Raises:
        UsageError: Another one that is not closed has one of them.
    """
    for param, name in zip(params, names, strict=True):
        other = owner_of(param)
        if other is not None and other is not owner and not other.closed:
            raise UsageError(
                f"parameter '{name}' is already wrapped by another DistributedOptimizer, which "
                "lives on in the model's hooks; call its close() first"
            )
        _owners[param] = weakref.ref(owner)

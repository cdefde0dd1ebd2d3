# SPDX-License-Identifier: Apache-2.0
"""Maps parameters to parameter groups, which a script may rearrange at any time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from usbyte.errors import UsageError
from usbyte.torch.plan.job import ParamTable


class ParamGroupIndex:
    """Parameter group of each parameter. It is read at each step, as scripts change `param_groups`.

    Args:
        optimizer: The wrapped optimizer.
        param_table: Its parameters when it was wrapped.

    Attributes:
        group_of: The result of the last `refresh`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, param_table: ParamTable) -> None:
        self._optimizer, self._param_table = optimizer, param_table
        self._known: list[list[torch.Tensor]] = []  # parameters by group at the last refresh
        self.group_of: list[int | None] = []

    def refresh(self) -> Sequence[int | None]:
        """Returns, by parameter, the index of its parameter group now.

        It is None if no group has the parameter any more, so that the parameter is not updated.

        Raises:
            UsageError: A group has a parameter that was added by hand, so that it has no hook, or a
                parameter is in two groups.
        """
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        if not self._are_known(groups):
            self.group_of = self._find(groups)
            self._known = [list(group["params"]) for group in groups]
        return self.group_of

    def _are_known(self, groups: Sequence[dict[str, Any]]) -> bool:
        if len(groups) != len(self._known):
            return False
        for group, known in zip(groups, self._known, strict=True):
            params = group["params"]
            if len(params) != len(known) or not all(map(is_, params, known)):
                return False
        return True

    def _find(self, groups: Sequence[dict[str, Any]]) -> list[int | None]:
        index = {id(param): i for i, param in enumerate(self._param_table.params)}
        others = {id(param) for param in self._param_table.frozen}
        found: list[int | None] = [None] * len(index)
        for g, group in enumerate(groups):
            for param in group["params"]:
                i = index.get(id(param))
                if i is None:
                    if id(param) not in others and param.numel() > 0:
                        raise UsageError(
                            f"group {g} of the optimizer has a parameter of shape "
                            f"{tuple(param.shape)} that was added without add_param_group(), so "
                            "its gradients would not be reduced: pass new parameters to "
                            "add_param_group() of the DistributedOptimizer, or wrap the optimizer "
                            "again"
                        )
                elif found[i] is not None:
                    raise UsageError(
                        f"parameter '{self._param_table.names[i]}' is in groups {found[i]} and {g} "
                        "of the optimizer: leave it in one"
                    )
                else:
                    found[i] = g
        return found

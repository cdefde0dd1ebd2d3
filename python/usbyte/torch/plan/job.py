# SPDX-License-Identifier: Apache-2.0
"""What is asked of a DistributedOptimizer, and for which parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.comm.topology import TopologyLike
from usbyte.torch.compression.codecs import Rules
from usbyte.torch.reduce_op import Average, ReduceOp

Overlap = Literal["auto", "backward", "forward"]

#: Profile x NetworkModel -> Plan
Policy = Callable[[_core.Profile, _core.NetworkModel], _core.Plan]


@dataclass(frozen=True)
class Settings:
    """Arguments of a `DistributedOptimizer`, whose docstring tells of each, with their defaults.

    Attributes:
        shard_optimizer: Its `shard_optimizer`; overlap is "forward" then.
        fused_update: Its `fused_update`.
        sparse_as_dense: Its `sparse_as_dense`.
        options: Sizes in bytes for named policies; see `usbyte._core.make_plan`.
        passes_per_step: Its `backward_passes_per_step`.
    """

    overlap: Overlap
    policy: str | Policy
    op: ReduceOp
    model: nn.Module | None
    compression: Rules | Sequence[Rules]
    shard_optimizer: bool
    fused_update: bool
    max_grad_norm: float | None
    sparse_as_dense: bool
    topology: TopologyLike | None
    options: Mapping[str, int]
    tune_steps: int | None
    passes_per_step: int

    def scale(self, size: int) -> float:
        """What gradients of `size` ranks are multiplied with before they are summed."""
        return 1.0 / size if self.op == Average else 1.0


@dataclass(frozen=True)
class ParamTable:
    """Parameters of an optimizer that get gradients, in the order of its groups.

    Attributes:
        names: Unique.
        params: Each with elements.
        groups: By parameter, which of the optimizer's groups it is in.
        frozen: Those that do not require a gradient.
    """

    names: Sequence[str]
    params: Sequence[nn.Parameter]
    groups: Sequence[int]
    frozen: Sequence[nn.Parameter]

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str] | None
    ) -> ParamTable:
        """What `optimizer` trains.

        Args:
            optimizer: Any.
            names: Of its parameters; None makes them up.

        Raises:
            UsageError: A parameter has no name.
        """
        rows = [(p, g) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
        if any(is_lazy(p) for p, _ in rows):
            raise UsageError(
                "the optimizer has a parameter without a shape, of a lazy module: run one batch "
                "through the model before the optimizer is wrapped"
            )
        param_table = [(p, g) for p, g in rows if p.requires_grad and p.numel()]
        params = [p for p, _ in param_table]
        return cls(
            _named(params, names)
            if names is not None
            else [f"group{g}.param{i}" for i, (_, g) in enumerate(param_table)],
            params,
            [g for _, g in param_table],
            [p for p, _ in rows if not p.requires_grad],
        )

    def in_order(self, names: Sequence[str]) -> ParamTable:
        """The same parameters in the order of these names."""
        place = {name: i for i, name in enumerate(self.names)}
        order = [place[name] for name in names]
        return ParamTable(
            names,
            [self.params[i] for i in order],
            [self.groups[i] for i in order],
            self.frozen,
        )

    def check_frozen(self) -> None:
        """Raises UsageError if one that was frozen is to be trained now."""
        for param in self.frozen:
            if param.requires_grad:
                raise UsageError(
                    f"a parameter of shape {tuple(param.shape)} was frozen when the optimizer was "
                    "wrapped and is not any more; wrap the optimizer anew after unfreezing"
                )


def with_new_names(
    names: Mapping[nn.Parameter, str] | None,
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None,
) -> dict[nn.Parameter, str] | None:
    """Names for the parameters of the optimizer's last group, too, if there are names at all.

    They are the model's, if it has the parameter; or those that the group was given, as torch keeps
    them; or made up. All ranks make up the same.
    """
    if names is None:
        return None
    group = optimizer.param_groups[-1]
    of_model = {p: name for name, p in model.named_parameters()} if model is not None else {}
    of_group = dict(zip(group["params"], group.get("param_names", []), strict=False))
    extended, taken = dict(names), set(names.values())
    for i, param in enumerate(group["params"]):
        if param in extended:
            continue
        made_up = f"group{len(optimizer.param_groups) - 1}.param{i}"
        name = of_model.get(param) or of_group.get(param) or made_up
        while name in taken:
            name = f"{name}'"
        extended[param] = name
        taken.add(name)
    return extended


def _named(params: Sequence[nn.Parameter], names: Mapping[nn.Parameter, str]) -> list[str]:
    missing = [p for p in params if p not in names]
    if missing:
        raise UsageError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters, the first "
            f"of shape {tuple(missing[0].shape)}; pass model.named_parameters()"
        )
    return [names[p] for p in params]

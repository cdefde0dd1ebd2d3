# SPDX-License-Identifier: Apache-2.0
"""The settings of a DistributedOptimizer, and the table of its parameters."""

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

#: A policy as a callable: maps a profile and a network model to a plan.
Policy = Callable[[_core.Profile, _core.NetworkModel], _core.Plan]


@dataclass(frozen=True)
class Settings:
    """The arguments of a `DistributedOptimizer`, with defaults filled in.

    The docstring of `DistributedOptimizer` describes each argument.

    Attributes:
        overlap: "auto", "backward" or "forward".
        policy: Name of a policy, or a callable.
        op: `Average` or `Sum`.
        model: The module that owns the parameters; None if it is not known.
        compression: Rules for codecs, or a sequence of rules to choose from.
        shard_optimizer: Whether each rank updates one shard of every parameter. `overlap` is then
            "forward".
        fused_update: Whether updates run as one CUDA kernel.
        max_grad_norm: Upper limit of the gradient norm with `shard_optimizer`; None for no limit.
        sparse_as_dense: Whether sparse gradients are sent as dense ones.
        topology: Dimensions of the network; None for none.
        options: Sizes in bytes for named policies, for example "bucket_bytes" of "ddp".
        tune_steps: Steps of each trial of a plan; None for the policy's default, 0 for no trials.
        passes_per_step: The argument `backward_passes_per_step`, at least 1.
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
        """Returns the factor for gradients before their sum over `size` ranks.

        It is 1 / size for `Average` and 1 for `Sum`.
        """
        return 1.0 / size if self.op == Average else 1.0


@dataclass(frozen=True)
class ParamTable:
    """The parameters of an optimizer that get gradients, in the order of its parameter groups.

    `names`, `params` and `groups` have the same length and order.

    Attributes:
        names: Unique name of each parameter.
        params: The parameters; each requires a gradient and has at least one element.
        groups: Index of each parameter's group in `optimizer.param_groups`.
        frozen: The optimizer's parameters with `requires_grad=False`.
    """

    names: Sequence[str]
    params: Sequence[nn.Parameter]
    groups: Sequence[int]
    frozen: Sequence[nn.Parameter]

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str] | None
    ) -> ParamTable:
        """Returns the table of the parameters of `optimizer`.

        Args:
            optimizer: The wrapped torch optimizer.
            names: Name of each parameter; None to generate "group<g>.param<i>".

        Raises:
            UsageError: A parameter is not in `names`, or is an `UninitializedParameter` of a lazy
                module.
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
        """Returns a table of the same parameters, sorted into the order of `names`."""
        place = {name: i for i, name in enumerate(self.names)}
        order = [place[name] for name in names]
        return ParamTable(
            names,
            [self.params[i] for i in order],
            [self.groups[i] for i in order],
            self.frozen,
        )

    def check_frozen(self) -> None:
        """Raises UsageError if a parameter in `frozen` has come to require a gradient."""
        for param in self.frozen:
            if param.requires_grad:
                raise UsageError(
                    f"a parameter of shape {tuple(param.shape)} was frozen when the optimizer was "
                    "wrapped and is not any more; wrap the optimizer again after unfreezing"
                )


def with_new_names(
    names: Mapping[nn.Parameter, str] | None,
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None,
) -> dict[nn.Parameter, str] | None:
    """Returns `names` with names for the parameters of the optimizer's last group added.

    The name of a parameter is the first of these that exists: its name in `model`; the name in the
    parameter group's "param_names", where torch stores it; "group<g>.param<i>". A name that is
    taken gets apostrophes appended. All ranks generate the same names.

    Args:
        names: The names of the other parameters; None if the optimizer has no names, and then the
            result is None.
        optimizer: The optimizer, which has the new group already.
        model: The module that owns the parameters; None if it is not known.
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

# SPDX-License-Identifier: Apache-2.0
"""What may be asked of a DistributedOptimizer, each as its docstring says; else UsageError."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import get_args

import torch
from torch import nn

from usbyte.errors import UsageError
from usbyte.planning import tuning
from usbyte.torch.optimizer.sharded import check_shardable
from usbyte.torch.plan.job import Overlap, Policy
from usbyte.torch.reduce_op import Average, ReduceOp, Sum


def check_combination(
    optimizer: torch.optim.Optimizer,
    overlap: Overlap,
    op: ReduceOp,
    shard_optimizer: bool,
    fused_update: bool,
    max_grad_norm: float | None,
    backward_passes_per_step: int,
    gradient_predivide_factor: float,
) -> None:
    """Whether these go together."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer)}")
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise UsageError(
            f"{type(optimizer).__name__} has no param_groups: set them, as Optimizer.__init__ does"
        )
    if overlap not in get_args(Overlap):
        raise UsageError(f'overlap must be "auto", "backward" or "forward", not {overlap!r}')
    if op not in (Average, Sum):
        raise UsageError(f"op must be Average or Sum, not {op!r}")
    if shard_optimizer:
        check_shardable(optimizer, overlap)
    elif max_grad_norm is not None:
        raise UsageError(
            "max_grad_norm needs shard_optimizer=True; otherwise call "
            "torch.nn.utils.clip_grad_norm_ between backward() and step()"
        )
    if max_grad_norm is not None and not _is_positive(max_grad_norm, or_infinite=True):
        raise UsageError(f"max_grad_norm must be a positive number, not {max_grad_norm!r}")
    if shard_optimizer and fused_update:
        raise UsageError("fused_update=True does not go with shard_optimizer=True")
    if integer("backward_passes_per_step", backward_passes_per_step) < 1:
        raise UsageError(
            f"backward_passes_per_step must be 1 at least, not {backward_passes_per_step}"
        )
    if not _is_positive(gradient_predivide_factor):
        raise UsageError(
            "gradient_predivide_factor must be a positive number, not "
            f"{gradient_predivide_factor!r}; 1.0 is the default"
        )
    if gradient_predivide_factor != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor needs op=Average")


def check_policy(policy: str | Policy, shard_optimizer: bool, tune_steps: int | None) -> None:
    """Whether there is such a policy, and it can do that."""
    if isinstance(policy, str):
        tuning.check_policy(policy)
    elif not callable(policy):
        raise UsageError(
            "policy must be the name of one, or a function of a Profile and a NetworkModel that "
            f"returns a Plan, not {policy!r}"
        )
    if shard_optimizer and isinstance(policy, str) and policy not in tuning.SHARDING:
        raise UsageError(
            f"policy '{policy}' cannot serve shard_optimizer=True; take one of "
            f"{', '.join(tuning.SHARDING)}"
        )
    if isinstance(policy, str) and policy.startswith("tune:"):
        tuning.check_installed()
    if tune_steps is not None and policy not in tuning.TRIED:
        raise UsageError(f"tune_steps needs one of the policies {', '.join(tuning.TRIED)}")
    if tune_steps is not None:
        steps = integer("tune_steps", tune_steps)
        if steps < 2 and (policy, steps) != ("auto", 0):
            raise UsageError(
                f"tune_steps must be 2 at least to time a step, not {steps}; 0 lets auto try "
                "nothing"
            )


def _is_positive(given: float, or_infinite: bool = False) -> bool:
    """Whether it is a number above 0, of whatever type."""
    try:
        number = 0.0 if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # of tensors: a RuntimeError
        return False
    return number > 0 and (or_infinite or number < math.inf)


def integer(name: str, given: int) -> int:
    """A whole number, as an int whatever type of integer it was."""
    try:
        return int(operator.index(given))
    except TypeError:
        raise UsageError(f"{name} must be a whole number, not {given!r}") from None


def positive(name: str, given: int | None, default: int) -> int:
    """A number of bytes, or the default."""
    if given is None:
        return default
    size = integer(name, given)
    if size <= 0:
        raise UsageError(f"{name} must be positive, not {size}")
    return size


def names_of(named: Iterable[tuple[str, nn.Parameter]] | None) -> dict[nn.Parameter, str] | None:
    """The name of each parameter."""
    if named is None:
        return None
    names: dict[nn.Parameter, str] = {}
    seen: dict[str, nn.Parameter] = {}
    for row in named:
        if not (isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str)):
            raise UsageError(
                "named_parameters must yield (name, parameter) pairs, "
                "as model.named_parameters() does"
            )
        name, param = row
        if seen.setdefault(name, param) is not param:
            raise UsageError(f"named_parameters has two parameters named '{name}'")
        names.setdefault(param, name)  # a tied parameter keeps its first name
    return names

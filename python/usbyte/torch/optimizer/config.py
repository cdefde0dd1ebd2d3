# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of DistributedOptimizer, each of which raises UsageError."""

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
    """Checks the arguments of DistributedOptimizer, alone and in combination.

    Args:
        optimizer: The optimizer to wrap.
        overlap: "auto", "backward" or "forward".
        op: `Average` or `Sum`.
        shard_optimizer: Whether updates are sharded.
        fused_update: Whether updates are fused.
        max_grad_norm: Positive limit of the gradient norm; needs `shard_optimizer`. None for no
            limit.
        backward_passes_per_step: At least 1.
        gradient_predivide_factor: Positive and finite; other values than 1.0 need `Average`.

    Raises:
        UsageError: An argument, or the combination, cannot be used.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}: make one "
            "first, as in DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "
            "model.named_parameters())"
        )
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
        raise UsageError("fused_update=True cannot be combined with shard_optimizer=True")
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


def validate_policy(
    policy: str | Policy, shard_optimizer: bool, tune_steps: int | None
) -> str | Policy:
    """Checks that the policy exists and supports the other arguments.

    Args:
        policy: Name of a policy, or a function of a Profile and a NetworkModel.
        shard_optimizer: Whether updates are sharded.
        tune_steps: Steps of each trial, at least 2; or 0 for "auto". None for the default.

    Returns:
        The policy; in place of a former name the present one.

    Raises:
        UsageError: The policy is unknown or does not support the arguments.
    """
    if isinstance(policy, str):
        policy = tuning.known_policy(policy)
    elif not callable(policy):
        raise UsageError(
            "policy must be the name of one, or a function of a Profile and a NetworkModel that "
            f"returns a Plan, not {policy!r}"
        )
    if shard_optimizer and isinstance(policy, str) and policy not in tuning.SHARDING:
        raise UsageError(
            f"policy '{policy}' does not support shard_optimizer=True; use one of "
            f"{', '.join(tuning.SHARDING)}"
        )
    if policy in tuning.BAYESIAN:
        tuning.check_installed()
    if tune_steps is not None and policy not in tuning.TRIED:
        raise UsageError(f"tune_steps needs one of the policies {', '.join(tuning.TRIED)}")
    if tune_steps is not None:
        steps = integer("tune_steps", tune_steps)
        if steps < 2 and (policy, steps) != ("auto", 0):
            raise UsageError(
                f"tune_steps must be 2 at least to time a step, not {steps}; with 0, policy auto "
                "tries no plans"
            )
    return policy


def _is_positive(given: float, or_infinite: bool = False) -> bool:
    """Returns whether `given`, a number of any type, is above 0 and finite or `or_infinite`."""
    try:
        number = 0.0 if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: tensors
        return False
    return number > 0 and (or_infinite or number < math.inf)


def integer(name: str, given: int) -> int:
    """Returns `given`, an integer of any type, as an int.

    Raises:
        UsageError: `given` is no integer. The message names the argument `name`.
    """
    try:
        return int(operator.index(given))
    except TypeError:
        raise UsageError(f"{name} must be a whole number, not {given!r}") from None


def positive(name: str, given: int | None, default: int) -> int:
    """Returns `given` as an int, or `default` if it is None.

    Raises:
        UsageError: `given` is no integer, or not positive. The message names the argument `name`.
    """
    if given is None:
        return default
    size = integer(name, given)
    if size <= 0:
        raise UsageError(f"{name} must be positive, not {size}")
    return size


def names_of(named: Iterable[tuple[str, nn.Parameter]] | None) -> dict[nn.Parameter, str] | None:
    """Returns the name of each parameter; None if `named` is None.

    Args:
        named: Pairs of names and parameters, as `model.named_parameters()` yields them.

    Raises:
        UsageError: `named` has another form, or two parameters have the same name.
    """
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
            raise UsageError(
                f"named_parameters has two parameters named '{name}': give each model a prefix of "
                "its own, as in model.named_parameters(prefix='encoder')"
            )
        names.setdefault(param, name)  # a tied parameter keeps its first name
    return names

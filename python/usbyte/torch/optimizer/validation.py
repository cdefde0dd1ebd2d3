# SPDX-License-Identifier: Apache-2.0
"""Checks that an optimizer's parameters support the settings, and chooses what serves them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.compression.codecs import Choices, check_momentum, check_relays, choices_of
from usbyte.torch.layout import dtype_name
from usbyte.torch.optimizer.compat.known_optimizers import check_narrowable
from usbyte.torch.optimizer.compat.other_reducers import check_unreduced
from usbyte.torch.optimizer.compat.shared_memory import sharing_memory
from usbyte.torch.optimizer.fused import FusedUpdate
from usbyte.torch.optimizer.sharded import check_dense
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.sparse import renormalized_parameters, sparse_parameters
from usbyte.torch.runtime.device import device_of
from usbyte.torch.runtime.tensor_checks import check_sendable

log = logging.getLogger("usbyte")


@dataclass(frozen=True)
class ValidatedOptimizer:
    """The result of `validate_optimizer`.

    Attributes:
        updater: Its `step` updates the parameters: the wrapped optimizer or its fused update.
        codecs: Codecs that may encode the gradients.
        sparse: Names of the parameters whose gradients are sent as the rows that they have.
    """

    updater: torch.optim.Optimizer | FusedUpdate
    codecs: Choices
    sparse: set[str]


def validate_optimizer(
    optimizer: torch.optim.Optimizer,
    param_table: ParamTable,
    settings: Settings,
    size: int,
    model: nn.Module | None,
) -> ValidatedOptimizer:
    """Checks everything that a rank can check alone. Changes nothing.

    Args:
        optimizer: The wrapped optimizer.
        param_table: Its parameters.
        settings: Arguments of the DistributedOptimizer.
        size: Number of ranks that share the gradients.
        model: Module that owns the parameters; None if unknown. Layers with sparse gradients are
            found in it.

    Raises:
        UsageError: A parameter does not support the settings.
    """
    names, params = param_table.names, param_table.params
    if not params:
        raise UsageError("the optimizer has no parameter with elements that requires a gradient")
    updater = FusedUpdate(optimizer, names, params) if settings.fused_update else optimizer
    for name, param in zip(names, params, strict=True):
        check_sendable(f"parameter '{name}'", param)
        dtype_name(name, param)
    check_unreduced(optimizer, names, params)
    if settings.shard_optimizer:
        check_dense(names, params)
    elif settings.overlap == "forward":
        check_narrowable(optimizer)
    if settings.shard_optimizer or settings.fused_update:
        _check_separate(settings, names, params)
    codecs = choices_of(settings.compression, names, params)
    if codecs.optional:
        _check_chooses(settings)
    check_momentum(codecs.specs, optimizer.param_groups)
    if size == 1:  # nothing is sent
        return ValidatedOptimizer(updater, codecs, set())
    if settings.shard_optimizer:
        check_relays(codecs.specs)
    device_of(names, params)
    return ValidatedOptimizer(updater, codecs, _sparse(param_table, settings, model))


def warn_of_renormalized(
    label: str, param_table: ParamTable, model: nn.Module | None
) -> set[nn.Parameter]:
    """Returns, and logs, the parameters that the forward pass changes differently on each rank.

    Args:
        label: Name of the optimizer.
        param_table: Parameters of the optimizer; only these are logged.
        model: Module that owns the parameters; None if unknown, in which case no parameter is
            found.
    """
    changed = renormalized_parameters(model)
    for name, param in zip(param_table.names, param_table.params, strict=True):
        if param in changed:
            log.warning(
                "%s: the forward pass renormalizes the rows of '%s' that it uses (max_norm), so "
                "parameters diverge between ranks, as under DDP: remove max_norm, or call "
                "broadcast_parameters periodically",
                label,
                name,
            )
    return changed


def _sparse(param_table: ParamTable, settings: Settings, model: nn.Module | None) -> set[str]:
    known = set() if settings.sparse_as_dense else sparse_parameters(model)
    named = zip(param_table.names, param_table.params, strict=True)
    sparse = {name for name, param in named if param in known}
    if sparse and (settings.shard_optimizer or settings.fused_update):
        what = "shard_optimizer=True" if settings.shard_optimizer else "fused_update=True"
        raise UsageError(
            f"the gradient of '{min(sparse)}' is sparse, which cannot be combined with {what}: "
            "pass sparse_as_dense=True"
        )
    return sparse


def _check_separate(
    settings: Settings, names: Sequence[str], params: Sequence[nn.Parameter]
) -> None:
    """Raises UsageError if parameters share memory.

    Their updates must then be applied one after the other, which sharded and fused updates do not
    do.
    """
    for group in sharing_memory(params):
        what = "shard_optimizer=True" if settings.shard_optimizer else "fused_update=True"
        first, second = (names[i] for i in group[:2])
        raise UsageError(
            f"parameters '{first}' and '{second}' share memory, so that each gets the update of "
            f"both, which cannot be combined with {what}: remove it, or make them one parameter "
            "(module.weight = other.weight)"
        )


def _check_chooses(settings: Settings) -> None:
    policy = settings.policy
    if policy not in _core.policies():
        what = f"policy '{policy}'" if isinstance(policy, str) else "a function"
        raise UsageError(
            f"{what} cannot choose from several codecs: name one for compression=, or take "
            'policy="auto"'
        )

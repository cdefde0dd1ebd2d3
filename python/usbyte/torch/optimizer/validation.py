# SPDX-License-Identifier: Apache-2.0
"""Checks that parameters support the settings, and that all ranks make the same optimizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.comm.factory import ConnectionFacts, Connector
from usbyte.torch.compression.codecs import Choices, check_momentum, check_relays, choices_of
from usbyte.torch.layout import dtype_name
from usbyte.torch.optimizer.compat.known_optimizers import check_narrowable
from usbyte.torch.optimizer.compat.other_reducers import check_unreduced
from usbyte.torch.optimizer.compat.shared_memory import sharing_memory
from usbyte.torch.optimizer.fused import FusedUpdate
from usbyte.torch.optimizer.sharded import check_dense
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.planner import Planner
from usbyte.torch.plan.sparse import renormalized_parameters, sparse_parameters
from usbyte.torch.runtime.device import device_of
from usbyte.torch.runtime.tensor_checks import check_sendable
from usbyte.torch.world.consistency import (
    digest_of,
    param_checksums,
    verify_same,
    verify_same_order,
    verify_same_params,
)
from usbyte.torch.world.rank_group import RankGroup

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


@dataclass(frozen=True)
class _Facts:
    """What a rank tells the others about its optimizer.

    Attributes:
        orphans: Labels of its orphaned engines.
        settings: Settings that must be equal on all ranks.
        params: Digest of its parameters.
        checksums: Checksums of its parameters; None if they have names.
        connection: What the others must know to connect.
    """

    orphans: list[str]
    settings: dict[str, Any]
    params: str
    checksums: list[list[float]] | None
    connection: ConnectionFacts


def verify_same_optimizer(
    rank_group: RankGroup,
    planner: Planner,
    connector: Connector,
    param_table: ParamTable,
    is_named: bool,
    orphans: Sequence[str],
) -> None:
    """Checks in one round trip that all ranks make the same optimizer. Collective.

    Also closes the engines of earlier optimizers that are orphaned on all ranks.

    Args:
        rank_group: Ranks that share the gradients.
        planner: Has the settings, and the facts of each parameter.
        connector: Connects the ranks later.
        param_table: Parameters of the optimizer.
        is_named: Whether the user has given their names.
        orphans: The result of `rank_group.find_orphans`.

    Raises:
        OtherOrderError: Parameters of the same names are in different orders; raised on every rank.
        MismatchError: Settings or parameters differ; raised on every rank.
        UsageError: The ranks cannot be connected as the settings say; raised on every rank.
    """
    label, ranks = planner.label, rank_group.ranks
    mine = _Facts(
        list(orphans),
        planner.settings,
        digest_of(planner.specs),
        None if is_named else param_checksums(param_table.params),
        connector.facts,
    )
    rows: list[_Facts] = rank_group.eager.allgather_json(f"{label}.facts", asdict(mine), _Facts)
    rank_group.close_orphans([row.orphans for row in rows])
    remedy = "Give all ranks the same arguments and environment."
    verify_same(ranks, label, [row.settings for row in rows], remedy)
    verify_same_params(rank_group, label, [row.params for row in rows], planner.specs)
    checked = [row.checksums for row in rows if row.checksums is not None]
    if len(checked) == len(rows):
        verify_same_order(ranks, label, checked)
    connector.verify(label, [row.connection for row in rows])


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

# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of a DasoOptimizer, also across ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.planning import tuning
from usbyte.torch.comm.topology import sizes_of
from usbyte.torch.daso.schedule import DasoSchedule
from usbyte.torch.optimizer.config import integer
from usbyte.torch.world.consistency import (
    digest_of,
    raise_problem,
    verify_same,
    verify_same_params,
)
from usbyte.torch.world.rank_group import RankGroup


def check_arguments(
    rank_group: RankGroup,
    optimizer: torch.optim.Optimizer,
    named: Sequence[tuple[str, nn.Parameter]] | None,
    policy: str,
    topology: _core.Topology | Sequence[int] | None,
    exchange_every: int,
    exchange_wait: int | None,
    stability: float,
    **counts: int,
) -> tuple[DasoSchedule, list[int] | None]:
    """Returns the schedule, and the sizes of `topology` or None. Collective.

    Args:
        rank_group: All ranks.
        optimizer: The optimizer to wrap.
        named: Its parameters with their names; None if they have none.
        policy: Policy for the communication inside a node.
        topology: The network or its sizes, innermost first.
        exchange_every: Initial B.
        exchange_wait: Initial S; None for B // 4, at least 1.
        stability: As for `DasoSchedule`.
        counts: The other arguments of `DasoSchedule`.

    Raises:
        UsageError: An argument is out of range on any rank; raised on every rank.
        MismatchError: The ranks have different arguments or parameters; raised on every rank.
    """
    arguments: dict[str, Any] = {}
    sizes: list[int] | None = None
    problem = ""
    try:
        every = integer("exchange_every", exchange_every)
        wait = max(1, every // 4) if exchange_wait is None else exchange_wait
        arguments = {
            "every": every,
            "wait": integer("exchange_wait", wait),
            "stability": _number("stability", stability),
            **{name: integer(name, given) for name, given in counts.items()},
        }
        sizes = None if topology is None else sizes_of(topology)
        schedule = DasoSchedule(**arguments)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}")
        if policy in tuning.TRIED and policy != "auto":
            raise UsageError(
                f"policy '{policy}' tries plans, and nodes would try different ones: use "
                '"auto" or a policy that tries none'
            )
    except UsageError as error:
        problem = str(error)
    env = rank_group.env
    settings = {
        "topology": sizes,
        "policy": policy,
        "USBYTE_BACKEND": env.backend,
        "USBYTE_LEARNING_STEPS": env.learning_steps,
        "USBYTE_ONE_SHOT_BYTES": env.one_shot_bytes,
        "USBYTE_BUCKET_BYTES": env.bucket_bytes,
    }
    _check_alike(rank_group, problem, arguments | settings, _specs(optimizer, named))
    return schedule, sizes


def _specs(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]] | None
) -> list[list[object]]:
    """Returns the facts of each parameter that must be equal on all ranks."""
    names = {row[1]: row[0] for row in named or [] if isinstance(row, tuple) and len(row) == 2}
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    return [
        [
            names.get(p, f"group{g}.param{i}"),
            list(p.shape),
            list(p.stride()),
            f"{p.dtype} on {p.device.type}",
        ]
        for g, group in enumerate(groups)
        for i, p in enumerate(group["params"])
        if p.requires_grad
    ]


def _number(name: str, given: float) -> float:
    try:
        return float(given + 0)  # the sum is an error for a str, which float() would accept
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"{name} must be a number, not {given!r}") from None


def _check_alike(
    rank_group: RankGroup, problem: str, arguments: dict[str, Any], specs: list[list[object]]
) -> None:
    """Raises on every rank the first problem or difference of any rank."""
    label, ranks = "DasoOptimizer", rank_group.ranks
    prefixed = ("every", "wait")
    values = {f"exchange_{k}" if k in prefixed else k: value for k, value in arguments.items()}
    rows = rank_group.eager.allgather_json(
        "usbyte.daso",
        [problem, values, digest_of(specs)],
        tuple[str, dict[str, Any], str],
    )
    raise_problem(ranks, label, [row[0] for row in rows])
    remedy = "Give all ranks the same arguments and environment."
    verify_same(ranks, label, [row[1] for row in rows], remedy)
    verify_same_params(rank_group, label, [row[2] for row in rows], specs)

# SPDX-License-Identifier: Apache-2.0
"""Checks that settings and parameters are equal on all ranks, and names the first difference."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from usbyte.errors import MismatchError, UsageError
from usbyte.torch.reduce_op import Max
from usbyte.torch.runtime.format import name_holders, name_ranks
from usbyte.torch.torch_private import DisableTorchFunction
from usbyte.torch.world.rank_group import RankGroup

log = logging.getLogger("usbyte")

# Tolerance for checksums of a parameter, relative to its norm: different CPUs or GPUs round
# differently.
_ROUNDING = 1e-3
# The facts of a parameter that follow its name in `specs` of `verify_same_params`.
_ALIKE = ("shape", "strides", "dtype", "compression", "gradients", "group")


class OtherOrderError(MismatchError):
    """Ranks have parameters of the same names in different orders.

    Attributes:
        names: Names of the parameters in the order of the first rank.
    """

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = names


def verify_same_on_all_ranks(
    rank_group: RankGroup,
    label: str,
    values: Mapping[str, object],
    remedy: str,
    problem: str = "",
) -> None:
    """Checks in one round trip that values are equal on all ranks. Collective.

    Args:
        rank_group: The ranks that take part.
        label: Begins the message, such as the name of the called function; the same on all ranks.
        values: Values that JSON can represent, by the names that users know.
        remedy: A sentence that ends the message and says what to do.
        problem: Why this rank cannot go on, so that no rank waits for it; default "" for none.

    Raises:
        UsageError: A rank has a problem. Raised on every rank.
        MismatchError: A value differs. Raised on every rank with the same message, which names the
            first such value, the ranks and what each has.
    """
    rows = rank_group.eager.allgather_json(
        f"{label}.values", [problem, dict(values)], tuple[str, dict[str, Any]]
    )
    raise_problem(rank_group.ranks, label, [its for its, _ in rows])
    verify_same(rank_group.ranks, label, [its for _, its in rows], remedy)


def raise_problem(ranks: Sequence[int], label: str, problems: Sequence[str]) -> None:
    """Raises UsageError with the first problem that a rank has.

    Args:
        ranks: The ranks.
        label: Begins the message.
        problems: What is wrong on each rank, in the order of `ranks`; "" for nothing.
    """
    for problem in filter(None, problems):
        holders = [rank for rank, its in zip(ranks, problems, strict=True) if its == problem]
        where = f" on {name_ranks(holders)}" if len(holders) < len(ranks) else ""
        raise UsageError(f"{label}{where}: {problem}")


def verify_same(
    ranks: Sequence[int], label: str, rows: Sequence[Mapping[str, object]], remedy: str
) -> None:
    """Checks that all rows are equal. Not collective.

    Args:
        ranks: The ranks.
        label: Begins the message.
        rows: Values of each rank by name, in the order of `ranks`.
        remedy: A sentence that ends the message and says what to do.

    Raises:
        MismatchError: A value differs. The message names the first such value in the order of the
            first rank, the ranks and what each has.
    """
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if any(str(value) != str(values[0]) for value in values):
            raise MismatchError(f"{label}: {name} is {name_holders(values, ranks)}. {remedy}")


def digest_of(specs: Sequence[list[object]]) -> str:
    """Returns a hash of `specs`, for `verify_same_params`."""
    return hashlib.sha256(json.dumps(specs).encode()).hexdigest()


def verify_same_params(
    rank_group: RankGroup, label: str, digests: Sequence[str], specs: Sequence[list[object]]
) -> None:
    """Checks that parameters are equal on all ranks. Collective if `digests` differ.

    Args:
        rank_group: The ranks that take part.
        label: Name of the optimizer, for messages.
        digests: The `digest_of` each rank's parameters, in rank order.
        specs: This rank's parameters; one list for each: name, shape, strides, dtype, compression
            in words, "sparse" or "dense" gradients, and index of its parameter group. A list may
            end early.

    Raises:
        OtherOrderError: Parameters of the same names are in different orders; other facts may
            differ too. Raised on every rank.
        MismatchError: Parameters differ. Raised on every rank with the same message.
    """
    if len(set(digests)) == 1:
        return
    told = rank_group.eager.allgather_json(f"{label}.parameters", specs, list[list[Any]])
    difference = _difference_of(rank_group.ranks, told)
    message = f"{label}: {difference}. Build the same model on all ranks."
    orders = [[str(row[0]) for row in its] for its in told]
    if any(order != orders[0] for order in orders) and len(set(map(frozenset, orders))) == 1:
        raise OtherOrderError(message, orders[0])
    raise MismatchError(message)


def param_checksums(params: Sequence[torch.Tensor]) -> list[list[float]]:
    """Returns the sum and the norm of each parameter, for `verify_same_order`."""
    with torch.no_grad(), DisableTorchFunction():
        sums = torch.stack([_param_checksum(param) for param in params]).cpu().nan_to_num()
    rows: list[list[float]] = sums.tolist()
    return rows


def verify_same_order(
    ranks: Sequence[int], label: str, checksums: Sequence[list[list[float]]]
) -> None:
    """Checks that parameters without names have the same order on all ranks. Not collective.

    Nothing is detected if the ranks do not have equal values yet, as before `broadcast_parameters`.

    Args:
        ranks: The ranks.
        label: Name of the optimizer, for messages.
        checksums: The `param_checksums` of each rank, in the order of `ranks`.

    Raises:
        MismatchError: Ranks have the same values in different orders.
    """
    first, *others = checksums
    for rank, other in zip(ranks[1:], others, strict=True):
        if other != first and sorted(other) == sorted(first):
            raise MismatchError(
                f"{label}: the optimizer has the same parameters in another order on rank {rank} "
                f"than on rank {ranks[0]}, and would sum gradients of different ones: pass "
                "named_parameters=model.named_parameters(), by which they are matched, or give the "
                "optimizer model.parameters() on all ranks"
            )


def warn_if_params_diverge(
    rank_group: RankGroup, label: str, names: Sequence[str], params: Sequence[torch.Tensor]
) -> None:
    """Logs a warning on rank 0 if parameters differ by more than rounding. Collective.

    Args:
        rank_group: The ranks that take part.
        label: Name of the optimizer, for the message.
        names: Name of each parameter.
        params: The parameters, in the order of `names`. None may have a pending update.
    """
    with torch.no_grad(), DisableTorchFunction():
        mine = (
            torch.stack([_param_checksum(param) for param in params]).flatten().cpu().nan_to_num()
        )
    spread = torch.stack([mine, -mine])
    rank_group.eager.allreduce(f"{label}.spread", spread, Max)
    largest, least = spread[0].view(-1, 2), -spread[1].view(-1, 2)
    apart = ((largest - least) > _ROUNDING * largest[:, 1:]).any(1)
    if not apart.any():
        return
    first = int(apart.nonzero()[0])
    own = mine.view(-1, 2)[first].tolist()
    told = rank_group.eager.allgather_json(f"{label}.apart", own, tuple[float, float])
    if rank_group.rank > 0:
        return
    rank = max(
        range(len(told)), key=lambda r: max(abs(x - y) for x, y in zip(told[r], own, strict=True))
    )
    log.warning(
        "%s: the ranks train different models: '%s' has norm %.6g and sum %.6g on rank %d but "
        "%.6g and %.6g on rank %d; %d of %d parameters differ. Call "
        "broadcast_parameters(model.state_dict()) before training, and change gradients and "
        "parameters in the same way on all ranks",
        label,
        names[first],
        own[1],
        own[0],
        rank_group.ranks[0],
        told[rank][1],
        told[rank][0],
        rank_group.ranks[rank],
        int(apart.sum()),
        len(names),
    )


def _param_checksum(param: torch.Tensor) -> torch.Tensor:
    """Returns the sum and the norm of a parameter, shape [2], float64.

    The norm alone is not enough: it is nearly equal for all large layers with the same shape and
    random initialization.
    """
    # float64 for all would need a copy of the parameter.
    dtype = torch.promote_types(param.dtype, torch.float32)
    norm = torch.linalg.vector_norm(param, dtype=dtype)
    return torch.stack([param.sum(dtype=dtype), norm]).double()


def _difference_of(ranks: Sequence[int], specs: Sequence[Sequence[list[Any]]]) -> str:
    """Returns a message that names the first parameter in which ranks differ.

    Args:
        ranks: The ranks.
        specs: Parameters of each rank, as in `verify_same_params`, in the order of `ranks`.
    """
    first = specs[0]
    for rank, spec in zip(ranks, specs, strict=True):
        for a, b in zip(first, spec, strict=False):
            if a[0] != b[0]:
                return f"rank {ranks[0]} has parameter '{a[0]}' where rank {rank} has '{b[0]}'"
            for what, x, y in zip(_ALIKE, a[1:], b[1:], strict=False):
                if x != y:
                    shown = name_holders([x, y], [ranks[0], rank])
                    return f"parameter '{a[0]}' has {what} {shown}"
        if len(first) != len(spec):
            more, extra = (
                (ranks[0], first[len(spec)]) if len(first) > len(spec) else (rank, spec[len(first)])
            )
            return (
                f"rank {ranks[0]} has {len(first)} parameters and rank {rank} has {len(spec)}; "
                f"only rank {more} has '{extra[0]}'"
            )
    return "parameters differ"

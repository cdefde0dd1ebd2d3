# SPDX-License-Identifier: Apache-2.0
"""Checks that settings and parameters are equal on all ranks, and names the first difference."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from usbyte.errors import MismatchError
from usbyte.torch.reduce_op import Max
from usbyte.torch.torch_private import DisableTorchFunction
from usbyte.torch.world.rank_group import RankGroup

log = logging.getLogger("usbyte")

# Tolerance for checksums of a parameter, relative to its norm: different CPUs or GPUs round
# differently.
_ROUNDING = 1e-3
# The facts of a parameter that follow its name in `specs`.
_ALIKE = ("shape", "strides", "dtype", "compression", "gradients", "group")


class OtherOrderError(MismatchError):
    """Ranks have parameters of the same names in different orders.

    Attributes:
        names: Names of the parameters in the order of the first rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__("the optimizer has the same parameters in another order on some ranks")
        self.names = names


def verify_same_on_all_ranks(
    rank_group: RankGroup, label: str, settings: Mapping[str, object], specs: Sequence[list[object]]
) -> None:
    """Checks that settings and parameters are equal on all ranks. Collective.

    Only hashes are exchanged if all ranks are equal.

    Args:
        rank_group: The ranks that take part.
        label: Name of the optimizer, for messages.
        settings: Values by the names that users know; the first that differs is reported.
        specs: This rank's parameters; one list for each, as `difference_of` describes.

    Raises:
        OtherOrderError: Parameters of the same names are in different orders; other facts may
            differ too. Raised on every rank.
        MismatchError: Settings or parameters differ. Raised on every rank with the same message.
    """
    mine = [dict(settings), specs]
    text = json.dumps(mine).encode()
    eager, name = rank_group.eager, f"{label}.parameters"
    digests = eager.allgather_bytes(f"{name}.hash", hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return
    told = eager.allgather_json(name, mine, tuple[dict[str, Any], list[list[Any]]])
    for setting in settings:
        values = [given.get(setting) for given, _ in told]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise MismatchError(
                    f"{label}: {setting} is {values[0]} on rank 0 but {value} on rank {rank}. "
                    "Give all ranks the same arguments and environment."
                )
    orders = [[str(row[0]) for row in its] for _, its in told]
    if any(order != orders[0] for order in orders) and len(set(map(frozenset, orders))) == 1:
        raise OtherOrderError(orders[0])
    difference = difference_of([its for _, its in told])
    raise MismatchError(f"{label}: {difference}. Build the same model on all ranks.")


def check_order(rank_group: RankGroup, label: str, params: Sequence[torch.Tensor]) -> None:
    """Checks that parameters without names have the same order on all ranks. Collective.

    Compares checksums of the values. Nothing is detected if the ranks do not have equal values yet,
    as before `broadcast_parameters`.

    Args:
        rank_group: The ranks that take part.
        label: Name of the optimizer, for messages.
        params: The parameters, at least one.

    Raises:
        MismatchError: Ranks have the same values in different orders. Raised on every rank with the
            same message.
    """
    with torch.no_grad(), DisableTorchFunction():
        mine = torch.stack([_param_checksum(param) for param in params]).cpu().nan_to_num()
    first, *others = rank_group.eager.allgather_json(
        f"{label}.order", mine.tolist(), list[list[float]]
    )
    for rank, other in enumerate(others, 1):
        if other != first and sorted(other) == sorted(first):
            raise MismatchError(
                f"{label}: the optimizer has the same parameters in another order on rank "
                f"{rank_group.ranks[rank]} than on rank {rank_group.ranks[0]}, and would sum "
                "gradients of different ones: pass named_parameters=model.named_parameters(), by "
                "which they are matched, or give the optimizer model.parameters() on all ranks"
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


def difference_of(specs: Sequence[Sequence[list[object]]]) -> str:
    """Returns a message that names the first parameter in which ranks differ.

    Args:
        specs: For each rank, one list per parameter: name, shape, strides, dtype, compression in
            words, "sparse" or "dense" gradients, and index of its parameter group. A list may end
            early.
    """
    first = specs[0]
    for rank, spec in enumerate(specs):
        for a, b in zip(first, spec, strict=False):
            if a[0] != b[0]:
                return f"rank 0 has parameter '{a[0]}' where rank {rank} has '{b[0]}'"
            for what, x, y in zip(_ALIKE, a[1:], b[1:], strict=False):
                if x != y:
                    return f"parameter '{a[0]}' has {what} {x} on rank 0 but {y} on rank {rank}"
        if len(first) != len(spec):
            more, extra = (
                (0, first[len(spec)]) if len(first) > len(spec) else (rank, spec[len(first)])
            )
            return (
                f"rank 0 has {len(first)} parameters and rank {rank} has {len(spec)}; "
                f"only rank {more} has '{extra[0]}'"
            )
    return "parameters differ"

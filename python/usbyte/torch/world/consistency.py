# SPDX-License-Identifier: Apache-2.0
"""What has to be alike on all ranks before they train, and who differs in what."""

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

# Share of a parameter's norm that its sum may differ by: hosts of several kinds round differently.
_ROUNDING = 1e-3
# Of a parameter, behind its name.
_ALIKE = ("shape", "strides", "dtype", "compression", "gradients", "group")


class OtherOrderError(MismatchError):
    """Ranks have the same parameters, by name, in different orders.

    Attributes:
        names: Of the parameters in the order of the first rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__("the optimizer has the same parameters in another order on some ranks")
        self.names = names


def verify_same_on_all_ranks(
    rank_group: RankGroup, label: str, settings: Mapping[str, object], specs: Sequence[list[object]]
) -> None:
    """Compares all ranks. Collective.

    Args:
        rank_group: The ranks that take part.
        label: Whose parameters these are.
        settings: By the names that users know.
        specs: As `difference_of` takes them, of this rank.

    Raises:
        OtherOrderError: Ranks differ in the order of parameters, and perhaps in more.
        MismatchError: Ranks differ; it is the same on every rank.
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
    """Compares the order of parameters that have no names, by their values. Collective.

    Ranks whose parameters have not been made equal yet tell nothing of their order.

    Raises:
        MismatchError: Ranks have the same values in different places; it is alike on all ranks.
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
    """Warns on rank 0 if ranks have other parameters than by rounding. Collective.

    Args:
        rank_group: The ranks that take part.
        label: Of their optimizer.
        names: Of the parameters.
        params: None of which waits for an update.
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
        "%.6g and %.6g on rank %d, and so %d of %d parameters differ. Call "
        "broadcast_parameters(model.state_dict()) before training, and change gradients and "
        "parameters alike on all ranks",
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
    """Sum and norm; norms alone are nearly the same for all large layers that are drawn alike."""
    dtype = torch.promote_types(param.dtype, torch.float32)  # a wider one takes a copy
    norm = torch.linalg.vector_norm(param, dtype=dtype)
    return torch.stack([param.sum(dtype=dtype), norm]).double()


def difference_of(specs: Sequence[Sequence[list[object]]]) -> str:
    """In which parameter ranks differ first, in words.

    Args:
        specs: By rank, for each parameter its name, shape, strides, dtype, compression in words,
            whether its gradients are "sparse" or "dense", and the optimizer's group that it is in;
            or the first of these.
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

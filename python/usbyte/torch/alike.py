"""What has to be alike on all ranks before they train, and who differs in what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from usbyte.errors import MismatchError
from usbyte.torch.context import Context

# Of a parameter, behind its name.
_ALIKE = ("shape", "strides", "dtype", "compression", "gradients")


def check_alike(
    context: Context, label: str, settings: Mapping[str, object], specs: Sequence[list[object]]
) -> None:
    """Compares all ranks. Collective.

    Args:
        context: The ranks.
        label: Whose parameters these are.
        settings: By the names that users know.
        specs: As `difference_of` takes them, of this rank.

    Raises:
        MismatchError: Ranks differ; it is the same on every rank.
    """
    text = json.dumps([dict(settings), specs]).encode()
    eager, name = context.eager, f"{label}.parameters"
    digests = eager.allgather_bytes(f"{name}.hash", hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return
    told = [json.loads(answer) for answer in eager.allgather_bytes(name, text)]
    for setting in settings:
        values = [given.get(setting) for given, _ in told]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise MismatchError(
                    f"{label}: {setting} is {values[0]} on rank 0 but {value} on rank {rank}. "
                    "Give all ranks the same arguments and environment."
                )
    difference = difference_of([its for _, its in told])
    raise MismatchError(f"{label}: {difference}. Build the same model on all ranks.")


def difference_of(specs: Sequence[Sequence[list[object]]]) -> str:
    """In which parameter ranks differ first, in words.

    Args:
        specs: By rank, for each parameter its name, shape, strides, dtype, compression in words,
            and whether its gradients are "sparse" or "dense"; or the first of these.
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

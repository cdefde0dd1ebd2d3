# SPDX-License-Identifier: Apache-2.0
"""Common parts of the public collectives: checks of arguments, compression, the eager queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from usbyte.errors import UsageError
from usbyte.torch.eager.operation_names import OperationName
from usbyte.torch.eager.operations import Factors
from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.eager.request import Request
from usbyte.torch.runtime.tensor_checks import check_plain
from usbyte.torch.world import world
from usbyte.torch.world.process_sets import ProcessSetLike, global_process_set

_NAME_BYTES = 4096  # torch's store closes the connection of a client that sends 8192-byte keys


class Compressor(Protocol):
    """Type of `compression=`: `Compression.none`, `.fp16`, `.bf16`, or a class of the user."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to send, and the context that `decompress` needs."""

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Inverse of `compress`."""


def queue_of(
    kind: str, name: str | None, process_set: ProcessSetLike, *tensors: torch.Tensor
) -> tuple[EagerQueue, OperationName]:
    """Checks the arguments of an operation; returns its eager queue and its name there.

    Args:
        kind: Kind of the operation, as "allreduce".
        name: The user's name; None or "" for the n-th unnamed operation of its kind.
        process_set: The ranks that take part.
        tensors: The tensors that the user passed.

    Raises:
        UsageError: Before `init`; this rank does not take part; a value is not a tensor, or a
            tensor that cannot be sent; or `name` is not a short string.
    """
    run = world.current()
    if name is not None and not _is_name(name):
        raise UsageError(
            f"{kind}: name must be a string of at most {_NAME_BYTES} bytes of UTF-8, not "
            f"{name!r:.80}"
        )
    what = f"{kind} '{name}'" if name else kind
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"{what} takes tensors, not {type(tensor).__name__}: pass torch.tensor(value), or "
                "send objects with broadcast_object or allgather_object"
            )
        check_plain(what, tensor, or_sparse=True)
    if process_set is global_process_set:
        queue = run.eager
    else:
        queue = run.process_sets.queue(what, process_set)
    return queue, OperationName.user(name) if name else queue.auto_name(kind)


def _is_name(name: object) -> bool:
    try:
        return isinstance(name, str) and len(name.encode()) <= _NAME_BYTES
    except UnicodeEncodeError:
        return False


def as_factors(before: Any, after: Any) -> Factors:
    """Returns the prescale and the postscale factor as Python floats, from any type of number.

    Raises:
        UsageError: One of them is not a number.
    """
    for factor in (before, after):
        if not hasattr(factor, "__float__"):
            raise UsageError(f"a prescale or postscale factor must be a number, not {factor!r}")
    return float(before), float(after)


def first_of(request: Request) -> Request:
    """Returns the request with only the first entry of its result."""
    return replace(request, postprocess=lambda value: request.postprocess(value)[0])


def compressed(
    compression: Compressor | None, tensors: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[Any]]:
    """Compresses tensors; returns the tensors to send, and a context of each for `decompressed`."""
    if compression is None:
        return tensors, [None] * len(tensors)
    if not callable(getattr(compression, "compress", None)):
        raise UsageError(
            f"compression {compression!r} has no compress() and decompress(): use "
            "Compression.none, .fp16 or .bf16"
        )
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [ctx for _, ctx in pairs]


def decompressed(
    compression: Compressor | None, tensors: list[torch.Tensor], contexts: list[Any]
) -> list[torch.Tensor]:
    """Inverse of `compressed`."""
    if compression is None:
        return tensors
    return [
        compression.decompress(tensor, ctx) for tensor, ctx in zip(tensors, contexts, strict=True)
    ]

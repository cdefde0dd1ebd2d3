"""The same start on every rank: parameters, optimizer state, objects from one rank to all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from usbyte.errors import UsageError
from usbyte.torch import wire
from usbyte.torch.compression import MEMORY
from usbyte.torch.context import current
from usbyte.torch.ops import broadcast_async_, synchronize

__all__ = [
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0
) -> None:
    """Overwrites every tensor with the root rank's.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`. Names must agree on all ranks.
        root_rank: The rank whose values are sent.
    """
    current().drain()
    rows = list(params.items() if isinstance(params, Mapping) else params)
    for name, tensor in rows:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"broadcast_parameters: '{name}' is a {type(tensor).__name__}, not a tensor; "
                "send it with broadcast_object"
            )
    _broadcast_all("parameters", [(name, t) for name, t in rows if t is not None], root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Overwrites state and hyper-parameters of `optimizer` with the root rank's.

    Args:
        optimizer: The same kind of optimizer over the same parameters on all ranks; the state of
            the others may be empty. What codecs remember is each rank's own, and is not sent.
        root_rank: The rank whose state is sent.
    """
    context = current()
    context.drain()
    state = optimizer.state_dict()
    own = {MEMORY: state.pop(MEMORY)} if MEMORY in state else {}  # each rank's
    state = broadcast_object(state, root_rank, name="optimizer_state")
    if context.rank != root_rank:
        optimizer.load_state_dict(state | own)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root rank's object, on every rank. Travels as JSON and raw tensors, never as pickle.

    Args:
        obj: Numbers, strings, None, lists, tuples, dicts, tensors and arrays, nested at will;
            ignored on other ranks.
        root_rank: The rank whose object is sent.
        name: Tells this object from others that are sent at the same time.

    Returns:
        The object; on the root rank the very one that was passed.

    Raises:
        UsageError: The object holds something else.
    """
    context = current()
    if context.size == 1:
        wire.encode(obj)
        return obj
    label = f"broadcast_object.{name or 'object'}"
    root = context.rank == root_rank
    structure, problem = b"", None
    tensors: list[torch.Tensor] = []
    if root:
        try:
            structure, tensors = wire.encode(obj)
        except UsageError as error:  # the others must not wait for what will not come
            problem = str(error)
    message = json.dumps([problem, structure.decode()]).encode()
    problem, text = json.loads(context.eager.broadcast_bytes(label, message, root_rank))
    if problem is not None:
        raise UsageError(f"broadcast_object on rank {root_rank}: {problem}")
    structure = text.encode()
    if not root:
        obj, tensors = wire.decode(structure)
    _broadcast_all(label, [(str(k), t) for k, t in enumerate(tensors)], root_rank)
    return obj


def _broadcast_all(label: str, rows: list[tuple[str, torch.Tensor]], root_rank: int) -> None:
    handles = [broadcast_async_(t.detach(), root_rank, name=f"{label}.{n}") for n, t in rows]
    for handle in handles:
        synchronize(handle)

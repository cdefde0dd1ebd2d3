"""The same start on every rank: parameters, optimizer state, objects from one rank to all."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from usbyte.errors import UsageError
from usbyte.torch.api.submission import queue_of
from usbyte.torch.compression.state import CODEC_STATE_KEY
from usbyte.torch.eager import operations, serialization
from usbyte.torch.eager.operation_names import OperationName
from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.runtime.tensor_checks import check_plain
from usbyte.torch.world.process_sets import ProcessSetLike, global_process_set
from usbyte.torch.world.world import current

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

log = logging.getLogger("usbyte")


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor],
    root_rank: int = 0,
    process_set: ProcessSetLike = global_process_set,
) -> None:
    """Overwrites every tensor with the root rank's.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`, whose names must agree on all
            ranks; or tensors alone, in the same order on all ranks.
        root_rank: The rank whose values are sent; in a process set too, its rank in the whole job.
        process_set: The ranks that take part; see `usbyte.torch.world.process_sets.ProcessSetLike`.
    """
    current().drain()
    given: list[Any] = list(params.items() if isinstance(params, Mapping) else params)
    rows: list[tuple[str, Any]] = [
        (str(k), row) if isinstance(row, torch.Tensor) else row for k, row in enumerate(given)
    ]
    for name, tensor in rows:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"broadcast_parameters: '{name}' is a {type(tensor).__name__}, not a tensor; "
                "send it with broadcast_object"
            )
        if tensor is not None:
            check_plain(f"broadcast_parameters of '{name}'", tensor)
    tensors = [(name, t) for name, t in rows if t is not None]
    queue, label = _queue_and_name("parameters", None, process_set)
    _broadcast_all(queue, label, tensors, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> None:
    """Overwrites state and hyper-parameters of `optimizer` with the root rank's.

    Args:
        optimizer: The same kind of optimizer over the same parameters on all ranks; the state of
            the others may be empty. A DistributedOptimizer that was given names matches parameters
            by them, others by place. What codecs remember is each rank's own, and is not sent.
        root_rank: The rank whose state is sent; in a process set too, its rank in the whole job.
        model: Horovod's; not needed, as no step is taken to make the state.
        process_set: The ranks that take part; see `usbyte.torch.world.process_sets.ProcessSetLike`.
    """
    context = current()
    context.drain()
    if model is not None:
        log.warning("broadcast_optimizer_state: model= is not needed, and left out")
    state = optimizer.state_dict()
    own = (
        {CODEC_STATE_KEY: state.pop(CODEC_STATE_KEY)} if CODEC_STATE_KEY in state else {}
    )  # each rank's
    names = _names_of(optimizer)
    state, sent_names = broadcast_object([state, names], root_rank, "optimizer_state", process_set)
    if context.rank != root_rank:
        if names is not None and sent_names is not None and _are_alike(sent_names, names):
            state = _in_order(state, sent_names, names)
        optimizer.load_state_dict(state | own)
        _restore_dtypes(optimizer, state)


def _names_of(optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
    """By group, names of parameters in the order of `state_dict`; None if there are none."""
    names = getattr(optimizer, "names_of_groups", None)
    return names() if callable(names) else None


def _are_alike(sent: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> bool:
    return [sorted(group) for group in sent] == [sorted(group) for group in own]


def _in_order(
    state: dict[str, Any], sent: Sequence[Sequence[str]], own: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """A state whose groups list the same parameters, by name, in this rank's order."""
    groups = []
    for group, theirs, mine in zip(state["param_groups"], sent, own, strict=True):
        numbers = dict(zip(theirs, group["params"], strict=True))
        groups.append(group | {"params": [numbers[name] for name in mine]})
    return state | {"param_groups": groups}


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loading has cast state to its parameter's dtype, as NAdam's products; the root's was not."""
    if not {"state", "param_groups"} <= state.keys():
        return  # an optimizer with a format of its own, which only its own method knows
    for group, sent in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for param, number in zip(group["params"], sent["params"], strict=False):
            held = optimizer.state.get(param, {})
            for key, value in state["state"].get(number, {}).items():
                cast = held.get(key)
                if not isinstance(value, torch.Tensor) or not isinstance(cast, torch.Tensor):
                    continue
                if cast.dtype != value.dtype and cast.shape == value.shape:
                    held[key] = value.to(cast.device)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Any:
    """The root rank's object, on every rank. Travels as JSON and raw tensors, never as pickle.

    Args:
        obj: Numbers, strings, None, lists, tuples, dicts, tensors and arrays, nested up to 100
            deep; ignored on other ranks.
        root_rank: The rank whose object is sent; in a process set too, its rank in the whole job.
        name: Tells this object from others that are sent at the same time.
        process_set: The ranks that take part; see `usbyte.torch.world.process_sets.ProcessSetLike`.

    Returns:
        The object; on the root rank the very one that was passed, on others of plain types: a dict
        for an OrderedDict, Python's numbers for NumPy's. Tensors and arrays keep their strides,
        except where these leave large gaps or elements overlap. Tensors of a GPU are on the current
        one, or on the CPU where there is none.

    Raises:
        UsageError: On every rank: the root rank's object holds something else.
    """
    queue, label = _queue_and_name("broadcast_object", name, process_set)
    if queue.peers.size == 1:
        queue.peers.position(str(label), root_rank)
        serialization.encode(obj)
        return obj
    message = b""
    tensors: list[torch.Tensor] = []
    if is_root := queue.peers.name == root_rank:
        try:
            structure, tensors = serialization.encode(obj)
            message = serialization.structure_message(structure)
        except UsageError as error:  # the others must not wait for what will not come
            message = serialization.problem_message(error)
    request = operations.broadcast_bytes(queue.peers, label, message, root_rank)
    message = queue.submit(request).synchronize()
    structure = serialization.open_message(message, "broadcast_object", root_rank)
    incoming = None
    if not is_root:
        incoming = serialization.decode(
            structure, f"broadcast_object: what rank {root_rank} has sent"
        )
        tensors = incoming.tensors
    rows = [(str(k), t) for k, t in enumerate(tensors)]
    _broadcast_all(queue, label, rows, root_rank)
    return obj if incoming is None else incoming.finish()


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> list[Any]:
    """The objects of all ranks, in rank order. They travel as JSON and raw tensors, not as pickle.

    Args:
        obj: As for `broadcast_object`.
        name: Tells this call from others at the same time.
        process_set: The ranks that take part; see `usbyte.torch.world.process_sets.ProcessSetLike`.

    Raises:
        UsageError: On every rank: one rank's object holds something else.
    """
    queue, label = _queue_and_name("allgather_object", name, process_set)
    # The others must not wait for what cannot be sent.
    request = operations.allgather_bytes(queue.peers, label, serialization.to_message(obj))
    gathered: list[bytes] = queue.submit(request).synchronize()
    members = queue.peers.members
    payloads = [
        serialization.open_message(message, "allgather_object", rank)
        for rank, message in zip(members, gathered, strict=True)
    ]
    return [
        serialization.from_bytes(payload, f"allgather_object: what rank {rank} has sent")
        for rank, payload in zip(members, payloads, strict=True)
    ]


def _queue_and_name(
    kind: str, name: str | None, process_set: ProcessSetLike
) -> tuple[EagerQueue, OperationName]:
    queue, _ = queue_of(kind, name or "object", process_set)
    return queue, OperationName.auto(kind if name is None else f"{kind}.{name}")


def _broadcast_all(
    queue: EagerQueue, name: OperationName, rows: list[tuple[str, torch.Tensor]], root_rank: int
) -> None:
    handles = [
        queue.submit(
            operations.broadcast(
                queue.peers, name.part(which), tensor.detach(), root_rank, in_place=True
            )
        )
        for which, tensor in rows
    ]
    for handle in handles:
        handle.synchronize()

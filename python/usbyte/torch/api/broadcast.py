# SPDX-License-Identifier: Apache-2.0
"""Broadcasts of parameters, optimizer state and objects, so that all ranks start equal."""

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
    """Overwrites every tensor with that of the root rank. Collective.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`, with the same names on all
            ranks; or tensors without names, in the same order on all ranks. Shapes and dtypes are
            equal on all ranks.
        root_rank: The rank that sends, default 0; a rank of the whole job, also with `process_set`.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Raises:
        UsageError: Before `init`, or an entry is not a tensor that can be sent.
        MismatchError: The ranks disagree about a shape, a dtype or the root; raised on every rank.
        FaultError: The job has failed, for example because a rank lacks one of the names.

    Examples:
        >>> import torch
        >>> import usbyte.torch as ub
        >>> ub.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> ub.broadcast_parameters(model.state_dict(), root_rank=0)
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
    """Overwrites state and hyper-parameters of `optimizer` with those of the root rank. Collective.

    Args:
        optimizer: The same kind of optimizer over the same parameters on all ranks. On the other
            ranks its state may be empty. A `DistributedOptimizer` with `named_parameters` matches
            parameters by name, all others match them by position. The codec state is different on
            each rank and is not sent.
        root_rank: The rank that sends, default 0; a rank of the whole job, also with `process_set`.
        model: Horovod's; ignored with a warning.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Raises:
        UsageError: Before `init`, or the state holds objects that cannot be sent.
        FaultError: The job has failed.

    Examples:
        >>> import torch
        >>> import usbyte.torch as ub
        >>> ub.init()
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> ub.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    context = current()
    context.drain()
    if model is not None:
        log.warning("broadcast_optimizer_state: model= is ignored: usbyte does not need it")
    state = optimizer.state_dict()
    own = (
        {CODEC_STATE_KEY: state.pop(CODEC_STATE_KEY)} if CODEC_STATE_KEY in state else {}
    )  # the codec state is different on each rank
    names = _names_of(optimizer)
    state, sent_names = broadcast_object([state, names], root_rank, "optimizer_state", process_set)
    if context.rank != root_rank:
        if names is not None and sent_names is not None and _are_alike(sent_names, names):
            state = _in_order(state, sent_names, names)
        optimizer.load_state_dict(state | own)
        _restore_dtypes(optimizer, state)


def _names_of(optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
    """Returns parameter names by parameter group, in the order of `state_dict`; None if unnamed."""
    participant = current().participants.of(optimizer)
    return participant.names_of_groups() if participant is not None else None


def _are_alike(sent: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> bool:
    return [sorted(group) for group in sent] == [sorted(group) for group in own]


def _in_order(
    state: dict[str, Any], sent: Sequence[Sequence[str]], own: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Returns `state` with the parameters of each group in this rank's order, matched by name."""
    groups = []
    for group, theirs, mine in zip(state["param_groups"], sent, own, strict=True):
        numbers = dict(zip(theirs, group["params"], strict=True))
        groups.append(group | {"params": [numbers[name] for name in mine]})
    return state | {"param_groups": groups}


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restores dtypes of state tensors that `load_state_dict` has cast to the parameter's dtype.

    An example is NAdam's `mu_product`, which need not have the dtype of the parameter.
    """
    if not {"state", "param_groups"} <= state.keys():
        return  # the optimizer has a state_dict of another format, which only it understands
    for group, sent in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for param, number in zip(group["params"], sent["params"], strict=False):
            loaded = optimizer.state.get(param, {})
            for key, value in state["state"].get(number, {}).items():
                cast = loaded.get(key)
                if not isinstance(value, torch.Tensor) or not isinstance(cast, torch.Tensor):
                    continue
                if cast.dtype != value.dtype and cast.shape == value.shape:
                    loaded[key] = value.to(cast.device)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Any:
    """Returns the root rank's object on every rank. Collective.

    Objects are sent as JSON and raw tensors, never as pickle.

    Args:
        obj: Numbers, strings, None, lists, tuples, dicts, tensors and NumPy arrays, nested up to
            100 levels. Ignored on all ranks but the root.
        root_rank: The rank that sends, default 0; a rank of the whole job, also with `process_set`.
        name: Distinguishes this object from others that are sent at the same time.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        On the root rank `obj` itself. On the others a copy made of plain types: a dict for an
        OrderedDict, Python numbers for NumPy scalars. Tensors and arrays have the strides of the
        originals, except where these leave large gaps or overlap. Tensors from a GPU are placed on
        the current GPU, or on the CPU where there is none.

    Raises:
        UsageError: The root rank's object holds another type; raised on every rank.
        FaultError: The job has failed.
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
        except UsageError as error:  # sent to the others, which would wait for the object otherwise
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
    """Returns the objects of all ranks, in rank order. Collective.

    Objects are sent as JSON and raw tensors, never as pickle.

    Args:
        obj: Numbers, strings, None, lists, tuples, dicts, tensors and NumPy arrays, nested up to
            100 levels.
        name: Distinguishes this call from others at the same time.
        process_set: The ranks that take part; default all ranks. A `ProcessSet`, a list of ranks, a
            process group of torch.distributed, or a one-dimensional `DeviceMesh`.

    Returns:
        One object for each rank, made of plain types as by `broadcast_object`.

    Raises:
        UsageError: The object of one rank holds another type; raised on every rank.
        FaultError: The job has failed.
    """
    queue, label = _queue_and_name("allgather_object", name, process_set)
    # `to_message` sends the error if `obj` cannot be sent: the others would wait otherwise.
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

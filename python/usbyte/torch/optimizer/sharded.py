# SPDX-License-Identifier: Apache-2.0
"""Sharded updates: each rank updates the part of every parameter whose gradient it has summed.

After the last reduce_scatter of backward and before the first all_gather of the next forward pass,
the wrapped optimizer runs on flat views of this rank's shards. Its state and its work are therefore
1 / size of those without shards, as in ZeRO stage 1 (Rajbhandari et al., SC 2020). The all_gathers
transfer updated parameters. The plan is of the kind that DeAR uses (Zhang et al., ICDCS 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import Error, MismatchError, UsageError
from usbyte.torch.layout import CONTROL_TENSOR, is_dense, laid_out_like
from usbyte.torch.lazy_tensor import MaterializeFn
from usbyte.torch.optimizer.compat.known_optimizers import (
    ELEMENTWISE,
    is_elementwise,
    step_is_replaced,
)
from usbyte.torch.optimizer.overlap.deferred_queue import DeferredUpdateQueue
from usbyte.torch.optimizer.overlap.reduced_gradients import ShardedGradients
from usbyte.torch.optimizer.param_groups import ParamGroupIndex
from usbyte.torch.plan.job import ParamTable
from usbyte.torch.reduce_op import Max, Sum
from usbyte.torch.torch_private import copy_all
from usbyte.torch.world.rank_group import RankGroup


def check_shardable(optimizer: torch.optim.Optimizer, overlap: str) -> None:
    """Checks that the optimizer's updates can be sharded.

    Args:
        optimizer: The optimizer to wrap.
        overlap: Overlap that the user asks for.

    Raises:
        UsageError: The optimizer does not treat each element independently, or overlap is
            "backward".
    """
    if not is_elementwise(optimizer):
        kind = type(optimizer).__name__
        raise UsageError(
            f"shard_optimizer=True needs an elementwise optimizer, and {kind} is not known to be "
            f"one: use torch.optim.{', '.join(ELEMENTWISE)}, or remove shard_optimizer"
        )
    check_step_own(optimizer)
    if overlap == "backward":
        raise UsageError(
            "shard_optimizer=True gathers parameters in the next forward pass: remove "
            'overlap="backward"'
        )


def check_step_own(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError if the optimizer's step was replaced by another function."""
    if step_is_replaced(optimizer):
        raise UsageError(
            "shard_optimizer=True needs an elementwise step(), and that of this "
            f"{type(optimizer).__name__} was replaced by another function: remove one of the two"
        )


def check_dense(names: Sequence[str], params: Sequence[torch.Tensor]) -> None:
    """Checks that every parameter can be sharded.

    Args:
        names: Names of the parameters, by parameter index.
        params: The parameters.

    Raises:
        UsageError: A parameter has no dimension, or its elements have gaps or overlaps in memory.
    """
    for name, param in zip(names, params, strict=True):
        if param.dim() == 0 or not is_dense(param):
            raise UsageError(
                f"parameter '{name}' of shape {tuple(param.shape)} and strides {param.stride()} "
                "cannot be cut into shards: give it one dimension at least, and no gaps or overlaps"
            )


@dataclass
class _Piece:
    """The elements of one parameter that one rank owns.

    Attributes:
        param: Index of the parameter.
        begin: First element of the flat parameter, in memory order.
        end: End of the elements, exclusive.
    """

    param: int
    begin: int
    end: int


class ShardedUpdates(DeferredUpdateQueue):
    """Runs an optimizer on this rank's shards.

    Args:
        rank_group: Ranks that share the gradients.
        label: Name of the optimizer, equal on all ranks.
        optimizer: The wrapped optimizer. Its state is whole; the constructor shards it.
        param_table: Its parameters.
        groups: Maps parameters to parameter groups of the optimizer.
        reducer: Sends gradients and waits for sums.
        plan: Plan in force, of reduce_scatters and all_gathers.
        max_grad_norm: Upper limit of the gradient norm over all parameters; larger gradients are
            scaled down. None for no limit.
        fetch: By parameter, the function that materializes it if it is read before its all_gather
            has completed.
        step: Runs the optimizer's step.

    Attributes:
        used: By parameter, whether any rank had a gradient in the last step.
        grads_consumed: Whether a step has consumed the gradients and no reset to None has followed.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        label: str,
        optimizer: torch.optim.Optimizer,
        param_table: ParamTable,
        groups: ParamGroupIndex,
        reducer: ShardedGradients,
        plan: _core.Plan,
        max_grad_norm: float | None,
        fetch: Sequence[MaterializeFn],
        step: Callable[[], Any],
    ) -> None:
        super().__init__(param_table, reducer, fetch)
        self._reducer: ShardedGradients = reducer
        self._step, params = step, param_table.params
        self._rank_group, self._label = rank_group, label
        self._optimizer, self._groups = optimizer, groups
        self._max_grad_norm = max_grad_norm
        self.used = [param.grad is not None for param in params]
        self.grads_consumed = True
        names = {name: i for i, name in enumerate(reducer.names)}
        self._addresses = [param.data_ptr() for param in params]
        self._pieces = [
            _pieces(plan, names, rank, rank_group.size) for rank in range(rank_group.size)
        ]
        self._mine = self._pieces[rank_group.rank]
        self._views = [nn.Parameter(_flat(params[p.param])[p.begin : p.end]) for p in self._mine]
        for view in self._views:
            view._usbyte_shard = True  # type: ignore[attr-defined]
        self._grads = [_flat(reducer.gathered(p.param))[p.begin : p.end] for p in self._mine]
        self._cut()

    def step(self) -> None:
        """Updates this rank's shards and allows their all_gathers to launch.

        It waits for the reductions of the backward pass.
        """
        self._check_addresses()
        self._reducer.check_untouched()
        self._reducer.wait_reduced()
        self.used = used = self._reducer.used_anywhere()
        for view, grad, piece in zip(self._views, self._grads, self._mine, strict=True):
            view.grad = grad if used[piece.param] else None
        if self._max_grad_norm is not None:
            self._clip(self._max_grad_norm)
        with self._on_shards():
            self._step()
        for view in self._views:
            view.grad = None
        for param in self._params:
            param.grad = None
        self.grads_consumed = True
        self.defer_all()
        self._send()

    def drop(self) -> None:
        """Ends a step of the engine without an update, because no rank uses the gradients.

        Raises:
            MismatchError: Another rank has used the gradients.
        """
        self._check_addresses()
        self._reducer.wait_reduced()
        self.used = self._reducer.used_anywhere()
        if self._max_grad_norm is not None:
            self._clip(self._max_grad_norm)  # collective: ranks that step wait for it
        self._send()
        for i, param in enumerate(self._params):
            self._reducer.wait([i])
            if not _same_bits(param, self._reducer.gathered(i)):
                raise MismatchError(
                    f"another rank has updated parameter '{self._reducer.names[i]}' with gradients "
                    "that were reset here before step(): reset gradients on all ranks, or on none"
                )

    def _send(self) -> None:
        """Allows the all_gathers of the shards, as they are now.

        The shards overwrite the gradients in the flat buffer.
        """
        for view, grad in zip(self._views, self._grads, strict=True):
            grad.copy_(view.detach())
        self._reducer.release_gathers()

    def _check_addresses(self) -> None:
        for name, param, address in zip(
            self._reducer.names, self._params, self._addresses, strict=True
        ):
            if param.data_ptr() != address:
                raise Error(
                    f"parameter '{name}' was given other memory (param.data = ...), which sharded "
                    "updates would not see; copy into it: param.data.copy_(...)"
                )

    @torch.no_grad()
    def _apply(self, due: Sequence[int]) -> None:
        wanted = self._expand_shared_storage(due)
        self._reducer.wait(wanted)
        taken = self._begin([*wanted, *self._arrived_with(wanted)])
        if not taken:
            return
        try:
            values = [self._reducer.gathered(i) for i in taken]
            copy_all([self._params[i] for i in taken], values)
        except BaseException:  # a second copy is harmless
            for i in taken:
                self._versions[i] = self._params[i]._version
            self._put_back(taken)
            raise
        self._end(taken, due)

    @torch.no_grad()
    def whole_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Returns the optimizer's state as without shards, on every rank. Collective."""
        states = [self._optimizer.state.get(view, {}) for view in self._views]
        mine = "\n".join(sorted({key for state in states for key in state}))
        # All ranks need the same keys in the same order, because each key is a collective.
        texts = self._rank_group.eager.allgather_bytes(f"{self._label}.state_dict()", mine.encode())
        whole: dict[nn.Parameter, dict[str, Any]] = {}
        for key in sorted({key for text in texts for key in text.decode().splitlines()}):
            self._gather(key, [state.get(key, _ABSENT) for state in states], whole)
        return whole

    def unshard_state(self) -> None:
        """Gives the optimizer its whole state back. Collective."""
        whole = self.whole_state()
        for view in self._views:
            self._optimizer.state.pop(view, None)
        for param, state in whole.items():
            self._optimizer.state[param] = state

    def reshard_state(self) -> None:
        """Shards the optimizer's state again after it was replaced by a whole one, as by a load."""
        self._cut()

    def _cut(self) -> None:
        state = self._optimizer.state
        for piece, view in zip(self._mine, self._views, strict=True):
            param = self._params[piece.param]
            if param in state:
                state[view] = {
                    key: _flat(laid_out_like(value, param))[piece.begin : piece.end].clone()
                    if _is_elementwise(value, param)
                    else _copy(value)
                    for key, value in state[param].items()
                }
        for param in self._params:
            state.pop(param, None)

    def _gather(
        self, key: str, values: Sequence[Any], whole: dict[nn.Parameter, dict[str, Any]]
    ) -> None:
        name, eager = f"{self._label}.state.{key}", self._rank_group.eager
        # All ranks with a shard of a parameter have the same kind of state, so Max is exact.
        kinds = torch.zeros(len(self._params), dtype=torch.int64, device="cpu")
        scalars = torch.full(kinds.shape, -math.inf, dtype=torch.float64, device="cpu")
        for piece, view, value in zip(self._mine, self._views, values, strict=True):
            kinds[piece.param] = _kind(value, view)
            if kinds[piece.param] >= _SCALAR:
                scalars[piece.param] = float(value)
        eager.allreduce(f"{name}.kinds", kinds, Max)
        eager.allreduce(f"{name}.scalars", scalars, Max)
        on_device = self._counted_on_device()
        for i, (kind, scalar) in enumerate(zip(kinds.tolist(), scalars.tolist(), strict=True)):
            param = self._params[i]
            if kind == _ELEMENTS:
                whole.setdefault(param, {})[key] = torch.zeros_like(param, requires_grad=False)
            elif kind >= _SCALAR:
                device = param.device if id(param) in on_device else "cpu"
                whole.setdefault(param, {})[key] = torch.tensor(
                    scalar, dtype=_SCALAR_DTYPES[kind - _SCALAR], device=device
                )
            elif kind == _NOTHING:
                whole.setdefault(param, {})[key] = None
        for dtype in sorted({p.dtype for p in self._params}, key=str):

            def sent(pieces: Sequence[_Piece], dtype: torch.dtype = dtype) -> list[_Piece]:
                return [
                    p
                    for p in pieces
                    if kinds[p.param] == _ELEMENTS and self._params[p.param].dtype == dtype
                ]

            parts = dict(zip(map(id, self._mine), values, strict=True))
            flat = [parts[id(p)].reshape(-1) for p in sent(self._mine)]
            none = torch.empty(0, dtype=dtype, device="cpu")
            everything = eager.allgather(f"{name}.{dtype}", torch.cat(flat) if flat else none)
            offset = 0
            for piece in (p for pieces in self._pieces for p in sent(pieces)):
                count = piece.end - piece.begin
                target = _flat(whole[self._params[piece.param]][key])
                target[piece.begin : piece.end] = everything[offset : offset + count]
                offset += count

    def _counted_on_device(self) -> set[int]:
        """Returns the ids of the parameters whose step counts torch wants on their device.

        They are the parameters of groups with `capturable` or `fused`.
        """
        groups = self._optimizer.param_groups  # may have new parameters, which have no shards yet
        return {id(p) for g in groups if g.get("capturable") or g.get("fused") for p in g["params"]}

    def _clip(self, max_norm: float) -> None:
        """Clips gradients as torch.nn.utils.clip_grad_norm_, over all shards. Collective."""
        mine = [view.grad for view in self._views if view.grad is not None]
        squares = torch.stack(
            [g.double().square().sum() for g in mine]
            or [torch.zeros((), dtype=torch.float64, device="cpu")]
        )
        total = squares.sum().reshape(1)
        self._rank_group.eager.allreduce(f"{self._label}.norm", total, Sum)
        factor = min(max_norm / (total.sqrt().item() + 1e-6), 1.0)
        for grad in mine:
            grad.mul_(factor)

    @contextmanager
    def _on_shards(self) -> Iterator[None]:
        groups, group_of = self._optimizer.param_groups, self._groups.refresh()
        shards_of: list[list[nn.Parameter]] = [[] for _ in groups]
        for piece, view in zip(self._mine, self._views, strict=True):
            if (g := group_of[piece.param]) is not None:
                shards_of[g].append(view)
        # Copies, so that the user's groups keep the whole parameters.
        self._optimizer.param_groups = [
            {**group, "params": views}
            for group, views in zip(groups, shards_of, strict=True)
            if views
        ]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups


_ABSENT = object()
_MISSING, _NOTHING, _ELEMENTS, _SCALAR = range(4)  # _SCALAR plus the index of its dtype
_SCALAR_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _kind(value: Any, view: torch.Tensor) -> int:
    if value is _ABSENT:
        return _MISSING
    if value is None:
        return _NOTHING
    if _is_elementwise(value, view):
        return _ELEMENTS
    dtype = getattr(value, "dtype", None)
    return _SCALAR + (_SCALAR_DTYPES.index(dtype) if dtype in _SCALAR_DTYPES else 0)


def _is_elementwise(value: Any, like: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == like.shape


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_flat(a).view(torch.uint8), _flat(b).view(torch.uint8))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as a flat view in memory order, which is that of the flat buffer."""
    data = tensor.detach()
    return data.as_strided((data.numel(),), (1,))


def _pieces(plan: _core.Plan, names: dict[str, int], rank: int, size: int) -> list[_Piece]:
    """Returns what `rank` owns under a plan, in the order of the flat buffer."""
    owned = []
    for op in plan.ops:
        if op.kind == "reduce_scatter":
            owned += [_core.shard(block, rank, size) for block in op.blocks]
    pieces = []
    tensors = [t for t in plan.tensors if t.name != CONTROL_TENSOR]
    for begin, end in sorted(owned):
        for tensor in tensors:
            low = max(begin, tensor.offset)
            high = min(end, tensor.offset + tensor.numel)
            if low < high:
                pieces.append(_Piece(names[tensor.name], low - tensor.offset, high - tensor.offset))
    return pieces

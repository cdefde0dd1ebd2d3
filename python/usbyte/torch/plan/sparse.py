# SPDX-License-Identifier: Apache-2.0
"""Gradients that are mostly zeros: which parameters have them, and their rows."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.layout import dtype_name
from usbyte.torch.runtime.device import Device

log = logging.getLogger("usbyte")

_WINDOW = 20  # steps whose mean counts
_LASTING = 3  # windows
_CLEARLY = 0.1  # share of the time; what is less is noise, or not worth a new plan


def sparse_parameters(model: nn.Module | None) -> set[nn.Parameter]:
    """Parameters that layers such as `nn.Embedding(sparse=True)` give sparse gradients."""
    found = set()
    for module in model.modules() if model is not None else ():
        weight = _weight(module)
        if weight is not None and getattr(module, "sparse", False) is True:
            found.add(weight)
    return found


def renormalized_parameters(model: nn.Module | None) -> set[nn.Parameter]:
    """Parameters of which the forward pass changes rows, as of `nn.Embedding(max_norm=1)`.

    Other layers may have a `max_norm` that they apply to all rows, so alike on all ranks.
    """
    return {
        weight
        for module in (model.modules() if model is not None else ())
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.max_norm is not None
        and (weight := _weight(module)) is not None
    }


def _weight(module: nn.Module) -> nn.Parameter | None:
    """Not the attribute, which may be computed: a parametrized one would be, with its effects."""
    # By torch's own method: overrides may take fewer arguments.
    own = nn.Module.named_parameters(module, recurse=False, remove_duplicate=False)
    return dict(own).get("weight")


def model_of(named_parameters: Iterable[Any] | None) -> nn.Module | None:
    """The model whose `named_parameters()` this is, if nobody has begun to read it."""
    if not inspect.isgenerator(named_parameters):
        return None
    model = inspect.getgeneratorlocals(named_parameters).get("self")
    return model if isinstance(model, nn.Module) else None


@dataclass(frozen=True)
class SchemeChoice:
    """How a sparse gradient travels.

    Attributes:
        scheme: Of `usbyte._core.sparse_schemes()`.
        bytes: That the busiest rank is expected to send or receive; 0 if unknown.
    """

    scheme: str = "zen"
    bytes: int = 0


def sparse_spec(name: str, param: nn.Parameter, offset: int) -> _core.TensorSpec:
    """A sparse gradient in a plan: as many rows as the parameter's first dimension."""
    rows, width = matrix_of(param)
    return _core.TensorSpec(name, 0, dtype_name(name, param), offset, rows=rows, width=width)


def with_sparse(
    plan: _core.Plan,
    params: Mapping[str, nn.Parameter],
    ready: Mapping[str, float],
    ways: Mapping[str, SchemeChoice],
) -> _core.Plan:
    """The plan with a sparse_all_reduce for each of these parameters.

    Args:
        plan: Of the other parameters.
        params: Sparse ones, by name.
        ready: When gradients are ready, by name, those of the plan's tensors too.
        ways: How they travel, where that has been chosen; else as `SchemeChoice` says.
    """
    if not params:
        return plan
    waiting = sorted(params, key=lambda name: ready[name])
    at = {name: len(plan.tensors) + k for k, name in enumerate(waiting)}
    tensors = [*plan.tensors, *(sparse_spec(n, params[n], plan.numel) for n in at)]

    def op_of(name: str) -> _core.Op:
        way = ways.get(name, SchemeChoice())
        sparse = _core.SparseOp(at[name], way.scheme, way.bytes)
        return _core.Op("sparse_all_reduce", sparse=sparse)

    ops = []
    for op in plan.ops:
        gathers = op.kind == "all_gather"
        latest = max(ready.get(plan.tensors[t].name, np.inf) for t in plan.tensors_of(op))
        while waiting and (gathers or ready[waiting[0]] < latest):
            ops.append(op_of(waiting.pop(0)))
        ops.append(op)
    ops += map(op_of, waiting)
    return _core.Plan(plan.policy, tensors, ops)


@dataclass(frozen=True)
class Counts:
    """Rows of a sparse gradient, on average.

    Attributes:
        own: That one rank has.
        all: That the sum over all ranks has.
    """

    own: float
    all: float

    def grown_to(self, every: float) -> Counts:
        """The same where the sum has so many, and a rank's own rows have grown alike."""
        return Counts(min(self.own * every / self.all, every) if self.all else every, every)


def choose_scheme(
    name: str, param: nn.Parameter, counts: Counts, network: _core.NetworkModel
) -> SchemeChoice:
    """The fastest by what was measured; logs it."""
    found, rows = _choices(name, param, counts, network), param.shape[0]
    log.info(
        "'%s': %.3g %% of %d rows, %.3g %% in the sum: by %s",
        name, 100 * counts.own / rows, rows, 100 * counts.all / rows,
        ", then ".join(f"{c.scheme} ({c.bytes / 1e6:.3g} MB, {c.seconds:.3g} s)" for c in found),
    )  # fmt: skip
    return SchemeChoice(found[0].scheme, found[0].bytes)


def potential_gain_s(
    name: str, param: nn.Parameter, way: SchemeChoice, counts: Counts, network: _core.NetworkModel
) -> float:
    """Seconds by which another way is predicted to be faster by now; 0 unless clearly so."""
    found = {choice.scheme: choice.seconds for choice in _choices(name, param, counts, network)}
    won_s = found[way.scheme] - min(found.values())
    return won_s if won_s > _CLEARLY * found[way.scheme] else 0.0


def _choices(
    name: str, param: nn.Parameter, counts: Counts, network: _core.NetworkModel
) -> list[_core.SparseChoice]:
    rows, width = matrix_of(param)
    share, share_of_all = counts.own / rows, counts.all / rows
    dtype = dtype_name(name, param)
    return _core.sparse_choices(network, rows, width, dtype, share, max(share, share_of_all))


class RowCounts:
    """How many rows sparse gradients have, over some steps, by name."""

    def __init__(self) -> None:
        self._steps: dict[str, list[tuple[int, int]]] = {}

    def add(self, name: str, own: int, every: int) -> None:
        """What a step had: this rank, and the sum of all."""
        self._steps.setdefault(name, []).append((own, every))

    @property
    def steps(self) -> int:
        """Of the one with the most."""
        return max(map(len, self._steps.values()), default=0)

    def take(self) -> dict[str, Counts]:
        """The means; counting begins anew."""
        steps, self._steps = self._steps, {}
        return {name: Counts(*np.mean(rows, axis=0).tolist()) for name, rows in steps.items()}


class DensityMonitor:
    """Notices that gradients have come to have so many rows that another scheme is faster.

    That must last for three windows. After each new plan they are twice as long, so that a job
    whose batches vary by nature does not learn for ever.

    Args:
        outdated: Whether the plan in force is, by what is counted.
    """

    def __init__(self, outdated: Callable[[Mapping[str, Counts]], bool]) -> None:
        self._outdated = outdated
        self._window, self._in_a_row = _WINDOW // 2, 0

    def reset(self) -> None:
        """A plan has come into force."""
        self._window *= 2
        self._in_a_row = 0

    def wants_plan(self, counts: RowCounts) -> bool:
        """To be asked in every step; takes the counts of a window that is full."""
        if counts.steps >= self._window:
            self._in_a_row = self._in_a_row + 1 if self._outdated(counts.take()) else 0
        return self._in_a_row >= _LASTING


class Rows:
    """A sparse gradient as the engine takes it; keeps the memory.

    On a device the rows are coalesced there, so that no more than one of an id is copied to the
    host; there are as many as `count` says, behind the work given to the device so far.

    Args:
        name: Of the parameter.
        grad: Of its shape; coalesced or not.
        param: The parameter.
        device: Where they are.

    Raises:
        UsageError: It is no sparse gradient of rows.
    """

    def __init__(self, name: str, grad: torch.Tensor, param: torch.Tensor, device: Device) -> None:
        if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
            what = "dense" if grad.layout == torch.strided else f"sparse ({grad.layout})"
            if grad.layout == torch.sparse_coo:
                what = f"sparse in {grad.sparse_dim()} dimensions"
            raise UsageError(
                f"the gradient of '{name}' is {what}, where its layer has sparse=True, of rows: "
                "make it dense, as DistributedOptimizer does with sparse_as_dense=True"
            )
        if grad.dtype != param.dtype:
            raise UsageError(
                f"the gradient of '{name}' is {grad.dtype}, the parameter {param.dtype}"
            )
        self._device = device
        ids, values = grad._indices()[0], grad._values()
        self.count: torch.Tensor | None = None
        device.record_stream([ids, values])
        if device.core is not None and not grad.is_coalesced():
            self.ids, self.values, self.count = _coalesced(ids, values, device, device.core)
            return
        # Of its own: torch's indices may be the very memory of the batch, which is filled anew
        # while these are on their way.
        self.ids = ids.clone(memory_format=torch.contiguous_format)
        self.values = values.clone(memory_format=torch.contiguous_format)

    def give(self, engine: _core.Engine, slot: int) -> None:
        """Tells the engine, which reads them until the tensor has arrived."""
        engine.ready_rows(
            slot, self.ids.data_ptr(), len(self.ids), self.values.data_ptr(),
            self._device.stream(), 0 if self.count is None else self.count.data_ptr(),
        )  # fmt: skip

    def average(self, exchange: _core.Exchange, param: torch.Tensor) -> torch.Tensor:
        """Over all ranks, which all call this; blocks, also for a device.

        Args:
            exchange: To the other ranks.
            param: The same as this was made with, which it does not keep.
        """
        rows, width = matrix_of(param)
        count = len(self.ids) if self.count is None or not len(self.ids) else int(self.count)
        ids, values = self.ids[:count].cpu(), self.values[:count].cpu()
        return sparse_tensor(
            _core.sparse_all_reduce(
                "zen", exchange, rows, width, str(param.dtype).removeprefix("torch."),
                ids.data_ptr(), count, values.data_ptr(), 1 / exchange.size,
            ),
            param,
            self._device,
        )  # fmt: skip


def _coalesced(
    ids: torch.Tensor, values: torch.Tensor, device: Device, core: _core.Cuda
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every id once, ascending, with the sum of its values in their order.

    The device alone knows how many there are; the host does not wait for it.

    Args:
        ids: (n,), in any order.
        values: (n, ...).
        device: Where they are.
        core: The same as the core sees it.

    Returns:
        Ids (n,) and sums (n, ...), of which the first ones are there, and their number (1,), or
        (0,) if n is 0.
    """
    ids, order = ids.sort(stable=True)
    begins = torch.ones_like(ids)
    begins[1:] = ids[1:] != ids[:-1]
    ends = begins.cumsum(0)
    places, values = ends - 1, values.index_select(0, order)
    sums = torch.zeros_like(values)
    _core.scatter_add(
        core, sums.data_ptr(), places.data_ptr(), values.data_ptr(),
        str(values.dtype).removeprefix("torch."), len(ids), math.prod(values.shape[1:]),
        device.stream(),
    )  # fmt: skip
    return torch.zeros_like(ids).scatter_(0, places, ids), sums, ends[-1:]


def matrix_of(param: torch.Tensor) -> tuple[int, int]:
    """Rows of a parameter, and elements of each: a sparse gradient has some of the rows."""
    return param.shape[0], math.prod(param.shape[1:])


def empty_like(param: nn.Parameter) -> torch.Tensor:
    """A gradient of a parameter that has no row."""
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=param.device),
        param.new_empty(0, *param.shape[1:]),
        param.shape,
        is_coalesced=True,
        check_invariants=False,
        device=param.device,
    )


def sparse_tensor(found: _core.RowsSum, param: torch.Tensor, device: Device) -> torch.Tensor:
    """What the core has added up, of the parameter's shape, coalesced, on its device."""
    ids, values, _ = found
    flat = device.bring(torch.from_numpy(values).view(param.dtype))
    return torch.sparse_coo_tensor(
        device.bring(torch.from_numpy(ids))[None],
        flat.view(len(ids), *param.shape[1:]),
        param.shape,
        is_coalesced=True,
        check_invariants=False,
        device=flat.device,
    )

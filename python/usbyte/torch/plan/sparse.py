# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients: finds their parameters, plans their schemes, and passes rows to the engine."""

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

_WINDOW = 20  # steps per window; the mean counts of a window are compared
_LASTING = 3  # consecutive windows in which another scheme must be faster
_CLEARLY = 0.1  # least relative gain; smaller ones are noise, or not worth a new plan


def sparse_parameters(model: nn.Module | None) -> set[nn.Parameter]:
    """Returns the weights of layers with `sparse=True`, as of `nn.Embedding(sparse=True)`.

    Autograd gives these parameters sparse gradients. The result is empty if `model` is None.
    """
    found = set()
    for module in model.modules() if model is not None else ():
        weight = _weight(module)
        if weight is not None and getattr(module, "sparse", False) is True:
            found.add(weight)
    return found


def renormalized_parameters(model: nn.Module | None) -> set[nn.Parameter]:
    """Returns the parameters whose rows the forward pass changes, as of `nn.Embedding(max_norm=1)`.

    Only `nn.Embedding` and `nn.EmbeddingBag` renormalize the rows of the batch alone. A `max_norm`
    of another layer may apply to all rows, and is then the same on all ranks.
    """
    return {
        weight
        for module in (model.modules() if model is not None else ())
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.max_norm is not None
        and (weight := _weight(module)) is not None
    }


def _weight(module: nn.Module) -> nn.Parameter | None:
    """Returns the registered parameter "weight" of a module; None if there is none.

    Does not read the attribute `module.weight`: with torch's parametrizations that computes the
    weight, with side effects.
    """
    # A module's override of named_parameters may take fewer arguments.
    own = nn.Module.named_parameters(module, recurse=False, remove_duplicate=False)
    return dict(own).get("weight")


def model_of(named_parameters: Iterable[Any] | None) -> nn.Module | None:
    """Returns the model that made the generator `named_parameters`; None if it cannot be found.

    It is found only if the generator is unused.
    """
    if not inspect.isgenerator(named_parameters):
        return None
    model = inspect.getgeneratorlocals(named_parameters).get("self")
    return model if isinstance(model, nn.Module) else None


@dataclass(frozen=True)
class SchemeChoice:
    """The scheme that sums a sparse gradient over the ranks.

    Attributes:
        scheme: One of `usbyte._core.sparse_schemes()`; default "zen".
        bytes: Expected bytes that the busiest rank sends or receives; default 0 for unknown.
    """

    scheme: str = "zen"
    bytes: int = 0


def sparse_spec(name: str, param: nn.Parameter, offset: int) -> _core.TensorSpec:
    """Returns the tensor of a sparse gradient in a plan.

    It takes no space in the flat buffer. The rows of its matrix are the parameter's first
    dimension.

    Args:
        name: Name of the parameter.
        param: The parameter.
        offset: End of the dense gradients in the flat buffer, in elements.
    """
    rows, width = matrix_of(param)
    return _core.TensorSpec(name, 0, dtype_name(name, param), offset, rows=rows, width=width)


def with_sparse(
    plan: _core.Plan,
    params: Mapping[str, nn.Parameter],
    ready: Mapping[str, float],
    ways: Mapping[str, SchemeChoice],
) -> _core.Plan:
    """Returns `plan` with a sparse_all_reduce added for each parameter with a sparse gradient.

    The ops are inserted by ready time, and before the first all_gather.

    Args:
        plan: The plan of the dense gradients.
        params: The parameters with sparse gradients, by name.
        ready: Ready time of each gradient by name, in seconds; of dense and sparse ones.
        ways: Scheme of each sparse gradient by name; `SchemeChoice()` for names that are missing.
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
    """Mean numbers of rows of a sparse gradient.

    Attributes:
        own: Rows of the gradient of one rank.
        all: Rows of the sum over all ranks.
    """

    own: float
    all: float

    def grown_to(self, every: float) -> Counts:
        """Returns the counts scaled so that the sum has `every` rows.

        `own` is scaled by the same factor, and is at most `every`.
        """
        return Counts(min(self.own * every / self.all, every) if self.all else every, every)


def choose_scheme(
    name: str, param: nn.Parameter, counts: Counts, network: _core.NetworkModel
) -> SchemeChoice:
    """Returns the scheme that is predicted to be the fastest, and logs all predictions.

    Args:
        name: Name of the parameter.
        param: The parameter.
        counts: Measured rows of its gradient.
        network: Costs of the network.
    """
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
    """Returns the predicted seconds that the best scheme saves compared with the current one.

    Args:
        name: Name of the parameter.
        param: The parameter.
        way: The current scheme.
        counts: Present rows of its gradient.
        network: Costs of the network.

    Returns:
        0 if at most 10 % would be saved.
    """
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
    """Collects the numbers of rows of sparse gradients over some steps."""

    def __init__(self) -> None:
        self._steps: dict[str, list[tuple[int, int]]] = {}

    def add(self, name: str, own: int, every: int) -> None:
        """Records one step of a parameter: rows of this rank, and of the sum over all ranks."""
        self._steps.setdefault(name, []).append((own, every))

    @property
    def steps(self) -> int:
        """Number of recorded steps of the parameter with the most."""
        return max(map(len, self._steps.values()), default=0)

    def take(self) -> dict[str, Counts]:
        """Returns the mean counts by parameter name, and clears the records."""
        steps, self._steps = self._steps, {}
        return {name: Counts(*np.mean(rows, axis=0).tolist()) for name, rows in steps.items()}


class DensityMonitor:
    """Detects lasting changes of the density of gradients that make another scheme faster.

    A change must last for three consecutive windows. The windows double in length with each new
    plan, so that a job whose batches vary by nature does not learn forever.

    Args:
        outdated: Called with mean counts by parameter name; returns whether another scheme would be
            clearly faster for them.
    """

    def __init__(self, outdated: Callable[[Mapping[str, Counts]], bool]) -> None:
        self._outdated = outdated
        self._window, self._in_a_row = _WINDOW // 2, 0

    def reset(self) -> None:
        """Starts to monitor a plan that has come into force."""
        self._window *= 2
        self._in_a_row = 0

    def wants_plan(self, counts: RowCounts) -> bool:
        """Returns whether a new plan is wanted. Call it in every step.

        Args:
            counts: Counts of this rank since the last full window; cleared when the window is full.
        """
        if counts.steps >= self._window:
            self._in_a_row = self._in_a_row + 1 if self._outdated(counts.take()) else 0
        return self._in_a_row >= _LASTING


class Rows:
    """The rows of a sparse gradient, in memory that the engine reads. Owns that memory.

    Uncoalesced rows on CUDA are coalesced on the device, so that each id is copied to the host only
    once. The number of rows is then known to the device only.

    Args:
        name: Name of the parameter, for messages.
        grad: The gradient, a sparse COO tensor with one sparse dimension; coalesced or not.
        param: The parameter, of the same shape and dtype.
        device: Device of both.

    Attributes:
        ids: Row indices, shape [n], int64.
        values: Rows, shape [n, ...].
        count: Device tensor with the number of leading rows that are valid, shape [1], or [0] if n
            is 0; None if all are valid. It is written by work that is enqueued on the stream.

    Raises:
        UsageError: `grad` is not a sparse COO tensor of rows, or has another dtype than `param`.
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
        # Copies: torch's indices may share memory with the input batch, which may be overwritten
        # while the rows are in flight.
        self.ids = ids.clone(memory_format=torch.contiguous_format)
        self.values = values.clone(memory_format=torch.contiguous_format)

    def give(self, engine: _core.Engine, tensor: int) -> None:
        """Passes the rows to the engine, which reads them until the tensor has arrived.

        Args:
            engine: The engine of the plan.
            tensor: Index of the tensor in the plan.
        """
        engine.ready_rows(
            tensor, self.ids.data_ptr(), len(self.ids), self.values.data_ptr(),
            self._device.stream(), 0 if self.count is None else self.count.data_ptr(),
        )  # fmt: skip

    def average(self, exchange: _core.Exchange, param: torch.Tensor) -> torch.Tensor:
        """Returns the gradient averaged over all ranks, coalesced. Collective.

        Blocks until the result is there, also on CUDA.

        Args:
            exchange: Transport to the other ranks.
            param: The parameter that was passed to the constructor, which keeps no reference.
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
    """Coalesces rows on CUDA without a wait of the host for the number of distinct ids.

    Args:
        ids: Row indices, shape [n], in any order.
        values: Rows, shape [n, ...].
        device: Device of both.
        core: The device object of the engine, `device.core`.

    Returns:
        Distinct ids ascending, shape [n]; the sum of each id's rows in their given order, shape
        [n, ...]; and the number of distinct ids, shape [1], or [0] if n is 0. Ids and sums behind
        that number are zeros.
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
    """Returns (rows, elements of a row) of a parameter; rows are its first dimension."""
    return param.shape[0], math.prod(param.shape[1:])


def empty_like(param: nn.Parameter) -> torch.Tensor:
    """Returns a sparse gradient of `param` with no rows."""
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=param.device),
        param.new_empty(0, *param.shape[1:]),
        param.shape,
        is_coalesced=True,
        check_invariants=False,
        device=param.device,
    )


def sparse_tensor(found: _core.RowsSum, param: torch.Tensor, device: Device) -> torch.Tensor:
    """Returns the summed rows as a coalesced sparse tensor of the parameter's shape.

    Args:
        found: Row ids, values and traffic counts, as the core returns them in host memory.
        param: The parameter, for shape and dtype.
        device: Device of the result.
    """
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

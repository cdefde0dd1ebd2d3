# SPDX-License-Identifier: Apache-2.0
"""Step check: compares hyper-parameters and, in turn, parameters across ranks.

A rank that trains differently ends with other parameters and spoils the job without an error.
Causes are a scheduler on one rank only, another scale of a GradScaler, or a checkpoint that only
one rank has loaded.

Therefore each rank sends a checksum with its step votes every few steps. Each bit of it travels as
a pair of flags. If some ranks have set the bit and others have not, both flags of the pair are set
in the sum. A sum of the checksums themselves could hide a difference by rounding.
"""

from __future__ import annotations

import json
import math
import platform
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from usbyte.errors import MismatchError
from usbyte.torch.layout import NUM_CHECK_FLAGS, is_dense
from usbyte.torch.optimizer.compat.known_optimizers import (
    is_elementwise,
    is_torchs,
    step_is_replaced,
)
from usbyte.torch.plan.job import ParamTable
from usbyte.torch.runtime.device import Device, Fetched
from usbyte.torch.runtime.format import name_holders, name_ranks
from usbyte.torch.runtime.messages import read
from usbyte.torch.torch_private import DisableTorchFunction

_FIELDS, _FIELD_BITS = 2, 8
assert NUM_CHECK_FLAGS == 2 * _FIELDS * _FIELD_BITS
_NO_FLAGS = [0.0] * NUM_CHECK_FLAGS

# Largest number of parameters for one checksum, and of elements of each, to bound its cost.
_PARAMS, _ELEMENTS = 8, 1 << 15
_LARGEST_TENSOR = 16  # elements of a tensor among hyper-parameters that is compared
_EXACT_INTEGERS = 1 << 53  # largest integer up to which all are exact in a float
# Largest relative difference between sums of squares of ranks that round differently.
_ROUNDING = 1e-3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Record:
    """The input of one checksum.

    Attributes:
        step: Number of steps begun before the parameters were read.
        options: The optimizer's class and hyper-parameters, by their description in messages.
        indices: Indices of the parameters that were read.
        numbers: By position in `indices`, a checksum or a sum of squares of the parameter's values.
    """

    step: int
    options: dict[str, Any]
    indices: list[int]
    numbers: Fetched

    def to_json(self, names: Sequence[str]) -> str:
        params = dict(zip((names[i] for i in self.indices), self.numbers.get(), strict=True))
        return json.dumps({"options": self.options, "params": params})


class StepChecksum:
    """Compares the hyper-parameters and parameters of all ranks at regular intervals.

    Args:
        label: Name of the optimizer, for messages.
        optimizer: The wrapped optimizer.
        param_table: Its parameters.
        changing: Parameters that the forward pass changes differently on each rank; not compared.
        device: Device of the parameters.
        every: Number of steps between comparisons; 0 turns them off.
        ranks: Numbers of the ranks in the world, by rank of the group; for messages.
        ask: Gathers one byte string from each rank under a name. Collective.
        on_difference: Called with a text if ranks differ, so that the parameters are not used any
            more.
    """

    def __init__(
        self,
        label: str,
        optimizer: torch.optim.Optimizer,
        param_table: ParamTable,
        changing: Collection[nn.Parameter],
        device: Device,
        every: int,
        ranks: Sequence[int],
        ask: Callable[[str, bytes], list[bytes]],
        on_difference: Callable[[str], None],
    ) -> None:
        self._label, self._optimizer, self._param_table = label, optimizer, param_table
        self._device, self._every, self._ranks = device, every, ranks
        self._ask, self._on_difference = ask, on_difference
        self._compared = [i for i, param in enumerate(param_table.params) if param not in changing]
        self._next = 0  # position in `_compared`
        self._exact: bool | None = None  # whether ranks round alike; None: not known yet
        self._taken: deque[_Record] = deque()  # records whose checksums are still to be sent
        # One entry for each step whose summed flags are not processed yet; None: no checksum.
        self._in_flight: deque[_Record | None] = deque()

    def begin(self, step: int) -> None:
        """Reads hyper-parameters and parameters if a comparison is due. No update may be pending.

        Args:
            step: Number of steps begun so far, equal on all ranks.
        """
        if not self._every or step % self._every or not step:
            return
        if self._exact is None:  # collective: `step` is equal on all ranks
            self._exact = self._rounds_alike()
        indices = self._choose()
        if not indices:
            return
        with torch.no_grad(), DisableTorchFunction():
            number = _checksum if self._exact else _square_sum
            found = [number(self._param_table.params[i], step) for i in indices]
            numbers = self._device.fetch(torch.stack(found))
        self._taken.append(_Record(step, options_of(self._optimizer), indices, numbers))

    def flags(self, step: int, is_silent: bool) -> Sequence[float]:
        """Returns the checksum flags to send in the step of the last `begin`.

        Args:
            step: Number of steps begun so far, as in the call of `begin`.
            is_silent: Whether this rank has no data (it has joined), so that it sends zeros only.
        """
        record = None
        if self._taken and step >= self._taken[0].step + self._device.lag:
            record = self._taken.popleft()
        self._in_flight.append(record)
        return _NO_FLAGS if record is None or is_silent else self._flags_of(record)

    def record_votes(self, flags: Sequence[float]) -> None:
        """Processes the summed checksum flags of one step. Called for each step, in order.

        Args:
            flags: The sums over all ranks. Any nonzero value counts as set.

        Raises:
            MismatchError: Ranks differ. It names the difference and the ranks, and is equal on all
                ranks.
        """
        record = self._in_flight.popleft()
        if record is None:
            return
        pairs = list(zip(flags[0::2], flags[1::2], strict=True))
        differ = [
            any(a and b for a, b in pairs[k * _FIELD_BITS : (k + 1) * _FIELD_BITS])
            for k in range(_FIELDS)
        ]
        if any(differ) if self._exact else all(differ):
            answers = self._ask("checked", record.to_json(self._param_table.names).encode())
            records = [
                read(f"what rank {rank} has compared", answer, dict[str, dict[str, Any]])
                for rank, answer in zip(self._ranks, answers, strict=True)
            ]
            if found := self._difference(records):
                self._on_difference(f"{self._label}: {found}")
                raise MismatchError(f"{self._label}: {found}")

    def _rounds_alike(self) -> bool:
        """Returns whether equal parameters stay bitwise equal on all ranks. Collective."""
        optimizer, device = self._optimizer, self._device.torch_device
        mine = [
            is_elementwise(optimizer) and not step_is_replaced(optimizer),
            [[group.get(key) for key in sorted(_WAYS)] for group in optimizer.param_groups],
            [torch.__version__, torch.version.cuda, platform.python_version()],
            [platform.libc_ver(), platform.machine(), torch.backends.cpu.get_cpu_capability()],
            torch.get_num_threads(),
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        ]
        answers = self._ask("rounding", json.dumps(mine, default=str).encode())
        return bool(mine[0]) and len(set(answers)) == 1

    def _choose(self) -> list[int]:
        """Returns the indices of the parameters that are next in turn."""
        count = len(self._compared)
        chosen = [(self._next + k) % count for k in range(min(_PARAMS, count))]
        self._next = (self._next + len(chosen)) % max(count, 1)
        return [self._compared[k] for k in chosen]

    def _flags_of(self, record: _Record) -> list[float]:
        text, numbers = json.dumps(record.options), record.numbers.get()
        if self._exact:
            whole = zlib.crc32(f"{text} {numbers} {record.step}".encode())
            fields = [whole & 0xFF, whole >> 8 & 0xFF]
        else:
            # Two grids, offset by half a cell: values that differ only by rounding are in the same
            # cell of at least one grid.
            place = math.log(min(max(sum(numbers), 1e-300), 1e300)) / (4 * _ROUNDING)
            fields = [
                zlib.crc32(f"{text} {math.floor(place + k / 2)} {record.step}".encode()) & 0xFF
                for k in range(_FIELDS)
            ]
        bits = [field >> k & 1 for field in fields for k in range(_FIELD_BITS)]
        return [float(flag) for bit in bits for flag in (bit, 1 - bit)]

    def _difference(self, records: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
        """Returns a description of the first difference; empty if there is none."""
        for what in records[0].get("options", {}):
            values = [json.dumps(record.get("options", {}).get(what)) for record in records]
            if len(set(values)) > 1:
                return (
                    f"{what} is {name_holders(values, self._ranks)}. Set the same value on all "
                    "ranks, in schedulers too (after join(), broadcast their state from the rank "
                    "that it returns), and restart the job from its last checkpoint. "
                    "USBYTE_CHECK_STEPS=0 turns this check off"
                )
        for name in records[0].get("params", {}):
            found = [record.get("params", {}).get(name) for record in records]
            if self._exact:
                values = [str(value) for value in found]
            else:
                values = [str(_are_near(value, found[0])) for value in found]
            if len(set(values)) > 1:
                most = Counter(values).most_common(1)[0][0]
                odd = [r for r, value in zip(self._ranks, values, strict=True) if value != most]
                return (
                    f"parameter '{name}' has other values on {name_ranks(odd)} than on the other "
                    "ranks, so the ranks train different models. Let all ranks load the same "
                    "checkpoint or call broadcast_parameters(), and change, scale and reset "
                    "gradients in the same way (a GradScaler has one scale on all ranks); restart "
                    "the job from its last checkpoint. USBYTE_CHECK_STEPS=0 turns this check off"
                )
        return ""


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's class and hyper-parameters, in a form that JSON can carry.

    Left out are entries that scripts have added to parameter groups, tensors on a device, and
    objects. For a class that is not of torch.optim, entries with names that torch.optim does not
    use are left out too: one may be the rank.
    """
    kind = type(optimizer)
    found: dict[str, Any] = {"the optimizer": kind.__qualname__}
    # An optimizer that does not call Optimizer.__init__ has no defaults.
    known = getattr(optimizer, "defaults", {}).keys() if is_torchs(kind) else _COMMON
    for g, group in enumerate(optimizer.param_groups):
        for key in sorted(known - _WAYS):
            value = _plain(group.get(key))
            if value is not _UNKNOWN:
                found[f"{key} of parameter group {g}"] = value
    return found


_UNKNOWN = object()
_COMMON = frozenset(["betas", "eps", "lr", "maximize", "momentum", "nesterov", "weight_decay"])
_WAYS = frozenset(["capturable", "differentiable", "foreach", "fused"])  # with equal results


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_small = value.device.type == "cpu" and value.numel() <= _LARGEST_TENSOR
        return _plain(value.tolist()) if is_small else _UNKNOWN
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Equal numbers of different types get equal texts, nan and huge integers included.
        return repr(value) if abs(value) > _EXACT_INTEGERS else repr(float(value))
    return value if value is None or isinstance(value, bool | str) else _UNKNOWN


def _sample(param: torch.Tensor, step: int) -> torch.Tensor:
    """Returns elements of a parameter in memory order; in another step, others of a large one."""
    data = param.detach()
    flat = data.as_strided((data.numel(),), (1,)) if is_dense(data) else data.reshape(-1)
    stride = -(-flat.numel() // _ELEMENTS)
    return flat[step % stride :: stride]


def _checksum(param: torch.Tensor, step: int) -> torch.Tensor:
    """Returns an int64 checksum of the bits and positions of a parameter's elements."""
    bits = _sample(param, step).view(_INTEGERS[param.element_size()]).to(torch.int64)
    weights = torch.arange(1, 2 * len(bits), 2, device=bits.device, dtype=torch.int64)
    return (bits * weights).sum()


def _square_sum(param: torch.Tensor, step: int) -> torch.Tensor:
    # The limit keeps the sum over several parameters finite.
    return _sample(param, step).double().square().sum().nan_to_num().clamp(max=1e300)


def _are_near(value: Any, other: Any) -> bool:
    if not isinstance(value, float) or not isinstance(other, float):
        return bool(value == other)
    return math.isclose(value, other, rel_tol=2 * _ROUNDING, abs_tol=1e-300)

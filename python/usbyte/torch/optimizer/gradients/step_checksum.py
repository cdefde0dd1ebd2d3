# SPDX-License-Identifier: Apache-2.0
"""Whether ranks are about to apply the same: hyper-parameters and, in turn, parameters.

A rank that trains otherwise than the others (a scheduler on one rank alone, another scale of a
GradScaler, a checkpoint that one rank has loaded) ends with other parameters, and so does the job,
without a word. So every few steps each rank sends a checksum along with its votes. It travels as
flags, a pair for each of its bits: if a bit is set on some ranks and not on others, both flags of
its pair are. No sum of numbers, however coarse, can hide that.
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
from usbyte.torch.runtime.format import name_ranks
from usbyte.torch.runtime.messages import read
from usbyte.torch.torch_private import DisableTorchFunction

_FIELDS, _FIELD_BITS = 2, 8
assert NUM_CHECK_FLAGS == 2 * _FIELDS * _FIELD_BITS
_NO_FLAGS = [0.0] * NUM_CHECK_FLAGS

# What is read of parameters for a checksum: few of them at a time, and few elements of large ones.
_PARAMS, _ELEMENTS = 8, 1 << 15
_LARGEST_TENSOR = 16  # among hyper-parameters
_EXACT_INTEGERS = 1 << 53  # that a float can hold
# How far apart sums of squares of the same parameters may be where ranks round differently.
_ROUNDING = 1e-3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Record:
    """What a checksum was made of.

    Attributes:
        step: Begun before, when parameters were looked at.
        options: The optimizer's class and hyper-parameters, by what they are called in messages.
        indices: The parameters that were looked at.
        numbers: For each of those a number that tells their values apart.
    """

    step: int
    options: dict[str, Any]
    indices: list[int]
    numbers: Fetched

    def to_json(self, names: Sequence[str]) -> str:
        params = dict(zip((names[i] for i in self.indices), self.numbers.get(), strict=True))
        return json.dumps({"options": self.options, "params": params})


class StepChecksum:
    """Compares the ranks' hyper-parameters and parameters, every so many steps.

    Args:
        label: Name of the optimizer, for messages.
        optimizer: The wrapped optimizer.
        trained: Its parameters.
        changing: Those that forward passes change on each rank in another way.
        device: Where they are.
        every: Steps from one comparison to the next; 0: none.
        ranks: What the ranks that are compared are called.
        ask: Gathers a byte string of each rank, under a name. Collective.
        tear: Told why parameters are not to be used any more, where ranks differ.
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
        tear: Callable[[str], None],
    ) -> None:
        self._label, self._optimizer, self._param_table = label, optimizer, param_table
        self._device, self._every, self._ranks = device, every, ranks
        self._ask, self._tear = ask, tear
        self._compared = [i for i, param in enumerate(param_table.params) if param not in changing]
        self._next = 0  # of these, to look at
        self._exact: bool | None = None  # equal parameters have equal bits; None: not known yet
        self._taken: deque[_Record] = deque()  # whose checksums are to be sent
        # By step whose flags are to be heard: what they are of.
        self._in_flight: deque[_Record | None] = deque()

    def begin(self, step: int) -> None:
        """Looks at hyper-parameters and parameters if it is time to; no update may be pending.

        Args:
            step: Steps begun so far, the same on all ranks.
        """
        if not self._every or step % self._every or not step:
            return
        if self._exact is None:  # all ranks come here together
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
        """What to send in the step that `begin` was last called for.

        Args:
            step: Steps begun so far, as `begin` was told.
            is_silent: This rank has no data, and no say.
        """
        record = None
        if self._taken and step >= self._taken[0].step + self._device.lag:
            record = self._taken.popleft()
        self._in_flight.append(record)
        return _NO_FLAGS if record is None or is_silent else self._flags_of(record)

    def record_votes(self, flags: Sequence[float]) -> None:
        """Takes the sum of what all ranks have sent in a step, one after the other.

        Raises:
            MismatchError: Ranks differ. It names what and which rank, and is alike on all ranks.
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
                self._tear(f"{self._label}: {found}")
                raise MismatchError(f"{self._label}: {found}")

    def _rounds_alike(self) -> bool:
        """Whether equal parameters stay equal to the last bit on all ranks. Collective."""
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
        """The parameters whose turn it is."""
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
            # On two grids, each halfway between the lines of the other: equal but for rounding,
            # values are in one cell of one of them at least.
            place = math.log(min(max(sum(numbers), 1e-300), 1e300)) / (4 * _ROUNDING)
            fields = [
                zlib.crc32(f"{text} {math.floor(place + k / 2)} {record.step}".encode()) & 0xFF
                for k in range(_FIELDS)
            ]
        bits = [field >> k & 1 for field in fields for k in range(_FIELD_BITS)]
        return [float(flag) for bit in bits for flag in (bit, 1 - bit)]

    def _difference(self, records: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
        """The first thing that is not alike, in words; empty if there is none."""
        for what in records[0].get("options", {}):
            values = [json.dumps(record.get("options", {}).get(what)) for record in records]
            if len(set(values)) > 1:
                return (
                    f"{what} is {self._who(values)}. Let schedulers and scripts set the same on "
                    "all ranks (after join(), broadcast the state of schedulers from the rank that "
                    "it returns), and restart the job from its last checkpoint. "
                    "USBYTE_CHECK_STEPS=0 leaves out what is compared"
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
                    "ranks, which therefore train different models. See that all ranks load the "
                    "same checkpoint or call broadcast_parameters(), that they change, scale and "
                    "reset gradients alike (a GradScaler has one scale on all ranks), and restart "
                    "the job from its last checkpoint. USBYTE_CHECK_STEPS=0 leaves out what is "
                    "compared"
                )
        return ""

    def _who(self, values: Sequence[str]) -> str:
        holders: dict[str, list[int]] = {}
        for rank, value in zip(self._ranks, values, strict=True):
            holders.setdefault(value, []).append(rank)
        return " but ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in holders.items())


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer's class and hyper-parameters are, as JSON can carry it.

    Those that scripts have added to groups, tensors on a device and objects are left out. So is,
    of classes that are not torch's, what torch's have under no such name: it may be the rank.
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
_WAYS = frozenset(["capturable", "differentiable", "foreach", "fused"])  # to the same results


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
        # One text for equal numbers of all types, nan and those too large for a float included.
        return repr(value) if abs(value) > _EXACT_INTEGERS else repr(float(value))
    return value if value is None or isinstance(value, bool | str) else _UNKNOWN


def _sample(param: torch.Tensor, step: int) -> torch.Tensor:
    """Elements of a parameter in the order of memory, in another step others of a large one."""
    data = param.detach()
    flat = data.as_strided((data.numel(),), (1,)) if is_dense(data) else data.reshape(-1)
    stride = -(-flat.numel() // _ELEMENTS)
    return flat[step % stride :: stride]


def _checksum(param: torch.Tensor, step: int) -> torch.Tensor:
    """Of the bits of the elements and their places."""
    bits = _sample(param, step).view(_INTEGERS[param.element_size()]).to(torch.int64)
    weights = torch.arange(1, 2 * len(bits), 2, device=bits.device, dtype=torch.int64)
    return (bits * weights).sum()


def _square_sum(param: torch.Tensor, step: int) -> torch.Tensor:
    # Finite, also when those of several parameters are added up.
    return _sample(param, step).double().square().sum().nan_to_num().clamp(max=1e300)


def _are_near(value: Any, other: Any) -> bool:
    if not isinstance(value, float) or not isinstance(other, float):
        return bool(value == other)
    return math.isclose(value, other, rel_tol=2 * _ROUNDING, abs_tol=1e-300)

# SPDX-License-Identifier: Apache-2.0
"""Finds tensors that share memory, including those that share it unknown to torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from usbyte.torch.torch_private import storage_handle, storage_use_count

_OWN_USES = 2  # of a storage: its tensor, and the Python storage object of the query


class Aliases:
    """Finds other tensors over the memory of parameters, such as a kept `state_dict()`.

    A read of such a tensor cannot be detected, even while an update of its memory is deferred.

    Args:
        params: Plain tensors, none of them lazy. Parameters that are not among them count as other
            tensors.

    Attributes:
        are_outdated: Whether parameters may have new memory, as of the last `find`.
    """

    are_outdated = True

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        # A reference to each storage, so that its number is not given to another storage.
        self._storages = [param.untyped_storage() for param in params]
        self._numbers = [storage._cdata for storage in self._storages]
        own = Counter(self._numbers)
        self._expected = [own[number] + 1 for number in self._numbers]

    def find(self) -> list[int]:
        """Returns the indices of the parameters whose memory other tensors use."""
        if storage_use_count is None:
            self.are_outdated = False  # this torch cannot tell
            return []
        if not self._numbers:
            return []
        uses = list(map(storage_use_count, self._numbers))
        if uses == self._expected:
            self.are_outdated = False
            return []
        # A parameter that got another storage is missing in the use count of its old one.
        rows = list(zip(uses, self._expected, strict=True))
        self.are_outdated = any(count < expected for count, expected in rows)
        return [i for i, (count, expected) in enumerate(rows) if count > expected]


def sharing_memory(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns the groups of tensors that share memory, as `a.data = b.data.t()` makes two share it.

    Args:
        tensors: Plain tensors, none of them lazy, with or without gaps between elements.

    Returns:
        Ascending indices of the tensors of each group. Tensors that share nothing are left out.
    """
    spans = sorted(
        (device, begin, end, i)
        for i, tensor in enumerate(tensors)
        for device, begin, end in [_span_of(tensor)]
        if begin < end
    )
    groups: list[list[int]] = []
    group: list[int] = []
    last, reach = "", 0
    for device, begin, end, i in spans:
        if device != last or begin >= reach:
            group, last, reach = [], device, 0
            groups.append(group)
        group.append(i)
        reach = max(reach, end)
    return [sorted(group) for group in groups if len(group) > 1]


def _span_of(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Returns the device, the first address, and the end address of a tensor's elements."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return "", 0, 0
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return str(tensor.device), begin, begin + (reach + 1) * tensor.element_size()


def shares_memory(tensor: torch.Tensor) -> bool:
    """Returns whether other tensors use the same storage; False where torch cannot tell."""
    if storage_use_count is None or tensor.layout is not torch.strided:
        return False
    return storage_use_count(storage_handle(tensor)) > _OWN_USES

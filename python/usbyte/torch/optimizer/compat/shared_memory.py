# SPDX-License-Identifier: Apache-2.0
"""Tensors that have memory in common, whatever torch knows of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from usbyte.torch.torch_private import storage_handle, storage_use_count

_OWN_USES = 2  # of a storage: its tensor, and the object by which Python asks


class Aliases:
    """Other tensors over the memory of parameters, as in a `state_dict()` that a script keeps.

    They read that memory without a word, also while an update of it waits.

    Args:
        params: All plain. The parameters that are not among them count as other tensors.

    Attributes:
        are_outdated: Parameters may have other memory by now, as of the last `find`.
    """

    are_outdated = True

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        # Kept, so that a number stands for the same storage as long as this one lives.
        self._storages = [param.untyped_storage() for param in params]
        self._numbers = [storage._cdata for storage in self._storages]
        own = Counter(self._numbers)
        self._expected = [own[number] + 1 for number in self._numbers]

    def find(self) -> list[int]:
        """Indices of the parameters whose memory other tensors use."""
        if storage_use_count is None:
            self.are_outdated = False  # as far as can be told
            return []
        if not self._numbers:
            return []
        uses = list(map(storage_use_count, self._numbers))
        if uses == self._expected:
            self.are_outdated = False
            return []
        # Each parameter has left one storage if it has another one now.
        rows = list(zip(uses, self._expected, strict=True))
        self.are_outdated = any(count < expected for count, expected in rows)
        return [i for i, (count, expected) in enumerate(rows) if count > expected]


def sharing_memory(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Groups of tensors that have memory in common, as where `a.data = b.data.t()` ties two.

    Args:
        tensors: All plain, dense or not.

    Returns:
        Indices of the tensors of each group, ascending; those that share nothing are left out.
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
    """Device, first address and the one behind the last, between which all elements lie."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return "", 0, 0
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return str(tensor.device), begin, begin + (reach + 1) * tensor.element_size()


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether other tensors have parts of the same storage; False where torch cannot tell."""
    if storage_use_count is None or tensor.layout is not torch.strided:
        return False
    return storage_use_count(storage_handle(tensor)) > _OWN_USES

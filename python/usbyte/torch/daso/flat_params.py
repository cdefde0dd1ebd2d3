# SPDX-License-Identifier: Apache-2.0
"""Parameters as flat vectors, for the sums over nodes and for merging these into the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class ParameterVectors:
    """Flat host vectors of the parameters on one device: one for float64, one for all other dtypes.

    The parameters are copied to float32 or float64. The vectors are allocated once.

    Args:
        params: The parameters, at least one, all on one device.

    Attributes:
        vectors: 1-d tensors in host memory. Each has one element more than its parameters together;
            the last one is free for the caller.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._device = params[0].device
        self._kinds: list[list[nn.Parameter]] = []
        self._flats: list[torch.Tensor] = []  # the same, on the device of the parameters
        self.vectors: list[torch.Tensor] = []
        for dtype in (torch.float32, torch.float64):
            double = dtype == torch.float64
            alike = [p for p in params if (p.dtype == torch.float64) == double]
            if not alike:
                continue
            numel = sum(p.numel() for p in alike) + 1
            on_host = self._device.type == "cpu"
            self.vectors.append(
                torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=not on_host)
            )
            self._flats.append(
                self.vectors[-1]
                if on_host
                else torch.zeros(numel, dtype=dtype, device=self._device)
            )
            self._kinds.append(alike)

    def gather(self) -> None:
        """Copies the parameters into the vectors."""
        for params, flat, vector in zip(self._kinds, self._flats, self.vectors, strict=True):
            for param, view in zip(params, _views(flat, params), strict=True):
                view.copy_(param.detach())
            if vector is not flat:
                vector.copy_(flat)

    def merge(self, wait: int, nodes: int) -> None:
        """Sets each parameter x to (2 S x + sum) / (2 S + P), with the sums that the vectors hold.

        Coquelin et al., J. Big Data 9 (2022). The own parameters count as 2 S nodes, because they
        have trained for S batches since the vectors were gathered. With S = 0 the result is the
        average.

        Args:
            wait: S, the number of batches since the vectors were gathered; at least 0.
            nodes: P, the number of nodes whose parameters were summed.
        """
        for params, flat, vector in zip(self._kinds, self._flats, self.vectors, strict=True):
            if vector is not flat:
                flat.copy_(vector)
            for param, view in zip(params, _views(flat, params), strict=True):
                if wait:
                    view.add_(param.detach(), alpha=2 * wait)
                param.detach().copy_(view.div_(2 * wait + nodes))


def _views(flat: torch.Tensor, params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    parts = flat[:-1].split([p.numel() for p in params])
    return [part.view(p.shape) for part, p in zip(parts, params, strict=True)]

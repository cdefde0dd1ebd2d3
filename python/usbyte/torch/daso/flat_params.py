"""Parameters as flat vectors, to be sent to other nodes and merged with what comes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class ParameterVectors:
    """Parameters of one device, flat in host memory.

    float64 travels as it is and all else as float32, in vectors that are made once.

    Args:
        params: The parameters; one at least.

    Attributes:
        vectors: 1-d on the host, each one element longer than its parameters.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._device = params[0].device
        self._kinds: list[list[nn.Parameter]] = []
        self._flats: list[torch.Tensor] = []  # on the device of the parameters
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
        """Parameters become (2 S x + sum) / (2 S + P), where the vectors hold the sums.

        Coquelin et al., J. Big Data 9 (2022): the own parameters count as 2 S nodes, as S batches
        have gone into them since the others' were sent. With S = 0 they become the average.

        Args:
            wait: S, batches since the vectors were gathered.
            nodes: P, whose parameters were added up.
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

# SPDX-License-Identifier: Apache-2.0
"""What Themis' authors have published of its simulations, and where each figure is from."""

from __future__ import annotations

from dataclasses import dataclass

#: Of one all_reduce on average, %: the fixed order, Themis in order of arrival, smallest first.
UTILIZATION = (56.31, 87.67, 95.14)
#: Speed-ups of one all_reduce by Themis in order of arrival, and smallest first, on average.
SPEEDUPS = (1.58, 1.72)
MOST = 2.70
#: Of the first version of the paper (arXiv, 2021): mean and largest speed-up of one all_reduce.
FIRST_VERSION = (1.88, 2.92)


@dataclass(frozen=True)
class Training:
    """Published of a model's iterations.

    Attributes:
        workload: Name in `usbyte.planning.topologies`.
        model: As the later version of the paper has it.
        first: Mean and largest speed-up in the first version, arXiv 2021.
        later: Likewise at ISCA 2022.
        ideal: Mean speed-up of an ideal network at ISCA 2022, by a reader's summary.
    """

    workload: str
    model: str
    first: tuple[float, float]
    later: tuple[float, float]
    ideal: float


TRAININGS = (
    Training("resnet50", "ResNet-152", (1.49, 1.96), (1.49, 2.25), 1.54),
    Training("gnmt", "GNMT", (1.41, 1.81), (1.30, 1.78), 1.32),
    Training("dlrm", "DLRM", (1.42, 1.80), (1.30, 1.77), 1.33),
    Training("transformer-1t", "Transformer-1T", (1.35, 1.78), (1.25, 1.53), 1.26),
)

# SPDX-License-Identifier: Apache-2.0
"""What is published on compressed training, and what it is simulated with: costs and clusters."""

from __future__ import annotations

from dataclasses import dataclass

from usbyte import _core

#: Released with Espresso (bytedance/byteps, byteps/torch/mergeComp/scheduler/model_tensor.py): us
#: on a V100 to encode and decode, and to decode, up to 2^20 elements; more take as much longer.
_V100_US = {
    "fp16": (26, 22),
    "randk:0.01": (88, 34),
    "topk:0.01": (390, 34),  # DGC
    "efsignsgd": (270, 140),
    "onebit": (620, 170),
}
_CONSTANT_BYTES = 4 << 20
#: DGC sends what topk does. usbyte's own does not let partial sums be encoded again, since its
#: momentum is corrected by what has been sent; released servers do that by plain topk.
TITLES = {"efsignsgd": "EF-SignSGD", "topk:0.01": "DGC 1 %", "randk:0.01": "Rand-k 1 %"}
#: Released likewise: a node's CPUs encode and decode at this speed, whatever the codec.
_CPU_BITS_PER_S = 10e9


def _constant_at_first(seconds: float) -> _core.AlphaBeta:
    return _core.AlphaBeta(seconds, seconds / _CONSTANT_BYTES, seconds)


def v100_costs() -> _core.CodecCosts:
    """What codecs cost a V100."""
    return _core.CodecCosts(
        {
            spec: _core.CodecCost(
                _constant_at_first(1e-6 * (both - decode)), _constant_at_first(1e-6 * decode)
            )
            for spec, (both, decode) in _V100_US.items()
        }
    )


def node_cpu_costs(ranks_per_node: int) -> _core.CodecCosts:
    """The same of the share of a node's CPUs that a rank has; half of it is encoding."""
    half = _core.AlphaBeta(0.0, ranks_per_node * 8 / _CPU_BITS_PER_S / 2)
    return _core.CodecCosts({spec: _core.CodecCost(half, half) for spec in _V100_US})


@dataclass(frozen=True)
class Links:
    """Nodes of eight V100 as they are simulated.

    Attributes:
        name: In short.
        nodes: How many.
        intra_latency_s: Of a message inside a node, s.
        intra_bytes_per_s: Inside a node.
        inter_latency_s: Of a message between nodes, s.
        inter_bytes_per_s: Of a node.
    """

    name: str
    nodes: int
    intra_latency_s: float
    intra_bytes_per_s: float
    inter_latency_s: float = 0.0
    inter_bytes_per_s: float = 1.0

    ranks_per_node = 8

    def cluster(
        self, gpu: _core.CodecCosts | None, cpu: _core.CodecCosts | None
    ) -> _core.CompressionCluster:
        """With those codecs."""
        return _core.CompressionCluster.thakur(
            self.nodes,
            self.ranks_per_node,
            self.intra_latency_s,
            self.intra_bytes_per_s,
            self.inter_latency_s,
            self.inter_bytes_per_s,
            gpu,
            cpu,
        )


# Nominal speeds; 5 us for a message in a node, and over Ethernet what MG-WFBP measured with 8
# nodes: 5.23e-4 s for the 14 messages of an all_reduce.
_ETHERNET_S = 5.23e-4 / 14
# Released with Espresso: half of an all_reduce starts up in 150 us (7 messages among 8), a kB takes
# 0.8 us between nodes, and 0.4 us over PCIe or 0.02 us over NVLink inside one.
_RELEASED_S = 150e-6 / 7

#: 64 V100, PCIe inside a node and 25 Gb/s between them, by two readings.
PCIE_64 = (
    Links("nominal", 8, 5e-6, 12e9, _ETHERNET_S, 25e9 / 8),
    Links("released", 8, _RELEASED_S, 1e9 / 0.4, _RELEASED_S, 1e9 / 0.8),
)
#: 8 V100 in a node.
PCIE_8 = (Links("nominal", 1, 5e-6, 12e9), Links("released", 1, _RELEASED_S, 1e9 / 0.4))
NVLINK_8 = (Links("nominal", 1, 5e-6, 150e9), Links("released", 1, _RELEASED_S, 1e9 / 0.02))

#: Elements from which the HiPress of Espresso's artefact compresses, and bytes from which BytePS
#: does by default.
HIPRESS_ELEMENTS = 1 << 20
BYTEPS_BYTES = 1 << 16

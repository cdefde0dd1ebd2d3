# SPDX-License-Identifier: Apache-2.0
"""Step times of published systems, simulated as their authors count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from _published import Cluster
from usbyte import _core
from usbyte.planning.layout import tensor_specs

_MIB = 1 << 20
_Sizes = tuple[Mapping[str, int], ...]


@dataclass(frozen=True)
class PolicyVariant:
    """A policy and how it is run.

    Attributes:
        policy: Of usbyte.
        text: What is assumed.
        overlap: "backward" for systems with a barrier after backward.
        sizes: Options of the policy; the best of them counts.
        shares_startup: Operations of a window start up together; else one after the other.
        by_module: Weight and bias of a module are one tensor.
    """

    policy: str
    text: str
    overlap: str = "forward"
    sizes: _Sizes = ({},)
    shares_startup: bool = False
    by_module: bool = False

    def step_s(self, job: _core.Profile, cluster: Cluster, overlapping: bool = False) -> float:
        """Seconds of a step; `overlapping`: startups do, whatever the authors count."""
        job = merged_modules(job) if self.by_module else job
        network = cluster.network(serial=not (overlapping or self.shares_startup))
        return min(
            _core.simulate(
                _core.make_plan(self.policy, job, network, dict(sizes), self.overlap),
                job,
                network,
                self.overlap,
            ).step_s
            for sizes in self.sizes
        )


@dataclass(frozen=True)
class Bound:
    """A lower bound of the step time, whatever the plan.

    Attributes:
        text: What is assumed.
        bytes_alone: Only compute and all bytes count, whenever they are ready or due.
    """

    text: str
    bytes_alone: bool = False

    def step_s(self, job: _core.Profile, cluster: Cluster) -> float:
        """Seconds of a step."""
        if self.bytes_alone:
            return max(job.iteration_s, cluster.beta_s_per_byte * job.bytes)
        return _core.bytes_bound_s(job, cluster.network(serial=True))


def merged_modules(job: _core.Profile) -> _core.Profile:
    """The job whose neighbouring tensors of one module ("conv1.weight", "conv1.bias") are one."""
    rows: list[tuple[str, int, str, float, float]] = []
    for t, need, ready in zip(job.tensors, job.need_s, job.ready_s, strict=True):
        name, numel = t.name.rpartition(".")[0] or t.name, t.numel
        if rows and rows[-1][0] == name and rows[-1][2] == t.dtype:
            _, before, _, first, last = rows.pop()
            numel, need, ready = before + numel, min(first, need), max(last, ready)
        rows.append((name, numel, t.dtype, need, ready))
    return _core.Profile(
        tensor_specs(row[:3] for row in rows),
        [row[3] for row in rows],
        [row[4] for row in rows],
        job.step_s,
        job.update_s,
        job.model,
    )


def _buckets(first: bool) -> _Sizes:
    sizes = [mib * _MIB for mib in (1, 2, 4, 8, 16, 25, 32, 64, 128, 256)]
    return tuple(
        {"bucket_bytes": size, **({"first_bucket_bytes": size} if first else {})} for size in sizes
    )


#: Parts and credits in million parameters: ByteScheduler's defaults, and sizes within the ranges of
#: its tuner, about as many as it tries.
_TUNED: _Sizes = tuple(
    {"partition_bytes": 4_000_000 * part, "credit_bytes": 4_000_000 * credit}
    for part, credit in ((1, 4), *product((2, 4, 8, 16, 32), (4, 8, 16, 32, 64)))
    if part <= credit <= 8 * part
)
_SLICES: _Sizes = ({"partition_bytes": 160_000, "credit_bytes": 640_000},)
_RELEASED: _Sizes = ({"partition_bytes": 4_000_000, "credit_bytes": 16_000_000},)

VARIANTS = {
    "wfbp": PolicyVariant("wfbp", "one operation for each tensor", "backward"),
    "ddp": PolicyVariant("ddp", "25 MiB buckets, the first 1 MiB", "backward"),
    "mgwfbp": PolicyVariant("mgwfbp", "", "backward"),
    "p3": PolicyVariant("p3", "slices of 40,000 elements"),
    "p3 pipelined": PolicyVariant("bytescheduler", "four such slices in flight", sizes=_SLICES,
                                  shares_startup=True),
    "bytescheduler": PolicyVariant("bytescheduler", f"best of {len(_TUNED)} sizes", sizes=_TUNED),
    "bytescheduler defaults": PolicyVariant("bytescheduler", "1 and 4 million parameters",
                                            sizes=_RELEASED),
    "us-byte": PolicyVariant("us-byte", "units of 256 KiB"),
    "dcredit": PolicyVariant("dcredit", "units of 256 KiB, a window shares one startup",
                             shares_startup=True),
    "dear": PolicyVariant("dear_exact", "best of all fusion sizes"),
    "dear 25 MiB": PolicyVariant("dear", "groups of 25 MiB"),
    "pipedap": PolicyVariant("pipedap", ""),
    "auto": PolicyVariant("auto", "startups in turn"),
}  # fmt: skip


def _dcredit(kib: int, shared: bool, by_module: bool) -> PolicyVariant:
    text = f"units of {kib} KiB, " + ("a window shares one startup" if shared else
            "each operation of a window pays a startup")  # fmt: skip
    text += ", weight and bias are one tensor" if by_module else ""
    return PolicyVariant("dcredit", text, sizes=({"unit_bytes": kib << 10},), shares_startup=shared,
                         by_module=by_module)  # fmt: skip


#: For the columns of the earlier simulator: how usbyte counts, and then other readings.
READINGS: dict[str, tuple[PolicyVariant | Bound, ...]] = {
    "bound": (
        Bound("the preemptive bound: each tensor is ready and due when the trace says"),
        Bound("the longer of compute and of all bytes, whenever they are ready or due", True),
    ),
    "WFBP": (VARIANTS["wfbp"],),
    "best DDP": (
        PolicyVariant("ddp", "best of 1 to 256 MiB, the first bucket 1 MiB", "backward",
                      _buckets(False)),
        PolicyVariant("ddp", "the same, the first bucket like the others", "backward",
                      _buckets(True)),
    ),
    "best DeAR": (VARIANTS["dear"], VARIANTS["dear 25 MiB"]),
    "US-Byte": (
        VARIANTS["us-byte"],
        PolicyVariant("us-byte", "units of 16 MiB: a smaller tensor, once begun, is finished",
                      sizes=({"unit_bytes": 16 * _MIB},)),
    ),
    "D-Credit": (
        VARIANTS["dcredit"],
        *(_dcredit(*row) for row in product((64, 256, 1024), (True, False), (False, True))
          if row != (256, True, False)),
    ),
    "auto": (VARIANTS["auto"], replace(VARIANTS["auto"], text="startups overlap",
                                      shares_startup=True)),
}  # fmt: skip

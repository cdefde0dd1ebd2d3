# SPDX-License-Identifier: Apache-2.0
"""Ways to compress a job's gradients, all simulated in ByteComp's timeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from _published_compression import BYTEPS_BYTES, HIPRESS_ELEMENTS
from usbyte import _core

Job = _core.CompressionJob
Cluster = _core.CompressionCluster
_Rule = Callable[[int, int], bool]

_GATHERED = "C[gpu] AG D[gpu]"
_REDUCED = "C[gpu] AR D[gpu]"
_BETWEEN_NODES = f"RS | {_GATHERED} | AG"
_SERVERS = "RS | C[cpu] A2A D[cpu] C[cpu] AG D[cpu] | AG"
_MOST_GROUPS = 6
_MOST_ROUNDS = 20


def job_of(profile: _core.Profile, codec: str) -> Job:
    """All gradients may be compressed by that codec; communication hides behind backward alone."""
    return _core.CompressionJob.of(profile, "backward", [codec] * len(profile.tensors))


def on_what_there_is(strategy: str, cluster: Cluster) -> str:
    """The same with its codecs on the CPU if they run nowhere else, or on the GPU."""
    tree = _tree(cluster)
    for text in (strategy, strategy.replace("gpu", "cpu"), strategy.replace("cpu", "gpu")):
        if text in tree:
            return text
    raise ValueError(f"the cluster does not admit {strategy}")


@functools.cache
def _tree(cluster: Cluster) -> frozenset[str]:
    return frozenset(_core.decision_tree(cluster))


def uncompressed(job: Job, cluster: Cluster) -> list[str]:
    """Each tensor with its fastest collectives."""
    plain = [text for text in sorted(_tree(cluster)) if "C[" not in text]

    @functools.cache
    def fastest(numel: int, dtype: str) -> str:
        alone = _core.CompressionJob([(numel, dtype, 0.0, "none")])
        return min(plain, key=lambda s: _core.compressed_iteration_s(alone, cluster, [s]))

    return [fastest(numel, dtype) for numel, dtype, *_ in job.tensors]


def adds(job: Job) -> bool:
    """Messages of the job's codec are reduced, not gathered."""
    codec = _core.make_codec(job.tensors[0][3])
    return codec is not None and codec.adds


def _compressed_where(rule: _Rule, strategy: str, job: Job, cluster: Cluster) -> float:
    if adds(job):
        strategy = strategy.replace(_GATHERED, _REDUCED)
    coded = on_what_there_is(strategy, cluster)
    return _core.compressed_iteration_s(
        job,
        cluster,
        [
            coded if rule(numel, 4 * numel) else plain
            for (numel, *_), plain in zip(job.tensors, uncompressed(job, cluster), strict=True)
        ],
    )


def hipress_s(job: Job, cluster: Cluster) -> float:
    """Seconds with large tensors compressed between nodes, and nothing else."""
    return _compressed_where(lambda n, _: n >= HIPRESS_ELEMENTS, _BETWEEN_NODES, job, cluster)


def tuned_hipress_s(job: Job, cluster: Cluster) -> float:
    """The same with the best of all thresholds."""
    sizes = {numel for numel, *_ in job.tensors}
    return min(
        _compressed_where(lambda n, _, least=least: n >= least, _BETWEEN_NODES, job, cluster)  # type: ignore[misc]
        for least in sizes
    )


def hitopkcomm_s(job: Job, cluster: Cluster) -> float:
    """Seconds with every tensor compressed between nodes."""
    return _compressed_where(lambda *_: True, _BETWEEN_NODES, job, cluster)


def byteps_s(job: Job, cluster: Cluster) -> float:
    """Seconds with servers on all nodes, and the CPUs compressing what is not tiny."""
    return _compressed_where(lambda _, size: size >= BYTEPS_BYTES, _SERVERS, job, cluster)


def layer_wise_s(job: Job, cluster: Cluster) -> float:
    """Seconds with every tensor of its own compressed, over one level."""
    coded = on_what_there_is(_REDUCED if adds(job) else _GATHERED, cluster)
    return _core.compressed_iteration_s(job, cluster, [coded] * len(job.tensors))


def merged(job: Job, ends: Sequence[int]) -> Job:
    """Tensors in groups that end before those indices; a group is ready when its last one is."""
    groups = []
    begin = 0
    for end in ends:
        rows = job.tensors[begin:end]
        _, dtype, ready_s, codec = rows[-1]
        groups.append((sum(numel for numel, *_ in rows), dtype, ready_s, codec))
        begin = end
    return _core.CompressionJob(groups, job.rest_s)


def mergecomp_s(job: Job, cluster: Cluster) -> tuple[float, int]:
    """Seconds with the best groups that are found, and how many these are.

    For each number of groups, their edges begin where they hold about as many bytes, and each in
    turn moves to where the iteration is shortest. Wang, Wu and Ng, "MergeComp: A Compression
    Scheduler for Scalable Communication-Efficient Distributed Training", 2021. usbyte's policy
    "mergecomp" plans for one thread that codes on the CPU; codecs run between the kernels of
    backward here.
    """
    count = len(job.tensors)

    def iteration_s(ends: Sequence[int]) -> float:
        return layer_wise_s(merged(job, ends), cluster)

    best = (iteration_s([count]), 1)
    for groups in range(2, min(_MOST_GROUPS, count) + 1):
        ends = _even_ends([numel for numel, *_ in job.tensors], groups)
        least_s = iteration_s(ends)
        for _ in range(_MOST_ROUNDS):
            before_s = least_s
            for i in range(groups - 1):
                low, high = ends[i - 1] + 1 if i else 1, ends[i + 1]
                for end in range(low, high):
                    tried = [*ends[:i], end, *ends[i + 1 :]]
                    time_s = iteration_s(tried)
                    if time_s < least_s:
                        least_s, ends = time_s, tried
            if least_s == before_s:
                break
        best = min(best, (least_s, groups))
    return best


def _even_ends(sizes: Sequence[int], groups: int) -> list[int]:
    ends: list[int] = []
    total, so_far = sum(sizes), 0
    for i, size in enumerate(sizes):
        so_far += size
        left = groups - 1 - len(ends)
        if left and (so_far * groups >= total * (len(ends) + 1) or len(sizes) - i - 1 == left):
            ends.append(i + 1)
    return [*ends, len(sizes)]

# SPDX-License-Identifier: Apache-2.0
"""Blocking collectives on ranges of one flat tensor, over any backend's send and recv.

They call methods of the group object. The functions of torch.distributed accept only groups that
they have made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from usbyte.errors import UsageError

Bounds = Sequence[tuple[int, int]]

# Pairs and not a dict: a ReduceOp equals its RedOpType constant but has another hash.
_ACCUMULATE: list[
    tuple[dist.ReduceOp.RedOpType, Callable[[torch.Tensor, torch.Tensor], object]]
] = [
    (dist.ReduceOp.SUM, lambda into, part: into.add_(part)),
    (dist.ReduceOp.PRODUCT, lambda into, part: into.mul_(part)),
    (dist.ReduceOp.MIN, lambda into, part: torch.minimum(into, part, out=into)),
    (dist.ReduceOp.MAX, lambda into, part: torch.maximum(into, part, out=into)),
]

_NEVER_SENT = 0x3FFFFFFF  # a tag; `TorchCommunicator` draws its own from below it


def ring_reduce_scatter(
    flat: torch.Tensor,
    bounds: Bounds,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType,
    tag: int,
) -> None:
    """Reduces `flat` over the ranks; afterwards each rank has the result in its own range.

    The classic ring algorithm: each of the size - 1 rounds sends one range to the next rank while
    the range before it is received from the previous rank and accumulated. Range c is always
    accumulated in the order of ranks c + 1, c + 2, ..., c, so the result does not depend on timing.
    The other ranges are left with partial results.

    Blocks without the GIL and cannot be interrupted meanwhile, so call it from a thread other than
    the main one.

    Args:
        flat: 1-d contiguous tensor, of the same length on every rank; changed in place.
        bounds: For each rank, in elements, the half-open range it owns afterwards. Ranges may be
            empty or differ in length, and must not overlap.
        group: The ranks.
        op: SUM, PRODUCT, MIN or MAX.
        tag: At least 0; rings that are in flight at once on one group need different ones.

    Raises:
        UsageError: An argument breaks these rules.
        RuntimeError: The backend's error, for example when a peer is lost.
    """
    rank, size = _check(flat, bounds, group)
    accumulate = next((function for kind, function in _ACCUMULATE if op == kind), None)
    if accumulate is None:
        raise UsageError(
            f"ring_reduce_scatter cannot reduce with {op}: use SUM, PRODUCT, MIN or MAX"
        )
    longest = max(end - begin for begin, end in bounds)
    incoming = flat.new_empty(longest if size > 1 else 0)
    for i in range(size - 1):
        begin, end = bounds[(rank - i - 2) % size]
        received = incoming[: end - begin]
        leaving = slice(*bounds[(rank - i - 1) % size])
        _transfer(flat[leaving], (rank + 1) % size, received, (rank - 1) % size, group, tag)
        if end > begin:
            accumulate(flat[begin:end], received)


def all_gather_ranges(
    flat: torch.Tensor, bounds: Bounds, group: dist.ProcessGroup, tag: int
) -> None:
    """Fills `flat` on every rank with the range that each rank owns.

    A ring that receives in place. Gloo's all_gather copies its input and its output once more: it
    takes 115 ms, and this ring 28 ms, for 64 MB on the loopback of one machine. Rings with
    different tags can also run on one group at once and in any order; its collectives cannot.

    Blocks without the GIL and cannot be interrupted meanwhile, so call it from a thread other than
    the main one.

    Args:
        flat: 1-d contiguous tensor, of the same length on every rank; changed in place.
        bounds: For each rank, in elements, the half-open range it contributes. Ranges may be empty
            or differ in length, and must not overlap. Elements outside of all ranges do not change.
        group: The ranks.
        tag: At least 0; rings that are in flight at once on one group need different ones.

    Raises:
        UsageError: An argument breaks these rules.
        RuntimeError: The backend's error, for example when a peer is lost.
    """
    rank, size = _check(flat, bounds, group)
    for i in range(size - 1):
        leaving = slice(*bounds[(rank - i) % size])
        coming = slice(*bounds[(rank - i - 1) % size])
        _transfer(flat[leaving], (rank + 1) % size, flat[coming], (rank - 1) % size, group, tag)


def exchange_chunks(flat: torch.Tensor, group: dist.ProcessGroup, tag: int) -> None:
    """All-to-all in place: sends chunk i of `flat` to rank i and receives rank i's chunk there.

    In the k-th round each rank sends to the k-th rank after it, so no link carries more than one
    message in each direction. Gloo's all_to_all sends all messages at once; with other traffic on
    the network, some ranks then receive theirs late.

    Blocks without the GIL and cannot be interrupted meanwhile, so call it from a thread other than
    the main one.

    Args:
        flat: 1-d contiguous tensor whose length is a multiple of the number of ranks.
        group: The ranks.
        tag: At least 0; calls that are in flight at once on one group need different ones.

    Raises:
        UsageError: The tensor does not satisfy this.
        RuntimeError: The backend's error, for example when a peer is lost.
    """
    size = group.size()
    chunk, rest = divmod(flat.numel(), size)
    if rest:
        raise UsageError(
            f"{flat.numel()} elements cannot be split into {size} equal chunks, one for each rank: "
            "pad the tensor"
        )
    rank, size = _check(flat, [(r * chunk, (r + 1) * chunk) for r in range(size)], group)
    leaving = flat.clone().split(chunk or 1)
    coming = flat.split(chunk or 1)
    for distance in range(1, size if chunk else 1):
        to, source = (rank + distance) % size, (rank - distance) % size
        _transfer(leaving[to], to, coming[source], source, group, tag)


def abort(group: dist.ProcessGroup) -> None:
    """Makes operations of a Gloo group fail at once: those in flight here, and all later ones.

    Gloo closes all connections of a group when a timed wait for one of its messages times out. No
    other call of torch's interface closes them. So this waits for a moment for a message that no
    rank sends.

    Gloo can overlook an operation when it closes a connection. This was seen with sends that were
    in flight when a peer was killed. Such an operation ends only at the group's timeout; nothing
    writes to its tensors. Code that ends a thread must therefore not wait for the thread's
    operation. Only the core does, for exchanges of sparse rows.

    Other backends are not aborted; their operations end at their own timeout.

    Args:
        group: A group that nothing else uses any more.
    """
    if group.size() == 1 or not _is_gloo(group):
        return
    with suppress(RuntimeError):  # the timeout itself
        # From any rank, because the connection to a single rank may be closed already.
        never = torch.empty(1, dtype=torch.float32, device="cpu")
        group.recv_anysource([never], _NEVER_SENT).wait(timedelta(milliseconds=1))


def _is_gloo(group: dist.ProcessGroup) -> bool:
    # dist.get_backend does not know backend objects made outside of torch.distributed.
    return isinstance(group, dist.ProcessGroupGloo) or dist.get_backend(group) == "gloo"


def _transfer(
    leaving: torch.Tensor,
    to: int,
    coming: torch.Tensor,
    source: int,
    group: dist.ProcessGroup,
    tag: int,
) -> None:
    """Sends to one rank of the group and receives from another, both at once."""
    works = []
    if coming.numel():  # both ranks know the ranges, so empty ones need no message
        works.append(group.recv([coming], source, tag))
    if leaving.numel():
        works.append(group.send([leaving], to, tag))
    for work in works:
        work.wait()


def _check(flat: torch.Tensor, bounds: Bounds, group: dist.ProcessGroup) -> tuple[int, int]:
    rank, size = group.rank(), group.size()
    if flat.dim() != 1 or not flat.is_contiguous():
        raise UsageError(
            f"a ring needs a 1-d contiguous tensor, not one of shape {list(flat.shape)} and "
            f"stride {list(flat.stride())}: pass tensor.contiguous().view(-1)"
        )
    if len(bounds) != size:
        raise UsageError(f"a ring over {size} ranks needs {size} ranges, not {len(bounds)}")
    reached = 0
    for begin, end in sorted((b, e) for b, e in bounds if b != e):
        if begin < reached or end < begin or end > flat.numel():
            raise UsageError(
                f"range [{begin}, {end}) overlaps another range or leaves the tensor's "
                f"{flat.numel()} elements"
            )
        reached = end
    return rank, size

"""Eager operations on tensors: what each tells the other ranks, and what it runs.

Every function returns a `Request`. Inputs are read when the operation runs, so they must not be
changed before it has been synchronized. Tensors that are not contiguous or not on the CPU are
staged through a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from usbyte.errors import UsageError
from usbyte.torch.collectives import abort, all_gather_ranges, ring_reduce_scatter
from usbyte.torch.handles import Request
from usbyte.torch.matching import Descriptor, Verdict
from usbyte.torch.reduction import ReduceOp, check_reducible, reduce_flat

_TAG = 0  # of rings; the queue runs one operation at a time

Factors = tuple[float, float]


class Peers:
    """The ranks of an operation.

    Args:
        group: Process group with a CPU backend; unused where `size` is 1.
        rank: This rank in the group.
        size: Number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._work: Any = None

    def wait(self, work: Any) -> None:
        """Waits for a collective of the group, without the GIL."""
        self._work = work
        work.wait()

    def abort(self) -> None:
        """Ends the collective that is running, on this rank and on those that wait for it."""
        with suppress(RuntimeError, ValueError, AssertionError):  # destroyed by the user meanwhile
            abort(self.group)

    def close(self) -> None:
        """Gives up the group.

        Its destructor joins Gloo's threads, in older torch with the GIL held. A thread that just
        then drops the last reference to a tensor of its collective would need the GIL, so the last
        collective is kept until the group is gone.
        """
        group = self.group
        del self.group
        if self.size > 1:
            with suppress(RuntimeError, ValueError, AssertionError):  # destroyed by the user before
                dist.destroy_process_group(group)
        del group
        self._work = None


def allreduce(
    peers: Peers,
    name: str,
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    factors: Factors = (1.0, 1.0),
    in_place: bool = False,
) -> Request:
    """Reduces tensors elementwise, those of one dtype together. The result is a list of tensors."""
    what = f"allreduce '{name}'"
    for tensor in tensors:
        check_reducible(what, tensor.dtype, op)
    staged = [_staged(what, t, copy=not in_place) for t in tensors]

    def reduce(flat: torch.Tensor) -> None:
        def collective(numbers: torch.Tensor, kind: dist.ReduceOp.RedOpType) -> None:
            if peers.size > 1 and numbers.numel():
                peers.wait(dist.all_reduce(numbers, kind, group=peers.group, async_op=True))

        reduce_flat(flat, op, factors, peers.size, collective)

    def execute(_: Verdict) -> None:
        for dtype in dict.fromkeys(t.dtype for t in staged):
            alike = [t for t in staged if t.dtype == dtype]
            if len(alike) == 1:
                reduce(_flat(alike[0]))
                continue
            flat = torch.cat([_flat(t) for t in alike])
            reduce(flat)
            for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def finish(_: None) -> list[torch.Tensor]:
        if not in_place:
            return [s.to(t.device) for s, t in zip(staged, tensors, strict=True)]
        return [_delivered(s, t) for s, t in zip(staged, tensors, strict=True)]

    return Request(
        name, _describe(peers, "allreduce", tensors, op=op.value, factors=factors), execute, finish
    )


def allgather(peers: Peers, name: str, tensor: torch.Tensor) -> Request:
    """Concatenates along the first dimension, whose length may differ by rank.

    A scalar counts as one row. The result is a pair: the rows of all ranks, and a list of how many
    each rank gave.
    """
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    staged = _staged(f"allgather '{name}'", rows, copy=False)

    def execute(verdict: Verdict) -> tuple[torch.Tensor, list[int]]:
        out = staged.new_empty(sum(verdict.sizes), *rows.shape[1:])
        gather_bytes(peers, _bytes(staged), _bytes(out), _row_bytes(rows), verdict.sizes)
        return out, list(verdict.sizes)

    def finish(value: tuple[torch.Tensor, list[int]]) -> tuple[torch.Tensor, list[int]]:
        return value[0].to(tensor.device), value[1]

    return Request(name, _describe(peers, "allgather", [rows]), execute, finish)


def broadcast(
    peers: Peers, name: str, tensor: torch.Tensor, root: int, in_place: bool = False
) -> Request:
    """Gives every rank the root's tensor."""
    what = f"broadcast '{name}'"
    _check_root(what, peers, root)
    staged = _staged(what, tensor, copy=not in_place)

    def execute(_: Verdict) -> torch.Tensor:
        broadcast_flat(peers, _bytes(staged), root)
        return staged

    def finish(value: torch.Tensor) -> torch.Tensor:
        return _delivered(value, tensor) if in_place else value.to(tensor.device)

    return Request(name, _describe(peers, "broadcast", [tensor], root=root), execute, finish)


def reducescatter(
    peers: Peers,
    name: str,
    tensor: torch.Tensor,
    op: ReduceOp,
    factors: Factors = (1.0, 1.0),
) -> Request:
    """Reduces elementwise; each rank keeps its `shares` of the first dimension."""
    what = f"reducescatter '{name}'"
    check_reducible(what, tensor.dtype, op)
    if tensor.dim() == 0:
        raise UsageError(f"{what} needs a first dimension to scatter; the tensor has none")
    staged = _staged(what, tensor, copy=True)
    rows = shares(tensor.shape[0], peers.size)

    def execute(_: Verdict) -> torch.Tensor:
        def collective(numbers: torch.Tensor, kind: dist.ReduceOp.RedOpType) -> None:
            row = numbers.numel() // max(tensor.shape[0], 1)
            if peers.size > 1:
                bounds = [(begin * row, end * row) for begin, end in rows]
                ring_reduce_scatter(numbers, bounds, peers.group, kind, _TAG)

        reduce_flat(_flat(staged), op, factors, peers.size, collective)
        return staged[slice(*rows[peers.rank])].clone()

    return Request(
        name,
        _describe(peers, "reducescatter", [tensor], op=op.value, factors=factors),
        execute,
        lambda share: share.to(tensor.device),
    )


def alltoall(
    peers: Peers, name: str, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None
) -> Request:
    """Sends the r-th run of rows to rank r.

    The result is a pair: the rows received, and how many came from each rank.
    """
    what = f"alltoall '{name}'"
    sent = _checked_splits(what, tensor, splits, peers.size)
    staged = _staged(what, tensor, copy=False)

    def execute(verdict: Verdict) -> tuple[torch.Tensor, torch.Tensor]:
        out = staged.new_empty(sum(verdict.sizes), *tensor.shape[1:])
        row = _row_bytes(tensor)
        if peers.size > 1:
            work = dist.all_to_all_single(
                _bytes(out),
                _bytes(staged),
                [n * row for n in verdict.sizes],
                [n * row for n in sent],
                group=peers.group,
                async_op=True,
            )
            peers.wait(work)
        else:
            out.copy_(staged)
        return out, torch.tensor(verdict.sizes, dtype=torch.int32)

    def finish(value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, received = value
        if isinstance(splits, torch.Tensor):
            received = received.to(splits)
        return rows.to(tensor.device), received

    return Request(name, _describe(peers, "alltoall", [tensor], splits=sent), execute, finish)


def barrier(peers: Peers, name: str) -> Request:
    """Ends when every rank has come to it."""

    def execute(_: Verdict) -> None:
        # Not for the verdict's sake: a rank that leaves after it may take the store with it, so all
        # must have read it.
        if peers.size > 1:
            peers.wait(dist.all_reduce(torch.zeros(1), group=peers.group, async_op=True))

    return Request(name, Descriptor(peers.rank, "barrier"), execute)


def allgather_bytes(peers: Peers, name: str, payload: bytes) -> Request:
    """Gathers a byte string from every rank. The result is a list of bytes, in rank order."""
    mine = _tensor_of(payload)

    def execute(verdict: Verdict) -> list[bytes]:
        out = mine.new_empty(sum(verdict.sizes))
        gather_bytes(peers, mine, out, 1, verdict.sizes)
        return [part.numpy().tobytes() for part in out.split(list(verdict.sizes))]

    return Request(name, _describe(peers, "allgather", [mine]), execute)


def broadcast_bytes(peers: Peers, name: str, payload: bytes, root: int) -> Request:
    """Gives every rank the root's byte string; the payloads of the others are ignored."""
    _check_root(f"broadcast '{name}'", peers, root)
    mine = _tensor_of(payload)

    def execute(verdict: Verdict) -> bytes:
        flat = mine if peers.rank == root else mine.new_empty(verdict.sizes[0])
        broadcast_flat(peers, flat, root)
        return flat.numpy().tobytes()

    return Request(name, _describe(peers, "broadcast_bytes", [mine], root=root), execute)


def shares(rows: int, size: int) -> list[tuple[int, int]]:
    """Half-open ranges that split `rows` over ranks, the first rows % size with one row more."""
    base, more = divmod(rows, size)
    return list(pairwise(accumulate((base + (r < more) for r in range(size)), initial=0)))


def gather_bytes(
    peers: Peers, mine: torch.Tensor, out: torch.Tensor, row: int, rows: Sequence[int]
) -> None:
    """Fills `out` (1-d uint8) with every rank's `mine`, of rows[rank] * row bytes."""
    bounds = list(pairwise(accumulate((n * row for n in rows), initial=0)))
    out[slice(*bounds[peers.rank])] = mine
    if peers.size > 1:
        all_gather_ranges(out, bounds, peers.group, _TAG)


def broadcast_flat(peers: Peers, flat: torch.Tensor, root: int) -> None:
    """Overwrites `flat` (1-d uint8) with the root's."""
    if peers.size > 1 and flat.numel():
        source = dist.get_global_rank(peers.group, root)
        peers.wait(dist.broadcast(flat, source, group=peers.group, async_op=True))


def _describe(peers: Peers, kind: str, tensors: Sequence[torch.Tensor], **more: Any) -> Descriptor:
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors]
    return Descriptor(peers.rank, kind, dtypes, [list(t.shape) for t in tensors], **more)


def _staged(what: str, tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """The values as a contiguous CPU tensor without autograd; the same memory unless `copy`."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UsageError(
            f"{what} needs a dense tensor with data, not one of layout {tensor.layout} on "
            f"{tensor.device}: convert it with to_dense() or dequantize() before"
        )
    if hasattr(tensor, "to_local"):
        raise UsageError(f"{what} cannot take a {type(tensor).__name__}: pass tensor.to_local()")
    plain = tensor.detach().resolve_conj().resolve_neg()
    moved = plain.to("cpu").contiguous()
    shared = moved.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return moved.clone() if copy and shared else moved


def _delivered(staged: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Writes a result into the tensor the user passed, where it is not already there."""
    if staged.data_ptr() != target.data_ptr() or staged.device != target.device:
        target.detach().copy_(staged)
    return target


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as 1-d uint8, which moves whatever the dtype."""
    return _flat(tensor).view(torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in one dimension, over the same memory."""
    # view(-1) keeps odd strides of tensors with one element, which view(dtype) then refuses.
    return tensor.as_strided((tensor.numel(),), (1,))


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _tensor_of(payload: bytes) -> torch.Tensor:
    if not payload:  # which frombuffer refuses
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _check_root(what: str, peers: Peers, root: int) -> None:
    if not 0 <= root < peers.size:
        raise UsageError(f"{what}: root rank {root} is not one of the {peers.size} ranks")


def _checked_splits(
    what: str, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, size: int
) -> list[int]:
    if tensor.dim() == 0:
        raise UsageError(f"{what} needs a first dimension to split; the tensor has none")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise UsageError(
                f"{what}: {rows} rows do not split evenly over {size} ranks: pass splits"
            )
        return [rows // size] * size
    counts = [int(n) for n in splits]
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise UsageError(
            f"{what}: splits {counts} must be {size} numbers, one for each rank, that add up to "
            f"the tensor's {rows} rows"
        )
    return counts

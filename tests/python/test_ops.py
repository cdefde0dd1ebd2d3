# SPDX-License-Identifier: Apache-2.0
"""Values and gradients of the public collectives against references, with real processes."""

import itertools

import numpy as np
import pytest
import torch

import usbyte.torch as ub
from _eager import eager, same
from _ranks import run_ranks
from usbyte.errors import UsageError
from usbyte.torch.compression.codecs import Compression
from usbyte.torch.eager import transfers

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
SHAPES = [(), (0,), (5,), (3, 4), (2, 0, 3)]


def everyones(size, shape, dtype, seed=0):
    """Each rank's tensor, known to all; small numbers, so that sums and products are exact."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 3, (size, *shape), generator=generator)
    return list((raw > 0) if dtype == torch.bool else raw.to(dtype))


def _reduced(inputs, op):
    stacked = torch.stack(inputs)
    if stacked.dtype == torch.bool:
        return stacked.any(0) if op in (ub.Sum, ub.Max) else stacked.all(0)
    if op == ub.Sum:
        return stacked.sum(0, dtype=stacked.dtype)
    if op == ub.Average:
        total = stacked.sum(0, dtype=stacked.dtype)
        exact = stacked.is_floating_point() or stacked.is_complex()
        return total / len(inputs) if exact else total // len(inputs)
    if op == ub.Product:
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amin(0) if op == ub.Min else stacked.amax(0)


def _all_reductions(rank, size, device):
    every = [ub.Average, ub.Sum, ub.Min, ub.Max, ub.Product]
    allowed = {t: every for t in FLOATS + INTEGERS}
    allowed |= {t: [ub.Average, ub.Sum] for t in COMPLEX} | {torch.bool: every[1:]}
    for (dtype, kinds), shape in itertools.product(allowed.items(), SHAPES):
        for op in kinds if shape == (3, 4) else kinds[:1]:
            inputs = everyones(size, shape, dtype)
            if op == ub.Average and dtype in FLOATS + COMPLEX:
                inputs = [its * size for its in inputs]  # each is divided, and stays exact
            mine = inputs[rank].to(device)
            expected = _reduced(inputs, op)
            same(ub.allreduce(mine, op=op), expected)
            same(mine, inputs[rank])
            if shape:
                share = slice(*transfers.shares(shape[0], size)[rank])
                same(ub.reducescatter(mine, op=op), expected[share])
            assert ub.allreduce_(mine, op=op) is mine
            same(mine, expected)


def _nan_stays(rank, size, device):
    for dtype, op, owner in itertools.product(FLOATS, (ub.Min, ub.Max), range(size)):
        mine = torch.ones(size, 2, dtype=dtype, device=device)
        if rank == owner:
            mine[:, 0] = torch.nan
        for reduced in (ub.allreduce(mine, op=op), ub.reducescatter(mine, op=op)):
            assert reduced.isnan().tolist() == [[True, False]] * len(reduced), (dtype, op, owner)


def _scaled_and_grouped(rank, size, device):
    mine = torch.full((4,), float(rank + 1), device=device)
    total = size * (size + 1) / 2
    scaled = ub.allreduce(mine, op=ub.Sum, prescale_factor=0.5, postscale_factor=3.0)
    same(scaled, torch.full((4,), total * 1.5))
    ints = ub.allreduce(torch.full((2,), 3, device=device), op=ub.Sum, prescale_factor=0.5)
    same(ints, torch.full((2,), size))  # 1.5 is truncated before the sum
    same(ub.allreduce(mine), torch.full((4,), total / size))
    with pytest.warns(FutureWarning, match="op=Sum"):
        same(ub.allreduce(mine, average=False), torch.full((4,), total))

    mixed = [mine, torch.ones(2, 2, dtype=torch.int64, device=device), mine.double(), mine * 2]
    expected = [mine.cpu() * 0 + total, torch.full((2, 2), size), total + torch.zeros(4).double()]
    expected.append(mine.cpu() * 0 + total * 2)
    for actual, wanted in zip(ub.grouped_allreduce(mixed, op=ub.Sum), expected, strict=True):
        same(actual, wanted)
    transposed = torch.arange(6.0, device=device).view(2, 3).t()
    group = [transposed, mine.clone()]
    results = ub.grouped_allreduce_(group, op=ub.Sum)
    assert all(a is b for a, b in zip(results, group, strict=True))
    same(transposed, torch.arange(6.0).view(2, 3).t() * size)
    same(group[1], expected[0])
    handle = ub.grouped_allreduce_async([mine, mine], op=ub.Max)
    same(ub.synchronize(handle)[1], torch.full((4,), float(size)))

    class Halves:
        def compress(self, tensor):
            return tensor.half(), tensor.dtype

        def decompress(self, tensor, ctx):
            return tensor.to(ctx)

    same(ub.allreduce(mine, compression=Halves(), op=ub.Sum), expected[0])
    for codec in [Compression.none, Compression.fp16, Compression.bf16, None]:
        group = [mine, torch.full((size,), 1 + 2.0**-12, device=device), mine.int()]
        kept = {Compression.fp16: 1.0, Compression.bf16: 1.0}.get(codec, 1 + 2.0**-12)
        sums = ub.grouped_allreduce(group, compression=codec, op=ub.Sum)
        same(sums[1], torch.full((size,), kept * size))
        same(sums[2], expected[0].int())
        shares = ub.grouped_reducescatter(group[1:2], compression=codec, op=ub.Sum)
        same(shares[0], torch.full((1,), kept * size))


def _moves(rank, size, device):
    every = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.int16, torch.float8_e5m2]
    for dtype, shape in itertools.product(every, SHAPES):
        inputs = everyones(size, shape, dtype)
        mine = inputs[rank].to(device)
        bytewise = dtype == torch.float8_e5m2  # which torch.equal does not know

        def agree(actual, expected, bytewise=bytewise):
            if bytewise:
                assert actual.shape == expected.shape
                actual, expected = (t.contiguous().view(torch.uint8) for t in (actual, expected))
            same(actual, expected)

        for root in range(size):
            agree(ub.broadcast(mine, root), inputs[root])
        target = mine.clone()
        assert ub.broadcast_(target, size - 1) is target
        agree(target, inputs[-1])

        rows = [t.reshape(1) if t.dim() == 0 else t for t in inputs]
        agree(ub.allgather(mine), torch.cat(rows))
        if shape:  # each rank another number of rows, rank 0 none
            uneven = [t[:1].expand(r if shape[0] else 0, *shape[1:]) for r, t in enumerate(inputs)]
            agree(ub.allgather(uneven[rank].to(device)), torch.cat(uneven))


def _grouped(rank, size, device):
    """Groups of all dtypes and shapes at once: as one by one."""
    dtypes = [*FLOATS, *INTEGERS, *COMPLEX]
    everyone = [everyones(size, shape, dtype) for dtype in dtypes for shape in SHAPES]
    mine = [inputs[rank].to(device) for inputs in everyone]
    for actual, tensor in zip(ub.grouped_allgather(mine), mine, strict=True):
        same(actual, ub.allgather(tensor).cpu())
    rows = [tensor for tensor in mine if tensor.dim()]
    for op in [ub.Sum, ub.Average]:
        shares = ub.grouped_reducescatter(rows, op=op, prescale_factor=2.0)
        for actual, tensor in zip(shares, rows, strict=True):
            same(actual, ub.reducescatter(tensor, op=op, prescale_factor=2.0).cpu())
    uneven = [torch.full((rank, 2), rank), torch.full((size - rank,), rank), torch.tensor(rank)]
    counts = [torch.arange(size), torch.arange(size, 0, -1), torch.ones(size, dtype=torch.int64)]
    handle = ub.grouped_allgather_async([tensor.to(device) for tensor in uneven])
    for actual, count in zip(ub.synchronize(handle), counts, strict=True):
        same(actual.reshape(sum(count), -1)[:, 0], torch.arange(size).repeat_interleave(count))
    handle = ub.grouped_reducescatter_async([torch.ones(size), torch.ones(2 * size, 3)], op=ub.Sum)
    same(ub.synchronize(handle)[1], torch.full((2, 3), float(size)))
    same(ub.synchronize(ub.reducescatter_async(torch.ones(size))), torch.ones(1))
    assert ub.grouped_allreduce([]) == ub.grouped_allgather([]) == []


def _sparse(rank, size, device):
    """Ranks have some places in common and some of their own; rank 0 has none."""
    for dtype, dense_shape in itertools.product([torch.float32, torch.int64], [(), (2,)]):
        shape = (3, 5, *dense_shape)
        everyone = [
            torch.sparse_coo_tensor(
                torch.tensor([[1] * r, list(range(r))], dtype=torch.int64),
                torch.full((r, *dense_shape), 1 + r, dtype=dtype),
                shape,
            )
            for r in range(size)
        ]
        mine = everyone[rank].to(device)
        total = sum(tensor.to_dense() for tensor in everyone)
        same(ub.allreduce(mine, op=ub.Sum).to_dense(), total)
        handle = ub.sparse_allreduce_async(mine, name="rows", op=ub.Sum)
        same(handle().to_dense(), total)
        assert ub.poll(handle)
        same(ub.synchronize(handle).to_dense(), total)
    half = ub.allreduce_async(mine.float(), op=ub.Average, prescale_factor=0.5)
    # Values are divided before they are added up.
    torch.testing.assert_close(ub.synchronize(half).to_dense().cpu(), total.float() / 2 / size)
    packed = ub.allreduce(mine.float(), op=ub.Sum, compression=Compression.fp16)
    same(packed.to_dense(), total.float())


def _exchanges(rank, size, device):
    for dtype in [torch.float32, torch.bool, torch.int16]:
        # Row j of rank r's block for rank d is (r, d, j).
        def block(r, d, n, dtype=dtype):
            return torch.tensor([[r, d, j] for j in range(n)]).reshape(n, 3).to(dtype)

        sent = torch.cat([block(rank, d, 2) for d in range(size)]).to(device)
        received = torch.cat([block(r, rank, 2) for r in range(size)])
        same(ub.alltoall(sent), received)

        count = [[(r * d) % 3 for d in range(size)] for r in range(size)]
        sent = torch.cat([block(rank, d, count[rank][d]) for d in range(size)]).to(device)
        rows, counts = ub.alltoall(sent, splits=torch.tensor(count[rank]))
        same(rows, torch.cat([block(r, rank, count[r][rank]) for r in range(size)]))
        same(counts, torch.tensor([count[r][rank] for r in range(size)]))
        rows, counts = ub.synchronize(ub.alltoall_async(torch.empty(0, 3), [0] * size))
        assert rows.shape == (0, 3)
        assert counts.tolist() == [0] * size


def close(actual, expected):
    """Averages over three ranks are rounded, as each rank's part is divided first."""
    torch.testing.assert_close(actual.cpu(), expected)


def _gradients(rank, size, device):
    weight = torch.arange(4.0, device=device) + rank
    mean = torch.arange(4.0) + (size - 1) / 2

    def gradient(function, tensor, weights=None):
        leaf = tensor.clone().to(device).requires_grad_()
        out = function(leaf)
        (out * (weight if weights is None else weights)).sum().backward()
        return leaf.grad

    ones = torch.ones(4)
    close(gradient(ub.allreduce, ones), mean)
    close(gradient(lambda t: ub.allreduce(t, op=ub.Sum), ones), mean * size)
    scaled = gradient(lambda t: ub.allreduce(t, op=ub.Sum, postscale_factor=2.0), ones)
    close(scaled, mean * size * 2)
    close(gradient(lambda t: ub.grouped_allreduce([t, t * 2])[1], ones), mean * 2)
    zero = torch.zeros(4)
    close(gradient(lambda t: ub.broadcast(t, 1), ones), mean if rank == 1 else zero)

    def of_group(function, **more):
        def second(t):
            return function([t * 2, t * 3, torch.ones(size, dtype=torch.int64)], **more)[1]

        return second

    close(gradient(of_group(ub.grouped_allreduce, op=ub.Sum), ones), mean * size * 3)
    rows = torch.ones(size, 2)
    weights = torch.full((1, 2), rank + 1.0, device=device)
    expected = torch.arange(1.0, size + 1)[:, None].expand(-1, 2) * 3
    close(gradient(of_group(ub.grouped_reducescatter), rows, weights), expected.contiguous())

    rows = torch.ones(rank + 1, 2)  # uneven
    total = size * (size + 1) // 2
    weights = torch.arange(total * 2.0, device=device).view(total, 2) * (rank + 1)
    begin = rank * (rank + 1) // 2
    expected = (weights.cpu() / (rank + 1))[begin : begin + rank + 1] * (size + 1) / 2
    close(gradient(ub.allgather, rows, weights), expected)
    close(gradient(of_group(ub.grouped_allgather), rows, weights), expected * 3)
    masks = [torch.ones(2, dtype=d, device=device) for d in (torch.bool, torch.int16)]
    close(gradient(lambda t: ub.grouped_allgather([*masks, t])[2], rows, weights), expected)

    rows = torch.ones(size + 1, 2)
    weights = torch.full((2 if rank == 0 else 1, 2), float(rank + 1), device=device)
    owners = torch.tensor([1.0, *range(1, size + 1)])[:, None].expand(-1, 2)
    close(gradient(ub.reducescatter, rows, weights), owners.contiguous())
    summed = gradient(lambda t: ub.reducescatter(t, op=ub.Sum), rows, weights)
    close(summed, owners * size)

    splits = [r + 1 for r in range(size)]
    rows = torch.ones(sum(splits))
    weights = torch.full((size * (rank + 1),), float(rank + 1), device=device)
    expected = torch.tensor([r + 1.0 for r in range(size) for _ in range(r + 1)])
    close(gradient(lambda t: ub.alltoall(t, splits)[0], rows, weights), expected)

    with pytest.raises(UsageError, match=r"'top\.backward': .* Max has no gradient"):
        gradient(lambda t: ub.allreduce(t, op=ub.Max, name="top"), ones)


def _changed_after_forward(rank, size, device):
    """Backward needs what an operation in place has overwritten: an error on every rank."""
    for change in (
        lambda t: ub.allreduce_(t, op=ub.Sum),
        lambda t: ub.allreduce_(t),
        lambda t: ub.grouped_allreduce_([t, t + 1], op=ub.Max),
        lambda t: ub.broadcast_(t, size - 1),
        lambda t: ub.broadcast_(t.detach(), 0),
    ):
        leaf = torch.ones(3, device=device, requires_grad=True)
        factor = torch.full((3,), rank + 2.0, device=device)
        product = (leaf * factor).sum()
        change(factor)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def _under_inference_mode(rank, size, device):
    """Metrics of a validation; whose tensors only threads in that mode may write to."""
    with torch.inference_mode():
        mine = torch.full((3,), 2.0 * rank, device=device)
        same(ub.allreduce(mine), torch.full((3,), size - 1.0))
        same(ub.allreduce(mine.long(), prescale_factor=2.0), torch.full((3,), 2 * (size - 1)))
        first, second = ub.grouped_allreduce([mine, mine + 1])
        same(first, second - 1)
        same(ub.reducescatter(torch.ones(size, 2, device=device)), torch.ones(1, 2))
        assert ub.broadcast(mine, 1)[0] == 2
        assert ub.allgather(mine).shape == (3 * size,)
    ub.allreduce_(mine)
    same(mine, torch.full((3,), size - 1.0))


def _numbers_of_any_kind(rank, size, device):
    mine = torch.full((2,), float(rank), device=device)
    for root in (np.int64(1), torch.tensor(1), True):
        same(ub.broadcast(mine, root), torch.ones(2))
    for factor in (np.float32(0.5), torch.tensor(0.5), 0.5):
        halves = torch.full((2,), (size - 1) / 4)
        same(ub.allreduce(mine, prescale_factor=factor), halves)
        same(ub.reducescatter(mine.repeat(size), postscale_factor=factor), halves)
    rows, _ = ub.alltoall(torch.ones(size, device=device), np.ones(size, dtype=np.int32))
    assert len(rows) == size
    empty = torch.ones(2, 0, 1, 1, device=device).to(memory_format=torch.channels_last)
    assert ub.allreduce_(empty) is empty  # its strides are those of elements that share memory
    refused = [
        ("a whole number, not 0.5", lambda: ub.broadcast(mine, 0.5)),
        ("a number, not '2'", lambda: ub.allreduce(mine, prescale_factor="2")),
        ("must be a string of .* UTF-8, not 5", lambda: ub.allreduce(mine, name=5)),
        ("4096 bytes of UTF-8", lambda: ub.allreduce(mine, name="x" * 4097)),
        ("4096 bytes of UTF-8", lambda: ub.broadcast(mine, 0, "\ud800")),
        ("a whole number, not 1.7", lambda: ub.alltoall(mine, [1.7, *[0] * (size - 1)])),
        ("one dimension", lambda: ub.alltoall(mine, torch.ones(1, size, dtype=torch.int64))),
        ("share memory", lambda: ub.allreduce_(torch.ones(1, device=device).expand(3))),
        ("share memory", lambda: ub.broadcast_(torch.ones(1, device=device).expand(3), 0)),
    ]
    for text, call in refused:
        with pytest.raises(UsageError, match=text):
            call()


def _values(rank, size, device):
    with eager(rank, size):
        _all_reductions(rank, size, device)
        _nan_stays(rank, size, device)
        _scaled_and_grouped(rank, size, device)
        _moves(rank, size, device)
        _grouped(rank, size, device)
        _sparse(rank, size, device)
        _exchanges(rank, size, device)
        _gradients(rank, size, device)
        _changed_after_forward(rank, size, device)
        _under_inference_mode(rank, size, device)
        _numbers_of_any_kind(rank, size, device)
        ub.barrier()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 3])
def test_values_and_gradients_equal_the_references(size, device):
    run_ranks(size, _values, device, timeout=120)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        *((f"{name}{end}", ()) for name in ("allgather", "alltoall") for end in ("", "_async")),
        *((f"reducescatter{end}", ()) for end in ("", "_async")),
        *((f"allreduce{end}", ()) for end in ("", "_async", "_", "_async_")),
        *((f"broadcast{end}", (0,)) for end in ("", "_async", "_", "_async_")),
        ("sparse_allreduce_async", ("name", ub.Sum)),
    ],
)
def test_what_is_no_tensor_is_an_error(single, function, arguments):
    with pytest.raises(UsageError, match=r"takes tensors, not float: pass torch\.tensor\(value\)"):
        getattr(ub, function)(0.5, *arguments)
    grouped = getattr(ub, f"grouped_{function}", None)
    if grouped is not None:
        with pytest.raises(UsageError, match=r"grouped_.* takes tensors, not float"):
            grouped([torch.ones(1), 0.5])


@pytest.mark.parametrize("suffix", ["", "_", "_async", "_async_"])
@pytest.mark.parametrize("kind", ["allreduce", "grouped_allreduce"])
def test_the_warning_about_average_points_at_the_caller(single, kind, suffix):
    ones = torch.ones(2)
    with pytest.warns(FutureWarning, match="average= is deprecated") as caught:
        getattr(ub, kind + suffix)(ones if kind == "allreduce" else [ones], average=True)
    assert [warning.filename for warning in caught] == [__file__]

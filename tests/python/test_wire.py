# SPDX-License-Identifier: Apache-2.0
"""Objects on the wire: what arrives is what was sent, to the stride; everything else is refused."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from usbyte.errors import MismatchError, UsageError
from usbyte.torch.eager import serialization

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz" / "python"))
import fuzz_wire

NUMBERS = torch.arange(24.0)
MATRIX = NUMBERS.view(4, 6)


def sent(obj):
    return serialization.from_bytes(serialization.to_bytes(obj))


@pytest.mark.parametrize(
    "tensor",
    [
        MATRIX.t(),
        NUMBERS.view(2, 3, 4).permute(2, 0, 1),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        MATRIX[:, :3],
        MATRIX[::2, ::3],
        torch.arange(3.0)[:, None].expand(3, 5),
        torch.tensor(3.0),
        torch.ones(0, 3),
        NUMBERS[:5].as_strided((1, 5), (77, 1)),
        MATRIX.to(torch.bfloat16).t(),
        torch.linalg.qr(MATRIX @ MATRIX.t())[0],
        torch.full((2, 3), 1 + 2j).t().conj(),
    ],
)
def test_tensors_keep_their_strides(tensor):
    for found in (sent(tensor), sent({"a": [tensor]})["a"][0]):
        assert found.stride() == tensor.stride()
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    "tensor", [NUMBERS.unfold(0, 3, 1), torch.arange(2000.0).view(100, 20)[:, 3]]
)
def test_elements_that_overlap_and_large_gaps_are_not_sent(tensor):
    found = sent(tensor)
    assert torch.equal(found, tensor)
    assert found.is_contiguous()
    assert len(serialization.to_bytes(tensor)) < 4 * tensor.numel() + 200


@pytest.mark.parametrize(
    ("array", "keeps"),
    [
        (np.asfortranarray(np.arange(6.0).reshape(2, 3)), True),
        (np.arange(6)[::2], True),
        (np.arange(6)[::-1], False),
        (np.broadcast_to(np.arange(3), (2, 3)), False),
        (np.array(3.0), True),
        (np.zeros((0, 2)), True),
        (np.arange(4, dtype=np.uint16), True),
        (np.array([True, False]), True),
    ],
)
def test_arrays_keep_their_strides_where_torch_has_such(array, keeps):
    found = sent(array)
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()
    assert not keeps or found.strides == array.strides


def test_other_objects_arrive_as_they_are():
    given = [
        "\ud83d", "\udc80", "\ud83d\ude00x", "\U0001f600", {("a", 1, None, 2.5): True, 3: -0.0},
        2**2047, -(2**63), (1, [2, ()]), float("inf"), "nan",
    ]  # fmt: skip
    found = sent(given)
    assert found == given
    assert repr(found) == repr(given)
    assert sent([float("nan"), np.float32(1.5), np.int64(3)])[1:] == [1.5, 3]
    for sparse in (
        torch.eye(3).to_sparse(),
        torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 3), (2, 3)),
        torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0), (5,)),
    ):
        assert sent(sparse).is_coalesced() == sparse.is_coalesced()
        assert torch.equal(sent(sparse).to_dense(), sparse.to_dense())


class Wrapper(torch.Tensor):
    """Without memory, as DTensor and others."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32, device="cpu")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Local(Wrapper):
    def to_local(self):
        return torch.ones(3)


def without_memory():
    """Tensors that must not be read by address, and what their errors say."""
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    return [
        (Wrapper(), "Wrapper .*pass plain tensors"),
        (Local(), "Local .*to_local"),
        (freed, "memory has been freed"),
        (torch.ones(2, device="meta"), "meta device.*to_empty"),
        (torch._efficientzerotensor(3), "zeros_like"),
        (torch.nn.LazyLinear(2).weight, "UninitializedParameter .*one batch"),
        (torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), "dequantize"),
        (torch.ones(2, 2).to_sparse_csr(), "to_dense"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested.*padded"),
        (torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])), "get_data"),
    ]


def refused():
    deep, inside_itself, keyed = [], [], {}
    for _ in range(100_000):
        deep = [deep]
    inside_itself.append(inside_itself)
    keyed["x"] = keyed

    class Hashable(list):
        __hash__ = object.__hash__

    class Broken(dict):
        def items(self):
            raise KeyError("of the object's own")

    wild = torch.sparse_coo_tensor(
        torch.tensor([[10**12]]), torch.ones(1), (2,), check_invariants=False
    )
    return [
        (deep, "nested more than 100 deep"),
        (inside_itself, "contains itself"),
        (keyed, "contains itself"),
        (10**5000, "16610 bits.*hex"),
        ({float("nan"): 1}, "NaN"),
        ({(1, float("nan")): 1}, "NaN"),
        ({Hashable([1]): 2}, "is hashable here"),
        (Broken(a=1), 'KeyError: "of the object\'s own"'),
        ({1, 2}, "object is a set"),
        ({"k": [1, b"x"]}, r"object\['k'\]\[1\] is a bytes"),
        (wild, "found index 1000000000000"),
        (np.array([object()]), "array of object"),
        (np.array(1, dtype=">f4"), "byte order"),
        (np.datetime64("2020", "ns"), "datetime64"),
        (np.longdouble(1), "longdouble"),
    ]


def test_what_cannot_be_sent_is_a_usage_error():
    for obj, told in refused() + without_memory():
        with pytest.raises(UsageError, match=told):
            serialization.encode(obj)


def message(structure, content=b""):
    text = json.dumps(structure).encode()
    return len(text).to_bytes(8, "little") + text + content


def tensor(shape, strides=None, dtype="int64", device="cpu"):
    strides = [1] * len(shape) if strides is None else strides
    return {"tensor": shape, "strides": strides, "dtype": dtype, "device": device}


def sparse(index, content=b"\0\0\x80?", coalesced=True):
    parts = [tensor([1, len(index)], [len(index), 1]), tensor([len(index)], dtype="float32")]
    values = b"".join(n.to_bytes(8, "little", signed=True) for n in index)
    node = {"sparse": [2], "parts": parts, "coalesced": coalesced}
    return message(node, values + content * len(index))


def test_bytes_that_nobody_sends_are_refused():
    assert serialization.from_bytes(sparse([1])).to_dense().tolist() == [0, 1]
    nested = b'{"list": [' * 20_000 + b"]}" * 20_000
    array = {"array": [2], "strides": [1], "dtype": "int64"}
    for payload in [
        b"", b"\xff" * 8, message(None)[:-1], message(None) + b"x", message({}), message([]),
        message({"list": 3}), message({"list": [], "tuple": []}), message({"dict": [[1]]}),
        message({"dict": [[{"list": []}, 1]]}), message({"dict": [[1, 1], [1, 2]]}),
        len(nested).to_bytes(8, "little") + nested,
        message(None).replace(b"null", b"\xff\xff\xff\xff"),
        sparse([10**12]), sparse([-1]), sparse([1, 0]), sparse([0, 0]),
        message({"sparse": [2], "parts": [1, 2], "coalesced": True}),
        message(tensor([1])), message(tensor([-1]), b"12345678"), message(tensor([1], [])),
        message(tensor([1], [-1]), b"12345678"), message(tensor([1], dtype="nn"), b"12345678"),
        message(tensor([1], dtype="qint8"), b"1"), message(tensor([1], device="meta"), b"12345678"),
        message(tensor([1.0]), b"12345678"), message(tensor([True]), b"12345678"),
        message(tensor([2**62, 2**62], [0, 0]), b"12345678"),
        message(tensor([2], [2**70]), b"1234567812345678"),
        message(tensor([2], [10**9]), b"1234567812345678"),
        message(tensor([2, 2], [1, 1]), b"12345678" * 4), message(tensor([1] * 65), b"12345678"),
        message(array | {"dtype": "bfloat16"}, b"1234"), message(array | {"more": 1}, b"1" * 16),
    ]:  # fmt: skip
        with pytest.raises(MismatchError, match=r"cannot be read: (.|\n)*the same version"):
            serialization.from_bytes(payload, "what rank 1 has sent")


def test_a_device_that_this_rank_lacks_is_the_cpu():
    found = serialization.from_bytes(message(tensor([1], device="xla"), (7).to_bytes(8, "little")))
    assert found.device.type == "cpu"
    assert found.tolist() == [7]


def test_changed_messages_are_read_or_refused():
    seeds = [
        serialization.to_message(obj)
        for obj in (
            [1, 2.5, "text", None, True, {"a": (1, [2])}],
            {"w": MATRIX.t(), "e": torch.ones(1).expand(3)},
            np.asfortranarray(np.ones((2, 3))),
            torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 2), (2, 2)),
        )
    ]
    draw = random.Random(0)
    for _ in range(3000):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(data))
            kind = draw.randrange(4)
            if kind == 0:
                data[place] = draw.randrange(256)
            elif kind == 1:
                data[place : place + 1] = draw.choice([b"-", b"9", b"[", b"0", b"{", b"null", b""])
            elif kind == 2:
                del data[place : place + draw.randrange(1, 9)]
            else:
                data[place:place] = data[place : place + draw.randrange(1, 20)]
            data = data or bytearray(b"\0")
        fuzz_wire.one_input(bytes(data))

"""Objects on the wire: JSON for structure, raw bytes for tensors, never pickle."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from usbyte.errors import UsageError
from usbyte.torch.operations import bytes_of


def encode(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Splits an object into its structure and its tensors.

    Args:
        obj: None, bool, int, float, str, list, tuple, dict, torch.Tensor, numpy arrays and scalars,
            nested at will.

    Raises:
        UsageError: Anything else; the message names its type and place.
    """
    tensors: list[torch.Tensor] = []
    return json.dumps(_pack(obj, "object", tensors)).encode(), tensors


def decode(structure: bytes) -> tuple[Any, list[torch.Tensor]]:
    """Inverse of `encode`: the object, and its tensors, uninitialised, to be filled in place.

    Those of a GPU are on the current one.
    """
    tensors: list[torch.Tensor] = []
    return _unpack(json.loads(structure), tensors), tensors


def to_bytes(obj: Any) -> bytes:
    """An object, its tensors included, as one byte string.

    Raises:
        UsageError: See `encode`.
    """
    structure, tensors = encode(obj)
    parts = [len(structure).to_bytes(8, "little"), structure]
    return b"".join([*parts, *(_raw(tensor.cpu()).numpy().tobytes() for tensor in tensors)])


def from_bytes(payload: bytes) -> Any:
    """Inverse of `to_bytes`."""
    begin = 8 + int.from_bytes(payload[:8], "little")
    obj, tensors = decode(payload[8:begin])
    for tensor in tensors:
        end = begin + tensor.numel() * tensor.element_size()
        if end > begin:
            held = torch.frombuffer(bytearray(payload[begin:end]), dtype=torch.uint8)
            tensor.copy_(held.view(tensor.dtype).view(tensor.shape))
        begin = end
    return obj


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The values as 1-d uint8."""
    return bytes_of(tensor.resolve_conj().resolve_neg().contiguous())


def _pack(obj: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    if obj is None or isinstance(obj, bool | int | float | str):
        return obj
    if isinstance(obj, np.generic) and isinstance(obj.item(), bool | int | float | str):
        return obj.item()
    if isinstance(obj, list | tuple):
        kind = "list" if isinstance(obj, list) else "tuple"
        return {kind: [_pack(v, f"{where}[{k}]", tensors) for k, v in enumerate(obj)]}
    if isinstance(obj, dict):
        rows = [
            [_pack(k, f"a key of {where}", tensors), _pack(v, f"{where}[{k!r}]", tensors)]
            for k, v in obj.items()
        ]
        return {"dict": rows}
    if isinstance(obj, np.ndarray) and not isinstance(obj, np.ma.MaskedArray):
        try:
            tensors.append(torch.from_numpy(np.ascontiguousarray(obj).reshape(obj.shape)))
        except (TypeError, ValueError):
            raise UsageError(
                f"{where} is an array of {obj.dtype}, which cannot be sent; send one of numbers in "
                "this machine's byte order, or a list"
            ) from None
        return {"array": list(obj.shape), "dtype": _name(tensors[-1])}
    if isinstance(obj, torch.Tensor) and obj.layout == torch.sparse_coo and _is_basic(obj):
        parts = [obj.detach()._indices(), obj.detach()._values()]
        return {
            "sparse": list(obj.shape),
            "parts": [_pack(part, where, tensors) for part in parts],
            "coalesced": obj.is_coalesced(),
        }
    if isinstance(obj, torch.Tensor):
        plain = obj.layout == torch.strided and not obj.is_quantized and obj.device.type != "meta"
        if not plain or obj.is_nested or hasattr(obj, "to_local"):
            raise UsageError(
                f"{where} is a {type(obj).__name__} of layout {obj.layout} on {obj.device}, which "
                "cannot be sent; send a dense tensor with data, as of to_dense() or to_local()"
            )
        tensors.append(obj.detach().contiguous())
        return {"tensor": list(obj.shape), "dtype": _name(obj), "device": obj.device.type}
    raise UsageError(
        f"{where} is a {type(obj).__name__}, which cannot be sent; send numbers, strings, lists, "
        "tuples, dicts, tensors and arrays"
    )


def _unpack(node: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    if "list" in node:
        return [_unpack(v, tensors) for v in node["list"]]
    if "tuple" in node:
        return tuple(_unpack(v, tensors) for v in node["tuple"])
    if "dict" in node:
        return {_unpack(k, tensors): _unpack(v, tensors) for k, v in node["dict"]}
    if "sparse" in node:
        indices, values = (_unpack(part, tensors) for part in node["parts"])
        return torch.sparse_coo_tensor(  # of this very memory, which is filled later
            indices, values, node["sparse"],
            is_coalesced=node["coalesced"], check_invariants=False, device=values.device,
        )  # fmt: skip
    dtype = getattr(torch, node["dtype"])
    if "array" in node:
        tensors.append(torch.empty(node["array"], dtype=dtype, device="cpu"))
        return tensors[-1].numpy()
    tensors.append(torch.empty(node["tensor"], dtype=dtype, device=node["device"]))
    return tensors[-1]


def _is_basic(tensor: torch.Tensor) -> bool:
    """False for a masked tensor and the like, whose class decides what its values are."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

# SPDX-License-Identifier: Apache-2.0
"""Serializes objects for other ranks: JSON for structure, raw bytes for tensors, never pickle.

Tensors and arrays keep their strides, so that computations on them round alike on all ranks.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch

from usbyte.errors import Error, UsageError
from usbyte.torch.eager.serialized_layout import DTYPES, distinct, dtype_name, travels
from usbyte.torch.eager.serialized_reader import DEEPEST, Incoming, parse, sparse_tensor
from usbyte.torch.eager.staging import bytes_of
from usbyte.torch.runtime.messages import unreadable
from usbyte.torch.runtime.tensor_checks import flaw_of

_MOST_INT_BITS = 2048  # below Python's smallest int-to-str limit (640 digits)
_HEADER_BYTES = 8
_BYTE = torch.uint8
_SHOWN_CHARS = 160
_OBJECT, _PROBLEM = b"\0", b"\1"


def encode(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Splits an object into its structure and its tensors.

    Args:
        obj: None, bool, int, float, str, list, tuple, dict, torch.Tensor, NumPy array or NumPy
            scalar; containers may be nested up to `DEEPEST` levels.

    Returns:
        The structure as JSON, and views that contain the elements to send, in that order.

    Raises:
        UsageError: The object contains something else. The message names its type and place.
    """
    tensors: list[torch.Tensor] = []
    try:
        packed = _pack(obj, "object", tensors, 0)
        return json.dumps(packed, ensure_ascii=False).encode("utf-8", "surrogatepass"), tensors
    except Error:
        raise
    except Exception as error:  # raised by the object's own methods, for example
        raise UsageError(f"the object cannot be sent: {type(error).__name__}: {error}") from error


def decode(structure: bytes, sender: str = "another rank's object") -> Incoming:
    """Checks a structure from `encode` and allocates its tensors, which the caller fills.

    Args:
        structure: JSON that `encode` returned on another rank.
        sender: Names the message and its sender; error messages begin with it.

    Returns:
        The object. Fill its `tensors` in place, then call `finish()`.

    Raises:
        MismatchError: `encode` cannot have returned this structure.
        UsageError: There is no memory for its tensors.
    """
    incoming = parse(structure, sender)
    incoming.allocate()
    return incoming


def to_bytes(obj: Any) -> bytes:
    """Serializes an object, its tensors included, as one byte string.

    Raises:
        UsageError: The object contains a type that `encode` does not accept.
    """
    structure, tensors = encode(obj)
    parts = [len(structure).to_bytes(_HEADER_BYTES, "little"), structure]
    return b"".join([*parts, *(_raw(tensor.cpu()).numpy().tobytes() for tensor in tensors)])


def from_bytes(payload: bytes, sender: str = "another rank's object") -> Any:
    """Returns the object that `to_bytes` serialized.

    Args:
        payload: A byte string from another rank.
        sender: Names the message and its sender; error messages begin with it.

    Raises:
        MismatchError: `to_bytes` cannot have returned this byte string.
        UsageError: There is no memory for its tensors.
    """
    begin = _HEADER_BYTES + int.from_bytes(payload[:_HEADER_BYTES], "little")
    incoming = parse(payload[_HEADER_BYTES:begin], sender)
    expected = begin + sum(layout.bytes for layout in incoming.layouts)
    if expected != len(payload):
        raise unreadable(sender, f"it has {len(payload)} bytes instead of {expected}")
    incoming.allocate()
    for tensor, layout in zip(incoming.tensors, incoming.layouts, strict=True):
        if layout.bytes:
            raw = torch.frombuffer(bytearray(payload[begin : begin + layout.bytes]), dtype=_BYTE)
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
        begin += layout.bytes
    return incoming.finish()


def to_message(obj: Any) -> bytes:
    """Returns a message with the serialized object.

    If the object cannot be serialized, the message has the reason, and `open_message` raises it on
    the receiving ranks.
    """
    try:
        return _OBJECT + to_bytes(obj)
    except UsageError as error:
        return problem_message(error)


def structure_message(structure: bytes) -> bytes:
    """Returns a message with a structure, for `open_message`."""
    return _OBJECT + structure


def problem_message(problem: Exception) -> bytes:
    """Returns a message with an error, which `open_message` raises on the receiving ranks."""
    return _PROBLEM + str(problem).encode("utf-8", "backslashreplace")


def open_message(message: bytes, what: str, rank: int) -> bytes:
    """Returns the content of a message from one of the three functions above.

    Args:
        message: Byte string from another rank.
        what: Names the API call, for error messages.
        rank: Rank that sent the message.

    Raises:
        UsageError: That rank could not serialize its object.
        MismatchError: The byte string is not such a message.
    """
    kind, content = message[:1], message[1:]
    if kind == _PROBLEM:
        raise UsageError(f"{what} on rank {rank}: {content.decode('utf-8', 'replace')}")
    if kind != _OBJECT:
        raise unreadable(f"{what}: the message of rank {rank}", "it does not say what it is")
    return content


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values as 1-d uint8."""
    return bytes_of(tensor.resolve_conj().resolve_neg().contiguous())


def _pack(obj: Any, where: str, tensors: list[torch.Tensor], depth: int) -> Any:
    if obj is None or isinstance(obj, bool | float | str):
        return obj
    if isinstance(obj, int):
        if obj.bit_length() > _MOST_INT_BITS:
            raise UsageError(
                f"{where} is an integer of {obj.bit_length()} bits, and {_MOST_INT_BITS} can be "
                "sent; send it as a string, as of hex()"
            )
        return obj
    if isinstance(obj, np.generic) and isinstance(obj.item(), bool | int | float | str):
        if obj.dtype.kind not in "biufU":  # a date's number means nothing without its unit
            raise _not_sent(obj, where)
        return _pack(obj.item(), where, tensors, depth)
    if isinstance(obj, list | tuple | dict):
        if depth == DEEPEST:
            raise UsageError(
                f"{where[:_SHOWN_CHARS]}... is nested more than {DEEPEST} deep, or contains "
                "itself, which cannot be sent; send it in a flat form"
            )
        if isinstance(obj, dict):
            rows = [_pack_item(k, v, where, tensors, depth + 1) for k, v in obj.items()]
            return {"dict": rows}
        kind = "list" if isinstance(obj, list) else "tuple"
        return {kind: [_pack(v, f"{where}[{k}]", tensors, depth + 1) for k, v in enumerate(obj)]}
    if isinstance(obj, np.ndarray) and not isinstance(obj, np.ma.MaskedArray):
        return _pack_array(obj, where, tensors)
    if isinstance(obj, torch.Tensor):
        return _pack_tensor(obj, where, tensors)
    raise _not_sent(obj, where)


def _not_sent(obj: Any, where: str) -> UsageError:
    return UsageError(
        f"{where} is a {type(obj).__name__}, which cannot be sent; send numbers, strings, lists, "
        "tuples, dicts, tensors and arrays"
    )


def _pack_item(
    key: Any, value: Any, where: str, tensors: list[torch.Tensor], depth: int
) -> list[Any]:
    packed = _pack(key, f"a key of {where}", tensors, depth)
    _check_key(packed, f"a key of {where}")
    return [packed, _pack(value, f"{where}[{key!r}]", tensors, depth)]


def _check_key(packed: Any, where: str) -> None:
    """Raises UsageError for a dict key that would be unhashable or unequal after it was sent."""
    if isinstance(packed, float) and math.isnan(packed):
        raise UsageError(f"{where} is NaN, which is unequal to itself; use another key, or None")
    if not isinstance(packed, dict):
        return
    for part in packed.get("tuple", ()):
        _check_key(part, where)
    if packed.keys() & {"list", "dict", "array"}:
        raise UsageError(
            f"{where} is hashable here, but would arrive as a list, dict or array, which is not; "
            "use numbers, strings or tuples as keys"
        )


def _pack_array(obj: np.ndarray[Any, Any], where: str, tensors: list[torch.Tensor]) -> Any:
    array = np.asarray(obj)
    if not array.flags.writeable:  # torch.from_numpy warns for read-only arrays
        array = array.copy(order="K")
    try:
        if min(array.strides, default=0) < 0 or any(s % array.itemsize for s in array.strides):
            # Torch has no negative strides, and none that are not a multiple of the element size.
            array = np.ascontiguousarray(array).reshape(array.shape)
        tensor = torch.from_numpy(array)
    except (TypeError, ValueError, ZeroDivisionError):
        raise UsageError(
            f"{where} is an array of {obj.dtype}, which cannot be sent; send one of numbers in "
            "this machine's byte order, or a list"
        ) from None
    strides = _add_tensor(tensor, tensors)
    return {"array": list(obj.shape), "strides": strides, "dtype": dtype_name(tensor)}


def _pack_tensor(obj: torch.Tensor, where: str, tensors: list[torch.Tensor]) -> Any:
    if found := flaw_of(obj, or_sparse=True):
        flaw, remedy = found
        raise UsageError(
            f"{where} is a {type(obj).__name__} {flaw}, which cannot be sent; {remedy}"
        )
    if obj.layout == torch.sparse_coo:
        parts = [obj.detach()._indices(), obj.detach()._values()]
        try:
            sparse_tensor(parts[0], parts[1], obj.shape, obj.is_coalesced())
        except RuntimeError as error:
            raise UsageError(
                f"{where} is an invalid sparse tensor: {str(error).splitlines()[0]}; make it "
                "with check_invariants=True to see where that comes from"
            ) from error
        return {
            "sparse": list(obj.shape),
            "parts": [_pack_tensor(part, where, tensors) for part in parts],
            "coalesced": obj.is_coalesced(),
        }
    if obj.dtype not in DTYPES.values():
        raise UsageError(f"{where} is a tensor of {obj.dtype}, which cannot be sent; convert it")
    strides = _add_tensor(obj.detach(), tensors)
    return {
        "tensor": list(obj.shape),
        "strides": strides,
        "dtype": dtype_name(obj),
        "device": obj.device.type,
    }


def _add_tensor(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> list[int]:
    """Appends the tensor's elements to `tensors`; returns its strides on the receiving ranks."""
    if not travels(tensor.shape, tensor.stride()):
        tensor = tensor.clone()  # removes gaps and keeps the order of dimensions
    if not travels(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    tensors.append(distinct(tensor))
    return list(tensor.stride())

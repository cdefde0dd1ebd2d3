# SPDX-License-Identifier: Apache-2.0
"""Reads serialized objects of other ranks: checks their structure and rebuilds them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from usbyte.errors import Error, UsageError
from usbyte.torch.eager.serialized_layout import DTYPES, Layout, distinct, travels
from usbyte.torch.runtime.messages import check, unreadable

#: Most levels of nested containers; each takes a few frames of Python's stack.
DEEPEST = 100
_MOST_DIMS = 64


@dataclass(frozen=True)
class _TensorNode:
    tensor: list[int]
    strides: list[int]
    dtype: str
    device: str


@dataclass(frozen=True)
class _ArrayNode:
    array: list[int]
    strides: list[int]
    dtype: str


@dataclass(frozen=True)
class _SparseNode:
    sparse: list[int]
    parts: tuple[Any, Any]
    coalesced: bool


class Incoming:
    """An object from another rank whose tensors have not been received yet.

    Call `allocate`, fill `tensors`, then call `finish`.

    Args:
        root: The structure, as `json.loads` returned it.
        sender: Names the message and its sender; error messages begin with it.

    Attributes:
        layouts: Layouts of the object's tensors, in the order in which they are sent.
        tensors: Views of the object's tensors that the caller fills before `finish`; empty before
            `allocate`.
    """

    def __init__(self, root: Any, sender: str) -> None:
        self._root, self._sender = root, sender
        self.layouts: list[Layout] = []
        self.tensors: list[torch.Tensor] = []
        self._whole: list[torch.Tensor] = []
        self._scan(root, 0)

    def allocate(self) -> None:
        """Allocates the object's tensors.

        Raises:
            UsageError: A tensor cannot be allocated.
        """
        for layout in self.layouts:
            try:
                self._whole.append(layout.empty())
            except Exception as error:  # torch raises various types for an unknown device, too
                reason = str(error).partition("\n")[0]
                raise UsageError(
                    f"{self._sender}: no tensor of shape {layout.shape} can be made on "
                    f"'{layout.device}': {reason}"
                ) from error
        self.tensors = [distinct(tensor) for tensor in self._whole]

    def finish(self) -> Any:
        """Returns the object. Call it after its tensors have been filled.

        Raises:
            MismatchError: The object is invalid, for example a sparse tensor whose indices are out
                of range.
        """
        try:
            return self._build(self._root, iter(self._whole))
        except (TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, Error):
                raise
            raise unreadable(self._sender, str(error).splitlines()[0]) from error

    def _scan(self, node: Any, depth: int) -> None:
        """Checks the structure and collects the layouts."""
        if node is None or type(node) in (bool, int, float, str):
            return
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        if type(node) is not dict:
            raise ValueError(f"it contains a {type(node).__name__}, which usbyte never sends")
        for part in self._parts_of(node):
            self._scan(part, depth + 1)

    def _parts_of(self, node: dict[str, Any]) -> list[Any]:
        if node.keys() == {"list"} or node.keys() == {"tuple"}:
            return check(node.get("list", node.get("tuple")), list[Any])
        if node.keys() == {"dict"}:
            return [part for row in check(node["dict"], list[tuple[Any, Any]]) for part in row]
        if "sparse" in node:
            parts = list(check(node, _SparseNode).parts)
            if any(type(part) is not dict or "tensor" not in part for part in parts):
                raise ValueError("a sparse tensor is made of two tensors")
            return parts
        if "array" in node:
            array = check(node, _ArrayNode)
            self._add(array.array, array.strides, array.dtype, "cpu")
        else:
            tensor = check(node, _TensorNode)
            self._add(tensor.tensor, tensor.strides, tensor.dtype, tensor.device)
        return []

    def _add(self, shape: list[int], strides: list[int], dtype: str, device: str) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"'{dtype:.80}' is not a dtype that can be sent")
        if not device.isalpha() or not device.isascii() or device == "meta":
            raise ValueError(f"'{device:.80}' is not a device type that can be sent")
        if len(shape) != len(strides) or len(shape) > _MOST_DIMS:
            raise ValueError(f"{len(shape)} sizes with {len(strides)} strides")
        if min(shape, default=0) < 0 or min(strides, default=0) < 0:
            raise ValueError("a negative size or stride")
        # Torch and NumPy count bytes in int64, and an element has up to 16 bytes.
        if math.prod(filter(None, shape)) >= 1 << 58 or sum(strides) >= 1 << 58:
            raise ValueError(f"shape {shape} and strides {strides} are too large")
        if not travels(shape, strides):
            raise ValueError(f"strides {strides} of shape {shape} cannot be sent")
        self.layouts.append(Layout(shape, strides, DTYPES[dtype], device))

    def _build(self, node: Any, filled: Iterator[torch.Tensor]) -> Any:
        if type(node) is not dict:
            return node
        if "list" in node:
            return [self._build(v, filled) for v in node["list"]]
        if "tuple" in node:
            return tuple([self._build(v, filled) for v in node["tuple"]])
        if "dict" in node:
            made = {self._build(k, filled): self._build(v, filled) for k, v in node["dict"]}
            if len(made) != len(node["dict"]):
                raise ValueError("a dict has a key twice")
            return made
        if "sparse" in node:
            indices, values = (self._build(part, filled) for part in node["parts"])
            return sparse_tensor(indices, values, node["sparse"], node["coalesced"])
        tensor = next(filled)
        return tensor.numpy() if "array" in node else tensor


def parse(structure: bytes, sender: str) -> Incoming:
    """Parses and checks a structure; allocates no tensors.

    Args:
        structure: JSON in UTF-8.
        sender: Names the message and its sender; error messages begin with it.

    Raises:
        MismatchError: usbyte does not send such a structure.
    """
    try:
        return Incoming(json.loads(structure.decode("utf-8", "surrogatepass")), sender)
    except (ValueError, RecursionError) as error:
        raise unreadable(sender, error) from error


def sparse_tensor(
    indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], coalesced: bool
) -> torch.Tensor:
    """Makes a sparse COO tensor that shares memory with `indices` and `values`.

    Raises:
        RuntimeError: The tensor is invalid, for example because an index is out of range.
    """
    return torch.sparse_coo_tensor(
        indices,
        values,
        list(shape),
        is_coalesced=coalesced,
        check_invariants=True,
        device=values.device,
    )

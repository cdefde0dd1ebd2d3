# SPDX-License-Identifier: Apache-2.0
"""Tensors of a profile: their layout in the flat buffer, their selection, and JSON output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from usbyte._core import Profile, TensorSpec
from usbyte.errors import UsageError

#: Name of the control tensor, which the optimizer puts first in the flat buffer.
CONTROL_TENSOR = "usbyte.used"

_DIGITS = 9  # of times in seconds
_MOST_ELEMENTS = 1 << 56  # The bytes of a job fit into 64 bits.


def tensor_specs(
    tensors: Iterable[tuple[str, int, str]], rows: Mapping[str, int] | None = None
) -> list[TensorSpec]:
    """Builds tensors that follow each other in the flat buffer without gaps.

    Args:
        tensors: Name, number of elements and dtype of each dense tensor.
        rows: Rows of the tensors that are matrices, by name; the other tensors have one row.

    Raises:
        UsageError: The tensors have more elements than a plan can have.
    """
    specs, offset = [], 0
    for name, numel, dtype in tensors:
        offset += numel
        check_size(offset)
        specs.append(TensorSpec(name, numel, dtype, offset - numel, (rows or {}).get(name, 1)))
    return specs


def check_size(elements: int) -> None:
    """Raises UsageError if gradients of so many elements are too large for a plan."""
    if elements > _MOST_ELEMENTS:
        raise UsageError(f"gradients of more than {_MOST_ELEMENTS} elements cannot be planned")


def dense(profile: Profile) -> Profile:
    """Returns the profile without sparse gradients, which no policy plans."""
    return filter_tensors(profile, lambda t: not t.sparse)


def without_flags(profile: Profile, model: str | None = None) -> Profile:
    """Returns the profile without the control tensor and without sparse gradients.

    Args:
        profile: A profile that was recorded under usbyte.
        model: The model name of the result; None keeps the profile's.
    """
    return filter_tensors(profile, lambda t: t.name != CONTROL_TENSOR and not t.sparse, model)


def filter_tensors(
    profile: Profile, selects: Callable[[TensorSpec], bool], model: str | None = None
) -> Profile:
    """Returns the profile with the selected tensors only, moved together.

    Args:
        profile: Returned itself if all tensors are selected and `model` is None.
        selects: Whether a tensor stays in the profile.
        model: The model name of the result; None keeps the profile's.
    """
    tensors = profile.tensors  # Each access of this attribute converts from C++ anew.
    selected = [i for i, t in enumerate(tensors) if selects(t)]
    if len(selected) == len(tensors) and model is None:
        return profile
    specs, offset = [], 0
    for t in (tensors[i] for i in selected):
        specs.append(TensorSpec(t.name, t.numel, t.dtype, offset, t.rows, t.width))
        offset += t.numel

    def times_of_selected(times: Sequence[float]) -> list[float]:
        return [times[i] for i in selected] if times else []

    return Profile(
        specs,
        times_of_selected(profile.need_s),
        times_of_selected(profile.ready_s),
        profile.step_s,
        profile.update_s,
        profile.model if model is None else model,
        times_of_selected(profile.need_spread_s),
        times_of_selected(profile.ready_spread_s),
    )


def dumps(profile: Profile, recorded: Mapping[str, object]) -> str:
    """Writes a profile as JSON that `usbyte.planning.profiles.load` reads.

    Each tensor is one line of text; times are rounded to a nanosecond.

    Args:
        profile: The profile.
        recorded: How it was recorded, for people who read the file: machine, versions, date.
    """
    root = json.loads(profile.to_json(), parse_float=lambda text: round(float(text), _DIGITS))
    rows = ",\n".join(json.dumps(row) for row in root.pop("tensors"))
    head = json.dumps({**root, "recorded": dict(recorded)})
    return f'{head[:-1]},\n"tensors": [\n{rows}\n]}}\n'

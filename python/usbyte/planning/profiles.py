# SPDX-License-Identifier: Apache-2.0
"""Profiles to plan for and to replay: recorded jobs, made-up jobs, published traces, files."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from usbyte._core import Plan, Profile, TensorSpec
from usbyte._util import files
from usbyte.errors import Error, UsageError
from usbyte.planning.layout import (
    CONTROL_TENSOR,
    check_size,
    dense,
    filter_tensors,
    tensor_specs,
)

#: Names of the made-up profiles; accepted in place of a file name.
MADE_UP = ("vgg16-half", "vgg16-even")
#: Names of the recorded profiles; `recorded/README.md` tells how they were recorded.
RECORDED = ("vgg16", "resnet50", "bert-base", "gpt2")
_FOLDER = Path(__file__).parent / "recorded"

_MOST_FACTOR = 1e9
_MOST_SECONDS = 1e9  # Thirty years. Sums and products of longer times could overflow.
_SHAPED = 0.01  # The size of a scaled matrix may differ by this share, to keep its rows.

_WIDTHS = [32, 32, 64, 64, 128, 128, 128, 256, 256, 256, 256, 256, 256]
_SIDES = [224, 224, 112, 112, 56, 56, 56, 28, 28, 28, 14, 14, 14]
_DENSE = [(256 * 7 * 7, 1740), (1740, 1740), (1740, 1000)]


def vgg16_half(compute_s: float = 1.5, *, even: bool = False) -> Profile:
    """Makes a profile of the sixteen layers of VGG-16 at half width: 120 MB of fp32 gradients.

    Backward takes twice as long as forward. Simonyan and Zisserman, "Very Deep Convolutional
    Networks for Large-Scale Image Recognition", 2015.

    Args:
        compute_s: Seconds of forward and backward together.
        even: Whether all layers take the same time ("vgg16-even"). Otherwise the time of a layer is
            proportional to its multiply-adds.
    """
    layers: list[tuple[str, int, int, int]] = []  # Name, weights, biases, multiply-adds.
    inputs = 3
    for i, (width, side) in enumerate(zip(_WIDTHS, _SIDES, strict=True)):
        weights = inputs * width * 9
        layers.append((f"conv{i + 1}", weights, width, weights * side * side))
        inputs = width
    layers += [(f"fc{i + 1}", a * b, b, a * b) for i, (a, b) in enumerate(_DENSE)]
    shares = [1 if even else work for *_, work in layers]
    scale = compute_s / 3 / sum(shares)
    rows, ready_s, need = [], compute_s, 0.0
    for (name, weights, biases, _), share in zip(layers, shares, strict=True):
        rows += [
            (f"{name}.weight", weights, need, ready_s),
            (f"{name}.bias", biases, need, ready_s),
        ]
        need += share * scale
        ready_s -= 2 * share * scale
    return _profile(MADE_UP[even], rows)


def read_trace(text: str) -> Profile:
    """Converts a published backward trace to a profile.

    The trace is JSON with the columns tensor, elements and backward_gap_us, and with rows in
    backward order. A gap is the time since the gradient before became ready, in microseconds. The
    elements are fp32.

    Such traces have no forward times, so the forward time of a tensor is set to half of its gap.
    Consecutive tensors of one module ("conv1.weight", "conv1.bias") are needed at the same time,
    when the module's forward begins.

    Args:
        text: The text of the trace.

    Raises:
        UsageError: The text is not such a trace.
    """
    try:
        root = json.loads(text)
        if root["columns"] != ["tensor", "elements", "backward_gap_us"]:
            raise ValueError(f"its columns are {root['columns']}")
        if root.get("order", "backward") != "backward":
            raise ValueError(f"its order is {root['order']!r}")
        trace = [(str(name), int(numel), float(gap) * 1e-6) for name, numel, gap in root["tensors"]]
        if not trace or any(gap < 0 for *_, gap in trace):
            raise ValueError("it is empty or has a negative gap")
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"not a trace: {error}; it needs columns tensor, elements, backward_gap_us and rows in "
            "backward order"
        ) from error
    forward_s = sum(gap for *_, gap in trace) / 2
    ready, ready_s = forward_s, []
    for *_, gap in trace:
        ready += gap
        ready_s.append(ready)
    rows: list[tuple[str, int, float, float]] = []
    now, need, module = 0.0, 0.0, None
    for (name, numel, gap), ready in zip(reversed(trace), reversed(ready_s), strict=True):
        owner = name.rpartition(".")[0] or name
        if owner != module:
            module, need = owner, now
        rows.append((name, numel, need, ready))
        now += gap / 2
    return _profile(str(root.get("model", "")), rows)


def load(source: str) -> Profile:
    """Reads the dense gradients of a profile, which are those that a policy plans.

    Args:
        source: A file, or one of `MADE_UP` and `RECORDED`.

    Raises:
        UsageError: The profile has no dense gradients, or `load_whole` cannot read it.
    """
    job = dense(load_whole(source))
    if not job.tensors:
        raise UsageError(f"the profile '{source}' has no dense gradients, so there is no plan")
    return job


def file_of(source: str) -> Path | None:
    """Returns the file that `load_whole` reads for `source`; None for a made-up profile."""
    if source in MADE_UP:
        return None
    return _FOLDER / f"{source}.json" if source in RECORDED else Path(source)


def load_whole(source: str) -> Profile:
    """Reads a profile with all its gradients, sparse ones included.

    Args:
        source: A file with a usbyte profile or a published trace, or one of `MADE_UP` and
            `RECORDED`.

    Raises:
        UsageError: The file cannot be read, has neither a profile nor a trace, or contradicts
            itself.
    """
    path = file_of(source)
    if path is None:
        return vgg16_half(even=source == "vgg16-even")
    try:
        text = files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the profile '{source}': {error}; give a JSON file or one of "
            + ", ".join((*MADE_UP, *RECORDED))
        ) from error
    root: Any = None
    with suppress(ValueError, RecursionError):  # Profile.from_json has the better message.
        root = json.loads(text)
    read = read_trace if isinstance(root, dict) and "columns" in root else Profile.from_json
    try:
        job = read(text)
    except Error as error:
        raise UsageError(f"'{source}': {error}") from error
    spreads_s = [*job.need_spread_s, *job.ready_spread_s]
    longest_s = max([job.step_s, job.update_s, *job.need_s, *job.ready_s, *spreads_s])
    if longest_s > _MOST_SECONDS:
        raise UsageError(
            f"'{source}': a time of {longest_s:g} s is too long; times are in seconds, and "
            f"{_MOST_SECONDS:g} s at most"
        )
    return job


def scaled(profile: Profile, time: float = 1.0, size: float = 1.0) -> Profile:
    """Returns the profile with all times and all tensor sizes multiplied.

    Args:
        profile: The profile.
        time: Factor of every time, updates included; above 0 and up to 1e9.
        size: Factor of every tensor's elements; above 0 and up to 1e9. Each tensor has at least one
            element. A matrix keeps its number of rows, unless that changes its size by more than
            1 %; it then becomes a vector. A sparse gradient keeps its rows.

    Raises:
        UsageError: A factor is out of range, or the result has too many elements for a plan.
    """
    if not (0 < time <= _MOST_FACTOR and 0 < size <= _MOST_FACTOR):
        raise UsageError(
            f"cannot scale by time {time:g} and bytes {size:g}; both must be above 0, and "
            f"{_MOST_FACTOR:g} at most"
        )
    specs, offset, elements = [], 0, 0
    for t in profile.tensors:
        if t.sparse:
            numel, rows, width = 0, t.rows, max(1, round(t.width * size))
        else:
            numel, rows, width = max(1, round(t.numel * size)), 1, 0
            shaped = t.rows * round(t.numel / t.rows * size)
            if abs(shaped - numel) <= _SHAPED * numel:
                numel, rows = shaped, t.rows
        elements += numel + rows * width
        check_size(elements)
        specs.append(TensorSpec(t.name, numel, t.dtype, offset, rows, width))
        offset += numel
    return Profile(
        specs,
        [need * time for need in profile.need_s],
        [ready * time for ready in profile.ready_s],
        profile.step_s * time,
        profile.update_s * time,
        profile.model,
        [spread * time for spread in profile.need_spread_s],
        [spread * time for spread in profile.ready_spread_s],
    )


def matched(profile: Profile, plan: Plan) -> Profile:
    """Returns the profile with the tensors of a plan, in the plan's order.

    If the plan has the control tensor, the result has it too: needed first, ready last. Sparse
    gradients that are not in the plan are left out.

    Raises:
        UsageError: The plan was made for other tensors.
    """
    job = filter_tensors(profile, lambda t: t.name != CONTROL_TENSOR)
    tensors, need_s, ready_s = job.tensors, job.need_s, job.ready_s
    index = {t.name: i for i, t in enumerate(tensors)}
    rows = []
    for spec in plan.tensors:
        i = index.pop(spec.name, None)
        if spec.name == CONTROL_TENSOR:
            rows.append((0.0, profile.backward_end_s))
        elif i is not None and _size(tensors[i]) == _size(spec):
            rows.append((need_s[i], ready_s[i]))
        else:
            raise UsageError(
                f"the plan's tensor '{spec.name}' of {_size(spec)} is not in the profile; "
                "give the profile that the plan was made from"
            )
    missed = [name for name, i in index.items() if not tensors[i].sparse]
    if missed:
        raise UsageError(
            f"the profile's tensor '{missed[0]}' is not in the plan; give the profile that "
            "the plan was made from"
        )
    needs, readies = [row[0] for row in rows], [row[1] for row in rows]
    return Profile(plan.tensors, needs, readies, job.step_s, job.update_s, job.model)


def _size(tensor: TensorSpec) -> str:
    if tensor.sparse:
        return f"{tensor.rows} sparse rows of {tensor.width} elements"
    return f"{tensor.numel} elements"


def _profile(model: str, rows: list[tuple[str, int, float, float]]) -> Profile:
    """Makes a profile from rows of (name, fp32 elements, need_s, ready_s), in forward order."""
    specs = tensor_specs((name, numel, "float32") for name, numel, *_ in rows)
    return Profile(specs, [row[2] for row in rows], [row[3] for row in rows], model=model)

# SPDX-License-Identifier: Apache-2.0
"""Sizes and times of gradients that authors of planners have published."""

from __future__ import annotations

import json
from pathlib import Path

from usbyte import _core
from usbyte.planning.layout import tensor_specs

_FOLDER = Path(__file__).parent / "published_inputs"
NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_all() -> dict[str, _core.Profile]:
    """Reads all, by name."""
    return {name: load(name) for name in NAMES}


def load(name: str) -> _core.Profile:
    """Reads `published_inputs/NAME.json`; its README describes the keys."""
    root = json.loads((_FOLDER / f"{name}.json").read_text())
    elements, backward_s = root["elements"], [us * 1e-6 for us in root["backward_us"]]
    forward_s = [time_s / 2 for time_s in backward_s]
    if "forward_s" in root:
        forward_s = [root["forward_s"] * numel / sum(elements) for numel in elements]
    specs = tensor_specs((f"t{i}", numel, "float32") for i, numel in enumerate(elements))
    need_s, now_s = [], 0.0
    for time_s in forward_s:
        need_s.append(now_s)
        now_s += time_s
    ready_s = []
    for time_s in reversed(backward_s):
        now_s += time_s
        ready_s.append(now_s)
    return _core.Profile(specs, need_s, ready_s[::-1], model=root["model"])

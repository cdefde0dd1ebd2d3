# SPDX-License-Identifier: Apache-2.0
"""The fuzz targets in Python run, on what they begin with and on damaged copies of it."""

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

TARGETS = sorted((Path(__file__).parents[1] / "fuzz" / "python").glob("fuzz_*.py"))
DAMAGED = 100  # copies of each seed


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def damaged(seed: bytes, source: random.Random) -> bytes:
    data = bytearray(seed)
    for _ in range(source.randrange(1, 4)):
        at = source.randrange(len(data) + 1)
        data[at : at + source.randrange(4)] = source.randbytes(source.randrange(4))
    return bytes(data)


@pytest.mark.parametrize("path", TARGETS, ids=lambda path: path.stem)
def test_a_target_takes_whatever_comes(path: Path) -> None:
    target = load(path)
    source = random.Random(0)
    for seed in [b"", *getattr(target, "SEEDS", [])]:
        target.one_input(seed)
        for _ in range(DAMAGED):
            target.one_input(damaged(seed, source))

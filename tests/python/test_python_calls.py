# SPDX-License-Identifier: Apache-2.0
"""A step takes few Python calls for each parameter."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import usbyte.torch as ub
from _ranks import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def counts(rank, size):
    ub.init()
    sys.path.insert(0, str(BENCHMARKS))
    count = importlib.import_module("python_calls").calls_per_parameter
    return [sum(count(overlap, 20, 3).values()) for overlap in ("backward", "forward")]


def test_a_parameter_takes_few_calls_in_a_step():
    # Comprehensions count as calls before Python 3.12.
    for backward, forward in run_ranks(2, counts, env={"USBYTE_LEARNING_STEPS": "3"}):
        assert 2 <= backward <= 6
        assert 2 <= forward <= 9

# SPDX-License-Identifier: Apache-2.0
"""A few random programs. `make fuzz-programs` runs fresh ones."""

from __future__ import annotations

import _programs
from _ranks import run_ranks


def test_random_programs_equal_their_reference():
    for ran, found in run_ranks(2, _programs.fuzz, 0, 4, 1e9, timeout=120, env=_programs.ENV):
        assert (ran, found) == (4, [])


def without_averages(rank, size):
    _programs.Reference.synchronize = lambda self: None
    return _programs.fuzz(rank, size, 3, 1, 1e9)[1]


def test_other_gradients_are_found():
    for found in run_ranks(2, without_averages, env=_programs.ENV):
        assert found
        assert all(text.startswith("program 3, rank ") for text in found)

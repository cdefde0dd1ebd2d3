# SPDX-License-Identifier: Apache-2.0
"""A long training under random plans, delays and checkpoints. `make soak` runs 5,000 steps."""

from __future__ import annotations

import pytest
import torch

from _ranks import run_ranks
from _soak import soak

RANKS = 4
GROWTH_MIB = 24  # pages that allocators keep come and go; a leak of 1 KiB a step would be 5 MiB


def run(steps: int, seed: int, seconds: float) -> dict[str, list[float]]:
    found = run_ranks(RANKS, soak, steps, seed, False, timeout=seconds)
    assert "random" in found[0]["plans"]
    for rank, row in enumerate(found):
        early, late = row["figures"]
        print(f"rank {rank}: after a tenth {early}, at the end {late}")
        assert late["descriptors"] <= early["descriptors"]
        assert late["threads"] <= early["threads"]
        assert late["native"] <= early["native"]
        assert late["mib"] - early["mib"] <= GROWTH_MIB
    return found[0]["state"]


@pytest.mark.soak
def test_5000_steps():
    run(5000, 1, 1500)


def test_a_few_steps_of_the_soak_end_as_with_ddp():
    found = run(150, 2, 120)
    expected = run_ranks(RANKS, soak, 150, 2, True, timeout=120)[0]["state"]
    for name, value in expected.items():
        assert torch.allclose(torch.tensor(found[name]), torch.tensor(value), rtol=1e-9), name

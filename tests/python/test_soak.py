"""A long training under random plans, delays and checkpoints. `make soak` runs 5,000 steps."""

from __future__ import annotations

import pytest
import torch

from _ranks import run_ranks
from _soak import soak

RANKS = 4
GROWTH_MIB = 24  # pages that allocators keep come and go; a leak of 1 KiB a step would be 5 MiB


def run(steps: int, seed: int, seconds: float) -> None:
    found = run_ranks(RANKS, soak, steps, seed, False, timeout=seconds)
    expected = run_ranks(RANKS, soak, steps, seed, True, timeout=seconds)
    for name, value in expected[0]["state"].items():
        got, want = torch.tensor(found[0]["state"][name]), torch.tensor(value)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-7), name
    assert "random" in found[0]["plans"]
    for rank, row in enumerate(found):
        early, late = row["figures"]
        print(f"rank {rank}: after a tenth {early}, at the end {late}")
        assert late["descriptors"] <= early["descriptors"]
        assert late["threads"] <= early["threads"]
        assert late["native"] <= early["native"]
        assert late["mib"] - early["mib"] <= GROWTH_MIB


@pytest.mark.soak
def test_5000_steps():
    run(5000, 1, 1500)


def test_a_few_steps_of_the_soak():
    run(150, 2, 120)

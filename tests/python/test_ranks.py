# SPDX-License-Identifier: Apache-2.0
"""The helper that runs ranks."""

import os
import signal
import sys
import time

import pytest

from _ranks import run_ranks


def _echo(rank, size, word):
    return [rank, size, word, os.environ["RANK"], os.environ["EXTRA"]]


def _rank_one_raises(rank, size):
    if rank == 1:
        raise ValueError("no such luck")
    time.sleep(0 if rank == 2 else 60)


def _hang(rank, size):
    time.sleep(60)


def _rank_one_dies(rank, size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _imported(rank, size):
    return sorted({"torch", "torch._dynamo", "usbyte.torch"} & sys.modules.keys())


def test_ranks_begin_with_torch_imported():
    assert run_ranks(1, _imported) == [["torch", "torch._dynamo", "usbyte.torch"]]


def test_results_come_in_rank_order():
    results = run_ranks(2, _echo, "hello", env={"EXTRA": "more"})
    assert results == [[0, 2, "hello", "0", "more"], [1, 2, "hello", "1", "more"]]
    assert run_ranks(1, "test_ranks:_echo", "by name", env={"EXTRA": ""})[0][2] == "by name"


def test_one_failure_ends_all_ranks():
    began = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        run_ranks(3, _rank_one_raises)
    assert time.monotonic() - began < 120  # long before the timeout, thrice 60 s
    text = str(failure.value)
    assert "rank 1 failed" in text
    assert "ValueError: no such luck" in text
    assert "rank 0 had not ended" in text
    assert "rank 2" not in text


def test_a_timeout_shows_where_the_ranks_are():
    with pytest.raises(AssertionError, match=r"rank 0 had not ended:(.|\n)*in _hang"):
        run_ranks(1, _hang, timeout=2)


def test_a_rank_may_die_only_if_expected():
    assert run_ranks(2, _rank_one_dies, dies=[1]) == [0, None]
    with pytest.raises(AssertionError, match="rank 1 was killed by SIGKILL"):
        run_ranks(2, _rank_one_dies)

# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings of the public functions run as they stand."""

import doctest
import inspect
import subprocess
import sys

import pytest

import usbyte.torch as ub

NAMES = [
    "Compression",
    "DistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "join",
    "profile",
    "size",
]


def run_examples():
    """Runs the examples of each name, all in one run; prints the names whose examples are right."""
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for name in NAMES:
        [example] = finder.find(getattr(ub, name), name, globs={})
        failed, tried = runner.run(example)
        if tried and not failed:
            print("right:", name)
    ub.shutdown()


@pytest.fixture(scope="module")
def output():
    """What a process of its own prints, so that `init` and `shutdown` disturb no other test."""
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_as_it_stands(output, name):
    assert f"right: {name}\n" in output, output


def test_all_lists_functions_classes_and_constants_but_no_modules():
    assert sorted(ub.__all__) == sorted(set(ub.__all__))
    assert not [name for name in ub.__all__ if inspect.ismodule(getattr(ub, name))]


def test_other_public_names_are_packages_of_usbyte():
    others = {name for name in vars(ub) if not name.startswith("_")} - set(ub.__all__)
    assert not [name for name in others if not inspect.ismodule(getattr(ub, name))]
    assert all(getattr(ub, name).__name__ == f"usbyte.torch.{name}" for name in others)


if __name__ == "__main__":
    run_examples()

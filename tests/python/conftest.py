# SPDX-License-Identifier: Apache-2.0
"""Fixtures and options of several tests."""

import pytest

import usbyte.torch as ub


def pytest_addoption(parser):
    """Adds where test_reliability.py writes its page."""
    parser.addoption("--reliability", metavar="PATH", help="write docs/reliability.md there")


@pytest.fixture
def single():
    """A run of one process."""
    ub.init()
    yield
    ub.shutdown()

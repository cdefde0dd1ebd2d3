"""Fixtures of several tests."""

import pytest

import usbyte.torch as ub


@pytest.fixture
def single():
    """A run of one process."""
    ub.init()
    yield
    ub.shutdown()
